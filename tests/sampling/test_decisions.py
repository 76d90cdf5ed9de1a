"""Each decision agrees with a plain restatement of it."""

import math

import pytest
import torch

from sinklens.sampling import decisions


def test_a_token_of_probability_zero_is_never_drawn():
    assert decisions.categorical_candidates(
        torch.tensor([[0.0, 1.0, 0.0]]).expand(3, 3), torch.tensor([0.0, 0.5, 1 - 1e-9], dtype=torch.float64)
    ).tolist() == [1, 1, 1]


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
    assert not torch.equal(decisions.RowNoise(4, [[7]]).uniform(where[1:], dtype=torch.float64), alone)
