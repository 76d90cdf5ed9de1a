"""The numbers of docs/papers/redundant-layers.md, prompt by prompt, against networks without a layer in plain torch."""

import numpy as np
import pytest
import torch
from asked import PROMPTS
from by_hand import MASK, Change, Network

import sinklens
from sinklens.experiments import sweep
from sinklens.interventions import SkipLayers


def cost(network, run, layer):
    """KL divergence at each step, in nats, if a layer adds nothing: at masked positions, or of the next token."""
    found = []
    for canvas, one in zip(run.canvases, run.passes, strict=True):
        here = canvas == MASK
        if network.kind == "causal":
            here = torch.arange(len(canvas)) == len(canvas) - 1
        p = one.logits[here].log_softmax(-1)
        q = network(canvas, Change(skipped=[layer])).logits[here].log_softmax(-1)
        found.append(float((p.exp() * (p - q)).sum(-1).mean()))
    return found


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream", "tiny-llama"])
def test_costs_are_those_of_the_weights(script, name):
    model, network = sinklens.load(name), Network(name)
    runs = [network.decode(network.encode(prompt), steps=8) for prompt in PROMPTS]
    layers = range(network.layers)
    skips = {str(layer): SkipLayers(layers=[layer]) for layer in layers}
    found = sweep(model, PROMPTS, skips, replay=True, **script("redundant_layers").MODELS[name])["kl"]
    expected = np.array([[cost(network, run, layer) for run in runs] for layer in layers])
    assert expected.shape == found.shape == (4, 3, 8)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-6)
    assert (expected.mean(-1).argmax(0) == 0).all()  # each prompt needs the first layer most
