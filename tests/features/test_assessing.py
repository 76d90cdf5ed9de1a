"""Assessments are recomputed by hand, over states and by masked share; a perfect SAE recovers all of the loss."""

import numpy as np
import pytest
import torch
from planted_saes import POINT, Perfect, random_sae
from watching import PADDED, entered

import sinklens
from sinklens.errors import SettingError
from sinklens.features import assess
from sinklens.features.assessing import Mean

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
    sae, scope = random_sae(), "masked" if masked else [("prompt", "committed")]
    found = assess(worded(), sae, POINT, PADDED, scope, **SETTINGS).isel(scope=0)
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


def test_a_perfect_sae_recovers_all_of_the_loss(worded):
    found = assess(worded(), Perfect(), POINT, PADDED, gen_length=8, steps=4)
    assert found["scope"].values.tolist() == ["masked", "decided"]
    np.testing.assert_allclose(found["recovered"], 1.0, atol=1e-3)
    np.testing.assert_allclose(found["explained_variance"], 1.0, atol=1e-5)


def test_an_autoregressive_model_is_not_assessed(worded):
    with pytest.raises(SettingError, match="assess compares losses at undecided positions"):
        assess(worded("llama", True), Perfect(), POINT, PADDED)
