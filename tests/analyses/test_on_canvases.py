"""What sweeps, kept logits and active rows show on a canvas of random tokens."""

import numpy as np
import pytest
import torch
import xarray as xr

import sinklens
from sinklens.analyses.runs import own_run
from sinklens.errors import SettingError
from sinklens.evaluation import evaluate, masking
from sinklens.evaluation.protocols import find_protocol
from sinklens.experiments import sweep
from sinklens.features import collect
from sinklens.interventions import AblateHeads, MaskedLogits, MaskSinks
from sinklens.runs import Intervention
from sinklens.runs.intervention import Canvas
from sinklens.tasks import held_out

PROMPTS = [problem.prompt for problem in held_out(2)]
SETTINGS = {"gen_length": 8, "max_denoising_steps": 4}


@pytest.fixture(scope="module")
def model(toy):
    return toy("tiny-canvas")


def test_a_hook_sees_the_undecided_positions_of_its_own_step(model):
    seen = []

    class Snapshots(Intervention):
        on_canvas = True

        def pairs(self, model, run):
            canvas = Canvas(run)
            keep = ("denoise.hook_logits", lambda value, hook: seen.append(canvas.now.undecided.clone()))
            return [("denoise.hook_canvas", canvas.hook), keep]

    run = sinklens.generate(model, PROMPTS, hooks=[Snapshots()], progress=False, **SETTINGS)
    assert torch.equal(torch.stack(seen, dim=1), run.undecided[:, :-1])
    assert run.undecided[:, 0, run.prompt_length :].all()


def test_kept_logits_are_those_of_the_undecided_positions_of_the_canvas(model):
    kept, every = MaskedLogits(), {}
    run = sinklens.generate(
        model, PROMPTS, progress=False, **SETTINGS,
        hooks=[kept, ("denoise.hook_logits", lambda value, hook: every.update({hook.step: value.clone()}))],
    )  # fmt: skip
    for step, logits in every.items():
        undecided = run.undecided[:, step, run.prompt_length :]
        torch.testing.assert_close(kept.kept[step], logits[undecided])


def test_a_sweep_under_replay_equals_runs_one_by_one(model):
    listed = {"head": AblateHeads(layers=[0]), "sinks": MaskSinks(top_k=1)}
    together = sweep(model, PROMPTS, listed, replay=True, progress=False, **SETTINGS)
    for name, one in listed.items():
        alone = sweep(model, PROMPTS, {name: one}, replay=True, rows=1, progress=False, **SETTINGS)
        np.testing.assert_allclose(together["kl"].sel(intervention=name), alone["kl"][0], atol=1e-5)
    assert float(together["kl"].sel(intervention="head").max()) > 0


def test_a_row_that_waits_for_others_is_not_active(model):
    """A row ends when its mean entropy is below a bound, which only one of the two is after the first step."""
    settings, means = {"gen_length": 8, "max_denoising_steps": 4, "stability_threshold": 0}, []
    hook = ("denoise.hook_entropy", lambda value, hook: means.append(value.mean(dim=1)))
    sinklens.generate(model, PROMPTS, hooks=[hook], progress=False, confidence_threshold=0.0, **settings)
    settings["confidence_threshold"] = float(means[0].mean())
    together = own_run(model, PROMPTS, settings)
    for row, prompt in enumerate(PROMPTS):
        alone = own_run(model, [prompt], settings)
        steps = alone.track.steps
        assert alone.own.all()
        assert together.own[row].sum() == steps
        padding = together.run.real.shape[1] - alone.run.real.shape[1]
        part = together.track.isel(batch=row).data.isel(step=slice(0, steps), pos=slice(padding, None))
        names = ("batch", "step", "pos")
        xr.testing.assert_allclose(
            part["score"].drop_vars(names), alone.track.data["score"].drop_vars(names), rtol=1e-3, atol=1e-4
        )
    assert not together.own.all()
    first = int(together.own.sum(axis=1).argmin())
    noise = ("denoise.hook_renoise", lambda value, hook: torch.zeros_like(value))
    assert own_run(model, PROMPTS, settings, hooks=[noise]).own[first].tolist()[:2] == [True, False]


class Unfit(Intervention):
    """An intervention that needs complete passes."""

    def pairs(self, model, run):
        return []


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda model, out: collect(model, PROMPTS, "blocks.1.hook_resid_post", out, **SETTINGS),
            "collect needs a model with a mask token.*hooks=",
        ),
        (
            lambda model, _: sweep(model, PROMPTS[0], {"a": [], "b": Unfit()}, progress=False, **SETTINGS),
            "not available for diffusion-gemma models, whose passes cover one canvas",
        ),
    ],
)
def test_what_reads_complete_passes_is_refused(call, text, model, tmp_path):
    with pytest.raises(SettingError, match=text):
        call(model, tmp_path / "a.zarr")
    assert not any(tmp_path.iterdir())


def test_rows_of_a_masked_run_of_several_canvases_are_not_run_together(tmp_path, model):
    """A row that has finished a canvas waits for the others before the next one begins."""
    for length, size in ((8, 2), (16, 1)):
        given = {"gen_length": length, "canvas_length": 8, "max_denoising_steps": 1}
        protocol = find_protocol("tiny-gsm").with_settings(given)
        runs = evaluate(model, protocol, masking([1]), tmp_path / str(length), limit=2, batch=2)
        assert [{record["batch"] for record in run.records()} for run in runs] == [{2}, {size}]
