"""Effects and sweeps of a model that decodes in several modes are measured in the passes that fill a block."""

import numpy as np
import pytest
from stored.runs import open_folder

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import compare, effect, logit_lens, sweep
from sinklens.interventions import AblateHeads

SETTINGS = {"mode": "diffusion", "gen_length": 16, "block_length": 8, "threshold": 0.7}


@pytest.fixture(scope="module")
def reference(conformance):
    return open_folder(conformance / "nemotron-diffusion")


@pytest.fixture(scope="module")
def model(reference):
    return reference.load(changes={})


@pytest.fixture(scope="module")
def prompts(reference):
    return reference.tensors["gen6.prompt"]


def test_effects_and_sweeps_of_an_intervention_compare_the_masked_positions_of_each_block(model, prompts):
    ablation, kept = AblateHeads(layers=[0], heads=[1]), {}
    found, runs = effect(model, prompts, ablation, **SETTINGS), []
    keep = ("denoise.hook_logits", lambda value, hook: kept.update({hook.step: value.double().softmax(-1)}))
    for hooks in ([keep], [ablation, keep]):
        sinklens.generate(model, prompts, hooks=hooks, replay=found.base, **SETTINGS)
        runs.append(kept.copy())
    for step, mode in enumerate(found.base.modes):
        kl = found.under_replay["kl"].isel(step=step).values
        if mode != "denoise":
            assert np.isnan(kl).all()
            continue
        block = found.base.step_blocks[step]
        for row in range(2):
            masked = found.base.undecided[row, step, block.start : block.stop]
            if masked.any():
                p, q = (one[step][row][masked] for one in runs)
                assert float(kl[row]) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), abs=1e-4)
    swept = sweep(model, prompts, {"head": ablation, "again": ablation}, replay=True, **SETTINGS)["kl"]
    for name in ("head", "again"):
        one = swept.sel(intervention=name).transpose("prompt", "step")
        np.testing.assert_allclose(one, found.under_replay["kl"], atol=2e-5)


def test_what_needs_one_mode_is_refused(model, prompts):
    run = sinklens.generate(model, prompts, **SETTINGS)
    other = sinklens.generate(model, prompts, mode="autoregressive", gen_length=16)
    for call, match in [
        (lambda: compare(run, other), "a step of one is no step of the other"),
        (lambda: logit_lens(model, run), "one rule for all steps"),
        (lambda: model.likelihood(prompts[0], prompts[0]), "one likelihood for each of its modes"),
    ]:
        with pytest.raises(SettingError, match=match):
            call()
