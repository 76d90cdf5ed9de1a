"""Nulls of motion on planted patterns, against loops, and on models whose rows cannot change."""

import numpy as np
import pytest
import torch
from asked import TWO as PROMPTS

import sinklens
from sinklens.analyses.nulls import FixedQueries, causal_null
from sinklens.sinks import Record, motion

ATTRS = {"model": "planted"}


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_the_null_is_the_softmax_of_the_allowed_keys_summed_row_by_row():
    scores = np.random.default_rng(0).normal(size=(2, 3, 7, 7))
    track = causal_null(softmax(scores), np.arange(7) + 5, 3, ATTRS)
    assert track.data["score"].shape == (1, 4, 2, 3, 7)
    for step in range(4):
        for layer in range(2):
            for head in range(3):
                expected = np.zeros(7)
                for query in range(3 + step):
                    row = scores[layer, head, query, : query + 1]
                    expected[: query + 1] += np.exp(row) / np.exp(row).sum()
                found = track.data["score"].to_numpy()[0, step, layer, head]
                np.testing.assert_allclose(found[: 3 + step], expected[: 3 + step], rtol=1e-5)
                assert np.isnan(found[3 + step :]).all()
        assert track.data["token_id"].to_numpy()[0, step].tolist() == [5, 6, 7, *range(8, 8 + step)] + [-1] * (4 - step)


def test_rows_that_attend_to_nothing_in_part_keep_that_part():
    """softmax + 1: e_j / (1 + Σ e), masked before the normalization. Sigmoid: keys do not compete."""
    weights = np.exp(np.random.default_rng(1).normal(size=(1, 1, 5, 5)))
    found = causal_null(weights / (1 + weights.sum(-1, keepdims=True)), np.arange(5), 4, ATTRS)
    expected = sum(
        np.pad(row[: i + 1] / (1 + row[: i + 1].sum()), (0, 4 - i)) for i, row in enumerate(weights[0, 0, :4])
    )
    np.testing.assert_allclose(found.data["score"].to_numpy()[0, 0, 0, 0, :4], expected[:4], rtol=1e-5)
    sigmoid = weights / (1 + weights)
    found = causal_null(sigmoid, np.arange(5), 4, ATTRS, softmax=False)
    expected = np.tril(sigmoid[0, 0])[:4].sum(0)[:4]
    np.testing.assert_allclose(found.data["score"].to_numpy()[0, 0, 0, 0, :4], expected, rtol=1e-5)


def test_one_strong_key_is_static_and_the_strongest_key_moves_when_later_rows_outweigh_the_first():
    """Head 0: every query attends to key 0. Head 1: to keys 0, 1, 2, 2, 2, 2, so that key 2 leads after four rows."""
    pattern = np.zeros((1, 2, 6, 6))
    pattern[0, 0, :, 0] = 1
    pattern[0, 1, range(6), [0, 1, 2, 2, 2, 2]] = 1
    track = causal_null(pattern, np.arange(6), 2, ATTRS)
    found = motion.jumps(track)
    assert [found[name].to_numpy()[0, 0].tolist() for name in ("changes", "pairs")] == [[0, 1], [3, 3]]
    assert float(motion.static_share(track)[0]) == 0.5


def test_the_null_of_an_autoregressive_run_is_the_run(tiny_llama):
    record = Record(patterns=[(5, layer) for layer in range(tiny_llama.cfg.n_layers)])
    run = sinklens.generate(tiny_llama, PROMPTS[0], record_sinks=record, gen_length=6)
    ids = run.tokens[0].numpy()
    pattern = np.stack([run.patterns[5, layer][0].numpy() for layer in range(tiny_llama.cfg.n_layers)])
    pattern = np.pad(pattern, [(0, 0), (0, 0), (0, 1), (0, 1)])  # the last token is never read
    null = causal_null(pattern, ids, run.prompt_length, run.sinks.data.attrs)
    assert null.steps == run.sinks.steps == 6
    np.testing.assert_allclose(null.data["score"], run.sinks.data["score"], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "settings"), [("tiny_llada", {}), ("tiny_llama", {}), ("tiny_llama", {"use_cache": False})]
)
def test_fixed_scores_are_the_sums_of_the_chosen_rows(shipped, settings):
    members = shipped.encode(PROMPTS)[1]
    members[:, -3] = False
    record = Record([FixedQueries(members)], patterns=[(2, 1)])
    run = sinklens.generate(shipped, PROMPTS, record_sinks=record, gen_length=4, **settings)
    pattern = run.patterns[2, 1]
    expected = torch.stack(
        [rows[:, chosen.nonzero()[:, 0]].sum(1) for rows, chosen in zip(pattern, members, strict=True)]
    )
    found = run.sinks["fixed_score"].to_numpy()[:, 2, 1]
    np.testing.assert_allclose(found[..., : expected.shape[-1]], expected, atol=1e-5)
    assert np.isnan(found[..., expected.shape[-1] :]).all()
