"""Each decision agrees with a plain restatement of it."""

import math

import pytest
import torch

from sinklens.sampling import decisions


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


def test_rnd1s_schedule_rounds_the_quotient_to_float32():
    """22 · float32(13 / 22) is below 13; exact arithmetic would leave 13 masks."""
    assert decisions.entropy_schedule(22, 22)[7:10] == [14, 12, 12]
    differing = 0
    for masks in range(1, 25):
        for steps in range(1, 25):
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


@pytest.mark.parametrize("rows", [0, 1, 7, 20])
@pytest.mark.parametrize("values", [1, 30, 10**6])
def test_probabilities_by_slices_are_bit_identical(monkeypatch, rows, values):
    monkeypatch.setattr(decisions, "SLICE", values)
    logits, candidates = 20 * torch.randn(rows, 11), torch.randint(11, (rows,))
    complete = decisions.probability(logits.softmax(dim=-1, dtype=torch.float64), candidates)
    assert torch.equal(decisions.probability_by_slices(logits, candidates), complete)


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
