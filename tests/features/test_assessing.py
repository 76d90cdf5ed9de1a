"""Assessments are recomputed by hand, over states and by masked share; a perfect SAE recovers all of the loss."""

import numpy as np
import pytest
import torch
from planted_saes import Perfect, random_sae, random_transcoder
from watching import PADDED, entered

import sinklens
from sinklens.errors import SettingError
from sinklens.features import SpliceSAE, assess
from sinklens.features.assessing import Mean
from sinklens.interventions import Activations

POINT = "blocks.1.hook_resid_post"
READS, WRITES = "blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out"
SETTINGS = {"gen_length": 8, "steps": 8}


@pytest.fixture(scope="module")
def base(worded):
    return sinklens.generate(worded(), PADDED, record_sinks=False, progress=False, **SETTINGS)


def losses(run, sae, masked=None):
    """The loss of each undecided position of each step with `sae` spliced in; and the activations there."""
    found, kept = [], []
    for step in range(run.steps_run):
        ids, real = entered(run, step)
        where = real if masked is None else real & (run.undecided[:, step] == masked)

        def edit(value, hook, where=where):
            kept.append(value[where].clone())
            value[where] = sae.decode(sae.encode(value[where]))
            return value

        logits = run.model.run_with_hooks(ids, attention_mask=real, fwd_hooks=[(POINT, edit)])
        places = (run.undecided[:, step] & real).nonzero().tolist()
        found.append([-float(logits[row, at].log_softmax(-1)[run.tokens[row, at]]) for row, at in places])
    return found, torch.cat(kept)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("masked", [True, False])
def test_an_assessment_equals_one_by_hand(worded, base, masked):
    sae, scope = random_sae(), "masked" if masked else ("prompt", "committed")
    found = assess(worded(), sae, POINT, PADDED, [scope], **SETTINGS).isel(scope=0)
    plain, x = losses(base, Perfect(), masked)
    loss, spliced, mean = (
        np.concatenate(one).mean()
        for one in (plain, losses(base, sae, masked)[0], losses(base, Mean(x.mean(0)), masked)[0])
    )
    features = sae.encode(x)
    rebuilt = ((x - sae.decode(features)) ** 2).sum() / ((x - x.mean(0)) ** 2).sum()
    expected = {
        "explained_variance": 1 - rebuilt, "dead": (~(features > 0).any(0)).float().mean(), "places": len(x),
        "firing": (features > 0).float().sum(1).mean(), "loss": loss, "loss_spliced": spliced, "loss_mean": mean,
        "recovered": (mean - spliced) / (mean - loss),
    }  # fmt: skip
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(float(value), rel=1e-3, abs=1e-4), name
    assert abs(spliced - loss) > 0.01


class Mlp:
    """A transcoder that is the MLP of layer 1 itself: features are what it reads."""

    def __init__(self, model):
        layer = model.tree.hf.model.layers[1]
        self.weight, self.mlp = layer.post_attention_layernorm.weight.detach(), layer.mlp

    def encode(self, x):
        return x

    @torch.no_grad()
    def decode(self, features, x=None):
        assert torch.equal(features, x)
        return self.mlp(x * self.weight)  # the point lies before the norm's weight


def test_a_perfect_sae_and_a_transcoder_that_is_the_mlp_recover_all_of_the_loss(worded):
    model, given = worded(), {"gen_length": 8, "steps": 4}
    found = assess(model, Perfect(), POINT, PADDED, **given)
    assert found["scope"].values.tolist() == ["masked", "decided"]
    planted = assess(model, Mlp(model), READS, PADDED, ("masked",), to=WRITES, **given)
    for one in (found, planted):
        np.testing.assert_allclose(one["recovered"], 1.0, atol=1e-3)
    np.testing.assert_allclose([*found["explained_variance"], *planted["explained_variance"]], 1.0, atol=1e-5)


def test_a_transcoder_is_assessed_where_it_writes(worded):
    model, sae, given = worded(), random_transcoder(), {"gen_length": 8, "steps": 4}
    found = assess(model, sae, READS, PADDED, ("all",), to=WRITES, **given)
    kept = Activations(names=[READS, WRITES])
    run = sinklens.generate(model, PADDED, hooks=kept, record_sinks=False, **given)
    x, y = (torch.cat([kept.caches[step][name][run.real] for step in range(4)]) for name in (READS, WRITES))
    missed, spread = (y - sae.decode(sae.encode(x), x)).pow(2).sum(), (y - y.mean(dim=0)).pow(2).sum()
    assert float(found["explained_variance"][0]) == pytest.approx(float(1 - missed / spread), rel=1e-3)
    seen = {}
    keep = ("denoise.hook_logits", lambda value, hook: seen.update({hook.step: value.log_softmax(-1)}))
    hooks = [SpliceSAE(sae, READS, to=WRITES), keep]
    sinklens.generate(model, PADDED, hooks=hooks, replay=run, record_sinks=False, **given)
    places = [(step, *at) for step in range(4) for at in (run.undecided[:, step] & run.real).nonzero().tolist()]
    expected = np.mean([-float(seen[step][row, at][run.tokens[row, at]]) for step, row, at in places])
    assert float(found["loss_spliced"][0]) == pytest.approx(expected, rel=1e-4)


def test_an_autoregressive_model_is_not_assessed(worded):
    with pytest.raises(SettingError, match="assess compares losses at undecided positions"):
        assess(worded("llama", True), Perfect(), POINT, PADDED)
