"""The study of positions that see hardly anything, against attention with a mask written out."""

import numpy as np
import pytest
import torch

from sinklens.analyses.alone import SEES, Alone

IDS = list(range(20, 41))
SEEN = {
    "itself": {10},
    "one other key": {9},
    "itself and three keys": {10, 4, 9, 15},
}


@pytest.mark.parametrize("sees", ["everything", "itself", "one other key", "itself and three keys"])
def test_only_the_queries_of_the_position_see_less(sees, tiny_llada):
    found = Alone().run(tiny_llada, [IDS]).measured["tiny-llada"].isel(prompt=0).sel(place="middle", sees=sees)

    def hide(scores, hook):
        hidden = [key for key in range(len(IDS)) if key not in SEEN.get(sees, range(len(IDS)))]
        scores[:, :, 10, hidden] = -torch.inf
        return scores

    with tiny_llada.hooks(fwd_hooks=[(lambda name: name.endswith("hook_attn_scores"), hide)]):
        _, cache = tiny_llada.run_with_cache(torch.tensor([IDS]))
    sums = torch.stack([cache[f"blocks.{layer}.attn.hook_pattern"][0].sum(dim=-2) for layer in range(4)])
    np.testing.assert_allclose(found["share"], sums[..., 10].mean() / 21, rtol=1e-4)
    np.testing.assert_allclose(found["strongest"], (sums.argmax(dim=-1) == 10).float().mean(), rtol=1e-6)


def test_a_causal_model_is_only_read_as_it_is(tiny_llama):
    found = Alone().run(tiny_llama, [IDS]).measured["tiny-llama"].isel(prompt=0)
    assert found["share"].notnull().sel(sees="everything").all()
    assert found["share"].isnull().drop_sel(sees="everything").all()
    assert len(found["sees"]) == len(SEES)
