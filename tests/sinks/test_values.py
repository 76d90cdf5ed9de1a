"""Value norms at sinks, against a planted drain and the results of heads."""

import numpy as np
import pytest
import torch
from asked import TWO as PROMPTS
from tracks import planted

import sinklens
from sinklens.sinks.values import values_at, written_norms


def test_a_planted_drain_is_a_no_op_and_an_ordinary_value_is_not():
    """Step 0: a sink with a value of 0.1 medians; step 1: one with 2 medians. Padding does not count."""
    score = np.full((2, 6), 0.5)
    score[0, 1], score[1, 3] = 6, 6
    norm = np.ones((2, 6))
    norm[0, 1], norm[1, 3], norm[:, 0] = 0.1, 2.0, 100
    track = planted(score, real=[False] + [True] * 5, value_norm=norm)
    found = values_at(track, track.detect())
    assert (found["sinks"].values.tolist(), found["value_ratio"].values, found["no_op"].values) == (
        [2],
        pytest.approx(1.05),
        pytest.approx(0.5),
    )
    nothing = values_at(track, track.detect() & False)
    assert nothing["sinks"].values.tolist() == [0]
    assert nothing[["value_ratio", "no_op"]].to_array().isnull().all()


def test_written_norms_by_hand():
    """One value head, two query heads. Head 0 keeps the first component, head 1 doubles the second."""
    value = torch.tensor([[[3.0, 0.0]], [[0.0, 4.0]], [[3.0, 4.0]]])  # [pos, kv_head, d_head]: norms 3, 4, 5
    w_o = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [[0.0, 0.0, 0.0], [0.0, 0.0, 2.0]]])
    assert written_norms(value, w_o).tolist() == [[3.0, 0.0, 3.0], [0.0, 8.0, 8.0]]
    assert written_norms(value[None], w_o).shape == (1, 2, 3)


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-sdar"])
def test_written_vectors_sum_to_the_result_of_the_head(name):
    """A query that attends to one key writes that key's vector: its norm is that of ``hook_result``."""
    model = sinklens.load(name)
    ids = torch.tensor([model.tokenizer(PROMPTS[0])["input_ids"]])
    key, seen, at = 3, {}, "blocks.1.attn"

    def only(pattern, hook):
        pattern[:] = 0
        pattern[..., key] = 1
        return pattern

    def keep(value, hook):
        seen[hook.name] = value.detach().clone()

    model.run_with_hooks(
        ids, fwd_hooks=[(f"{at}.hook_pattern", only), (f"{at}.hook_result", keep), (f"{at}.hook_v", keep)]
    )
    expected = seen[f"{at}.hook_result"][0].norm(dim=-1)  # [query, head]: all queries alike
    found = written_norms(seen[f"{at}.hook_v"][0], model.W_O[1])[:, key]
    np.testing.assert_allclose(found.expand_as(expected), expected, rtol=1e-4)
