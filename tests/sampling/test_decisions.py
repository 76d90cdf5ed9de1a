"""Each decision agrees with a plain restatement of it."""

import math

import pytest
import torch

from sinklens.sampling import decisions
from sinklens.sampling.decisions import Truncation


@pytest.mark.parametrize(
    ("masked", "steps", "expected"), [(8, 4, [2, 2, 2, 2]), (9, 4, [3, 2, 2, 2]), (3, 4, [1, 1, 1, 0])]
)
def test_lladas_schedule_divides_evenly_and_puts_the_remainder_first(masked, steps, expected):
    assert [counts[0] for counts in decisions.even_schedule(torch.tensor([masked]), steps)] == expected


def test_lladas_schedule_counts_each_row_separately():
    assert decisions.even_schedule(torch.tensor([4, 2]), 2) == [[2, 1], [2, 1]]


def test_dreams_schedule_follows_its_times_and_commits_the_rest_at_the_last_step():
    times = decisions.dream_times(4, 1e-3)
    left, taken = 24, []
    for step in range(4):
        count = decisions.dream_schedule(torch.tensor([left]), times, step)[0]
        t, s = 1 - step * (1 - 1e-3) / 4, 1 - (step + 1) * (1 - 1e-3) / 4
        assert count == (left if step == 3 else math.floor(left * (1 - s / t) + 1e-6))
        taken.append(count)
        left -= count
    assert left == 0
    assert sum(taken) == 24


def test_without_temperature_the_most_likely_token_is_proposed():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    assert decisions.gumbel_candidates(logits, 0.0, None).tolist() == [1, 0]
    assert decisions.categorical_candidates(logits.softmax(-1), None).tolist() == [1, 0]


def test_gumbel_noise_at_temperature_one_samples_from_the_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0])
    noise = torch.rand(20_000, 3, dtype=torch.float64)
    drawn = decisions.gumbel_candidates(logits.expand(20_000, 3), 1.0, noise)
    shares = torch.bincount(drawn, minlength=3) / 20_000
    torch.testing.assert_close(shares, logits.softmax(0), atol=0.015, rtol=0)


def test_gumbel_candidates_equal_the_published_quotient_form():
    logits, noise = torch.randn(50, 7), torch.rand(50, 7, dtype=torch.float64)
    quotient = logits.double().exp() / (-torch.log(noise)) ** 0.7
    assert torch.equal(decisions.gumbel_candidates(logits, 0.7, noise), quotient.argmax(-1))


def test_categorical_candidates_follow_the_distribution():
    probs = torch.tensor([0.1, 0.6, 0.3])
    drawn = decisions.categorical_candidates(probs.expand(20_000, 3), torch.rand(20_000))
    torch.testing.assert_close(torch.bincount(drawn, minlength=3) / 20_000, probs, atol=0.015, rtol=0)


def test_a_token_of_probability_zero_is_never_drawn():
    probs = torch.tensor([[0.0, 1.0, 0.0]]).expand(3, 3)
    assert decisions.categorical_candidates(
        probs, torch.tensor([0.0, 0.5, 1 - 1e-9], dtype=torch.float64)
    ).tolist() == [1, 1, 1]


def test_top_p_keeps_the_smallest_nucleus_that_reaches_p():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    kept = decisions.truncate(probs.log(), Truncation(top_p=0.7)).softmax(-1)
    torch.testing.assert_close(kept, torch.tensor([[0.625, 0.375, 0.0, 0.0]]))


def test_top_k_keeps_the_k_largest_logits_and_temperature_divides_them():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    kept = decisions.truncate(logits, Truncation(temperature=2.0, top_k=2)).softmax(-1)
    expected = torch.tensor([[-torch.inf, 1.5, 1.0]]).softmax(-1)
    torch.testing.assert_close(kept, expected)


def test_top_p_is_a_share_of_what_top_k_keeps_or_of_everything():
    """0.4 is less than 60 % of all but more than 60 % of the best two."""
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log() + torch.tensor([[0.0, 1e-3, 0.0, -1e-3]])
    after = decisions.truncate(logits, Truncation(top_p=0.6, top_k=2)).softmax(-1)
    first = decisions.truncate(logits, Truncation(top_p=0.6, top_k=2, top_p_first=True)).softmax(-1)
    assert (after > 0).tolist() == [[True, False, False, False]]
    assert (first > 0).tolist() == [[True, True, False, False]]


def test_rnd1s_schedule_rounds_the_quotient_to_float32():
    """22 · float32(13 / 22) is below 13; exact arithmetic would leave 13 masks."""
    assert decisions.entropy_schedule(22, 22)[7:10] == [14, 12, 12]
    differing = 0
    for masks in range(1, 65):
        for steps in range(1, 65):
            found = decisions.entropy_schedule(masks, steps)
            expected = [int((torch.tensor(masks) * (left / steps)).long()) for left in range(steps - 1, -1, -1)]
            assert found == expected
            differing += found != [masks * left // steps for left in range(steps - 1, -1, -1)]
    assert differing > 0


def test_entropies_follow_the_floor_of_each_published_sampler():
    probs = torch.tensor([[1 - 1e-13, 1e-13, 0.0]], dtype=torch.float64)
    exact = float((probs[:, :2] * probs[:, :2].log()).sum())
    floored = float((probs * torch.tensor([0.0, math.log(1e-10), math.log(1e-10)])).sum())
    assert decisions.certainty(probs).item() == pytest.approx(exact, rel=1e-3)
    assert decisions.floored_negative_entropy(probs).item() == pytest.approx(floored, rel=0.1)


def test_confidences_of_a_known_distribution_are_exact():
    probs = torch.tensor([[0.5, 0.25, 0.25]])
    assert decisions.probability(probs, torch.tensor([1])).item() == 0.25
    assert decisions.margin(probs).item() == 0.25
    assert decisions.negative_entropy(probs).item() == pytest.approx(-1.5 * math.log(2), abs=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 7, 20])
@pytest.mark.parametrize("values", [1, 30, 10**6])
def test_probabilities_by_slices_are_bit_identical(monkeypatch, rows, values):
    monkeypatch.setattr(decisions, "SLICE", values)
    logits, candidates = 20 * torch.randn(rows, 11), torch.randint(11, (rows,))
    complete = decisions.probability(logits.softmax(dim=-1, dtype=torch.float64), candidates)
    assert torch.equal(decisions.probability_by_slices(logits, candidates), complete)


def test_the_most_confident_positions_are_committed_per_row():
    confidence = torch.tensor([[0.1, 0.9, 0.5], [0.3, -torch.inf, 0.2]])
    commit = decisions.most_confident(confidence, [1, 2], None)
    assert commit.tolist() == [[False, True, False], [True, False, True]]


def test_positions_without_a_proposal_are_never_committed():
    confidence = torch.tensor([[0.4, -torch.inf, -torch.inf]])
    assert decisions.most_confident(confidence, [3], None).tolist() == [[True, False, False]]


def test_a_threshold_commits_beyond_the_schedule():
    confidence = torch.tensor([[0.95, 0.2, 0.91, -torch.inf]])
    assert decisions.most_confident(confidence, [1], 0.9).tolist() == [[True, False, True, False]]
    assert decisions.most_confident(confidence, [1], 0.99).tolist() == [[True, False, False, False]]


def test_a_threshold_within_a_number_commits_the_best_and_none_beyond_the_number():
    confidence = torch.tensor([[0.95, 0.2, 0.91, -torch.inf], [0.4, 0.3, 0.2, 0.1], [-torch.inf] * 4])
    commit = decisions.confident_within(confidence, [1, 3, 0], 0.9)
    assert commit.tolist() == [[True, False, False, False], [True, False, False, False], [False] * 4]
    assert decisions.confident_within(confidence, [3, 3, 3], 0.25).tolist() == [
        [True, False, True, False], [True, True, False, False], [False] * 4,
    ]  # fmt: skip


def test_sampling_by_confidence_commits_the_requested_number_and_prefers_the_confident():
    confidence = torch.tensor([[2.0, 0.0, -torch.inf, 1.0]])
    first = [0, 0, 0, 0]
    for seed in range(500):
        commit = decisions.sampled_by_confidence(confidence, [1], 1.0, decisions.RowNoise(seed, [[1]]))
        assert commit.sum() == 1
        first[int(commit[0].nonzero())] += 1
    assert first[2] == 0
    assert first[0] > first[3] > first[1] > 0


def test_sampling_by_confidence_commits_the_requested_number_even_if_weights_vanish():
    """exp(−900) is 0 in float64."""
    confidence = torch.tensor([[0.95, 0.05, -torch.inf, 0.04]])
    commit = decisions.sampled_by_confidence(confidence, [3], 1e-3, decisions.RowNoise(0, [[1]]))
    assert commit.tolist() == [[True, True, False, True]]


def test_the_noise_of_a_row_depends_only_on_its_prompt_and_the_seed():
    where = torch.tensor([[True, False, True], [False, True, True]])
    both = decisions.RowNoise(3, [[5, 6], [7]]).uniform(where, dtype=torch.float64)
    alone = decisions.RowNoise(3, [[7]]).uniform(where[1:], dtype=torch.float64)
    assert torch.equal(both[2:], alone)
    other = decisions.RowNoise(4, [[7]]).uniform(where[1:], dtype=torch.float64)
    assert not torch.equal(other, alone)


def test_copies_of_a_prompt_get_different_noise():
    noise = decisions.RowNoise(0, [[5], [5]]).uniform(torch.ones(2, 4, dtype=torch.bool), dtype=torch.float64)
    assert not torch.equal(noise[:4], noise[4:])
