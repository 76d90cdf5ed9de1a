"""Sink scores of several layers, computed together, are those of each layer alone."""

import pytest
import torch

from sinklens.hooks.attention import layer_sums
from sinklens.hooks.attention.column_sums import column_sums, log_sum_exp
from sinklens.hooks.attention.layer_sums import LayerSums, Waiting
from sinklens.hooks.points import Point, Watch


@pytest.mark.parametrize("together", [1, 1 << 13, 1 << 30])
@pytest.mark.parametrize("kinds", ["alike", "masks of one row", "queries that count", "lengths"])
def test_layers_together_equal_each_alone(kinds, together, monkeypatch):
    monkeypatch.setattr(layer_sums, "TOGETHER", together)
    sums, expected = LayerSums(rows=2), {}
    for layer in range(5):
        length = 20 + layer // 2 if kinds == "lengths" else 20
        query, key = torch.randn(2, 3, 4, length, 8).unbind()
        mask = torch.randn(3, 4, 1, length) if kinds == "masks of one row" and layer != 3 else None
        real = torch.rand(3, length) < 0.7 if kinds == "queries that count" else None
        lse, place = log_sum_exp(query, key, 0.3, mask), Point(Watch())
        sums.add(place, Waiting(query, key, None if layer == 4 else lse, 0.3, mask, real, False))
        expected[place] = column_sums(query, key, lse, 0.3, mask, real)[:2]
    sums.end_step()
    assert sums.latest.keys() == expected.keys()
    for place, (scores, forward_pass) in sums.latest.items():
        assert forward_pass is place.forward_pass
        torch.testing.assert_close(scores, expected[place], atol=1e-5, rtol=1e-5)
