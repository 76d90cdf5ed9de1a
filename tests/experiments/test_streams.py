"""Similarity of layers against the formula; a planted layer that writes nothing is found."""

import numpy as np
import pytest
import torch
from building import random_ids, random_model
from watching import PADDED, short

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import layer_similarity


def streams(run, row, step):
    """Streams of one row without padding, [stream, pos, d_model]."""
    start = int((~run.real[row]).sum())
    cache = run.model.run_with_cache(run.canvas[row : row + 1, step, start:])[1]
    names = [*(f"blocks.{n}.hook_resid_pre" for n in range(3)), "blocks.2.hook_resid_post"]
    return torch.stack([cache[name][0].detach() for name in names])


def test_layers_are_compared_by_the_formula_over_the_rows_and_positions_of_a_state(worded):
    model = worded()
    run = sinklens.generate(model, PADDED, **short(model, {}))
    found = layer_similarity(run, state="prompt", steps=[1])
    parts = []
    for row in range(2):
        start = int((~run.real[row]).sum())
        parts.append(streams(run, row, 1)[:, : run.prompt_length - start])
    x = torch.cat(parts, dim=1).double().numpy()
    for first in range(4):
        for second in range(4):
            pairs = zip(x[first], x[second], strict=True)
            wanted = np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs])
            assert float(found.sel(step=1, stream=first, other=second)) == pytest.approx(wanted, rel=1e-4)


def test_a_planted_layer_that_writes_nothing_has_no_influence_and_others_have():
    model = random_model()
    layer = model.tree.hf.model.layers[1]
    layer.self_attn.o_proj.weight.data.zero_()
    layer.mlp.down_proj.weight.data.zero_()
    run = sinklens.generate(model, random_ids(), **short(model, {}))
    influence = 1 - np.diagonal(layer_similarity(run).to_numpy(), offset=1, axis1=1, axis2=2)
    assert np.abs(influence[:, 1]).max() < 1e-9
    assert influence[:, [0, 2]].min() > 1e-3
    assert np.isnan(layer_similarity(run, steps=[0], state="committed")).all()
    with pytest.raises(SettingError, match="state must be one of all, prompt, masked, committed; got 'other'"):
        layer_similarity(run, state="other")
