"""Experiments on networks that read a noise level, and on GPT-2: a row of a padded batch equals the row alone.

What an experiment does not offer is in `REFUSED`, with the words of the error. Passes of their own read the noise level
of the step; `attribution_patching` and `patching_effects` get it as ``time=``.
"""

from functools import cache

import numpy as np
import pytest
import torch
from timed import loader

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import (
    Jump,
    attribution_patching,
    edge_attribution,
    effect,
    jump_undone,
    logit_lens,
    of_step,
    patching_effects,
    read_attribution,
    sink_jumps,
    sweep,
    write_attribution,
)
from sinklens.interventions import AblateHeads, AblateValues, Activations, PatchHooks, Steer
from sinklens.sinks import EpsilonOverMean

FEW, MANY = [5, 9, 13, 7], [20, 9, 31, 7, 8, 11]
STEP, LAYER, HEAD = 2, 1, 1
Z = f"blocks.{LAYER}.attn.hook_z"
SHORT = {"gen_length": 6}
CASES = {
    "mdlm": ("mdlm", SHORT), "mdlm under a policy": ("mdlm", SHORT | {"cache": "delayed"}),
    "mdlm that reads it": ("mdlm timed", SHORT), "remdm": ("mdlm timed", SHORT | {"sampler": "remdm"}),
    "sedd": ("sedd", SHORT), "duo": ("duo", SHORT), "gidd": ("gidd", SHORT), "gpt2": ("gpt2", SHORT),
}  # fmt: skip
KEYS = "with cache=.*, steps read keys and values as earlier steps computed them"
REFUSED = {
    "jumps": {"policy": "its column sums do not show jumps", "causal": "needs a run of a diffusion model"},
    "undone": {"policy": KEYS, "causal": "a step of an autoregressive run only adds a token"},
    "writers": {"policy": KEYS, "causal": "adds learned positions to the stream; use edge_attribution"},
    "readers": {"policy": KEYS},
    "lens": {"policy": KEYS},
    "metric": {"policy": "a step under a cache policy needs the keys of the steps before"},
}
"""Experiment -> trait, or "" for all others -> the words of the error; "" where it works."""


@pytest.fixture(scope="module")
def runs(conformance, tmp_path_factory):
    """The run of the shorter prompt alone, and that of both, in which it is padded."""
    load = cache(loader(conformance, tmp_path_factory.mktemp))

    @cache
    def made(case):
        name, settings = CASES[case]
        model = gpt2() if name == "gpt2" else load(name)
        return [sinklens.generate(model, prompts, **settings) for prompts in ([FEW], [FEW, MANY])]

    return made


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": 24, "n_layer": 3, "n_head": 4, "vocab_size": 160, "initializer_range": 0.3}
    return sinklens.load(GPT2LMHeadModel(GPT2Config(bos_token_id=1, eos_token_id=2, **sizes)).eval())


def pads(run):
    return int(run.real[0].long().argmax())


def prompts_of(run):
    return [FEW] if len(run.canvas) == 1 else [FEW, MANY]


def own(run, values, axis):
    real = run.real[0, : values.shape[axis]]
    return np.compress(real.numpy(), np.asarray(values), axis=axis)


def jumps(run, settings):
    found = sink_jumps(run, EpsilonOverMean(0.2))[:3]
    return [(*jump[:4], jump.old - pads(run), jump.new - pads(run)) for jump in found]


def undone(run, settings):
    source = of_step(run, STEP).row(0).ids[0].clone()
    source[1] = 77  # the canvas of the step before may be the same
    return [jump_undone(run, Jump(1.0, STEP, LAYER, HEAD, pads(run) + 2, pads(run) + 4), source=source)]


def writers(run, settings):
    found = write_attribution(run, STEP, LAYER, HEAD, key=pads(run) + 2)
    return found[["from_key", "from_query"]].to_array().to_numpy()


def readers(run, settings):
    given = {"key": pads(run) + 2, "readers": {"last": ["logits"], "mlp": [f"{LAYER}_mlp_in"]}}
    return read_attribution(run, STEP, LAYER, HEAD, **given)["kl"].to_numpy() * 100


def lens(run, settings):
    return logit_lens(run.model, run, steps=[STEP], layers=[0, 1])["entropy"].to_numpy()


def stream_under(run, hooks, settings):
    """The last stream of a step at the undecided positions that it computes, under a replay with `hooks`."""
    name = f"blocks.{run.model.cfg.n_layers - 1}.hook_resid_post"
    kept = Activations(names=name)
    given = {"replay": run, "record_sinks": False, **settings}
    sinklens.generate(run.model, prompts_of(run), hooks=[hooks, kept], **given)
    value = kept.caches[STEP][name][0]
    if run.model.causal:
        return value[-1].numpy()
    chosen, window = run.undecided[0, STEP] & run.real[0], kept.caches[STEP].windows.get(name, range(len(value)))
    if run.cache is not None:
        chosen &= torch.from_numpy(run.sinks["fresh"].to_numpy()[0, STEP]).any(dim=0)
    return value[[column - window.start for column in chosen.nonzero()[:, 0].tolist() if column in window]].numpy()


def exact_values(run, settings):
    kept = Activations(names=Z)
    exact = {name: value for name, value in settings.items() if name != "cache"}
    sinklens.generate(run.model, prompts_of(run), hooks=[AblateHeads(layers=[0]), kept], replay=run, **exact)
    return stream_under(run, PatchHooks(source=kept.caches, steps=[1, STEP]), settings)


def replaced(run, settings):
    where = torch.zeros(1, 1, 1, 1, run.canvas.shape[2], dtype=torch.bool)
    where[..., pads(run) + 2] = True
    return stream_under(run, AblateValues(where=where, layers=[LAYER]), settings)


def two_inputs(run):
    """A step's ids with and without a changed token, a metric of the first row, their mask and noise level."""
    ids, mask, _ = of_step(run, STEP)
    last = of_step(run, STEP).columns(0)[-1]
    return ids, torch.where(ids == 9, 8, ids), lambda logits: logits[0, last, :50].logsumexp(-1), mask


def attributed(run, settings):
    ids, other, metric, mask = two_inputs(run)
    found = attribution_patching(run.model, ids, other, metric, [Z], mask, time=run.time_at(STEP))["attn.hook_z"]
    true = patching_effects(run.model, ids, other, metric, [Z], mask, heads=[HEAD], at_once=5, time=run.time_at(STEP))[
        "attn.hook_z"
    ]
    return np.concatenate([own(run, found.to_numpy(), 2).ravel(), own(run, true.to_numpy(), 2).ravel()])


def edges(run, settings):
    ids, other, metric, mask = two_inputs(run)
    return edge_attribution(run.model, ids, other, metric, mask, time=run.time_at(STEP))["effect"].to_numpy()


ABLATE = AblateHeads(layers=[LAYER], heads=[HEAD])


def sweeping(run, settings):
    found = sweep(run.model, prompts_of(run), {"a": ABLATE}, replay=True, **settings)
    return found["kl"].isel(prompt=0, step=slice(0, run.steps_run)).to_numpy()


def metric(run, settings):
    def largest(output):
        return output.logits[:, -1].amax(dim=-1)

    given = {"metric": largest, "replay": True, **settings}
    found = sweep(run.model, prompts_of(run), {"a": ABLATE}, **given)
    return found["metric"].isel(prompt=0, step=slice(0, run.steps_run)).to_numpy()


def effects(run, settings):
    return effect(run.model, prompts_of(run), ABLATE, **settings).under_replay["kl"].isel(batch=0).to_numpy()


EXPERIMENTS = {
    "jumps": jumps, "undone": undone, "writers": writers, "readers": readers, "lens": lens,
    "exact values": exact_values, "replaced values": replaced, "attributed": attributed, "edges": edges,
    "sweep": sweeping, "metric": metric, "effect": effects,
}  # fmt: skip


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
@pytest.mark.filterwarnings("ignore::sinklens.errors.PromptWarning")
def test_an_experiment_on_a_padded_row_equals_the_row_alone_or_is_refused(runs, experiment, case):
    settings = CASES[case][1]
    trait = "policy" if "cache" in settings else "causal" if case == "gpt2" else ""
    refused = REFUSED.get(experiment, {})
    words = refused.get(trait, refused.get("", ""))
    found = []
    for run in runs(case):
        if words:
            with pytest.raises(SettingError, match=words):
                EXPERIMENTS[experiment](run, settings)
        else:
            found.append(np.asarray(EXPERIMENTS[experiment](run, settings), dtype=float))
    if found:
        size = len(found[0])
        np.testing.assert_allclose(found[1][:size], found[0], atol=2e-3, rtol=1e-3)
        assert np.abs(np.nan_to_num(found[0])).max() > 0


@pytest.mark.parametrize("case", ["mdlm", "mdlm that reads it", "sedd", "duo", "gidd"])
def test_a_metric_of_single_steps_is_that_of_the_run(runs, case):
    """Steer and AblateHeads run only the steps they name, at the noise level of the step."""
    (alone, _), settings = runs(case), CASES[case][1]
    direction = torch.linspace(-1, 1, alone.model.cfg.d_model)
    changes = {"heads": AblateHeads(layers=[LAYER], steps=[STEP]), "stream": Steer(
        direction=direction, layers=[0], steps=[STEP])}  # fmt: skip

    def first(output):
        return output.logits[:, -1, 3]

    found = sweep(alone.model, [FEW], changes, metric=first, replay=True, **settings)
    for number, change in enumerate(changes.values()):
        kept = {}
        keep = ("denoise.hook_logits", lambda value, hook, kept=kept: kept.update({hook.step: float(value[0, -1, 3])}))
        sinklens.generate(alone.model, [FEW], replay=alone, hooks=[change, keep], record_sinks=False, **settings)
        assert float(found["metric"][number, 0, STEP]) == pytest.approx(kept[STEP], abs=1e-4)
        assert found["metric"][number, 0].notnull().to_numpy().nonzero()[0].tolist() == [STEP]


@pytest.mark.parametrize("case", ["mdlm that reads it", "sedd", "duo", "gidd"])
def test_patching_effects_are_those_of_passes_at_the_noise_level(runs, case):
    (alone, _) = runs(case)
    ids, other, metric_of, _ = two_inputs(alone)
    time, model = alone.time_at(STEP), alone.model
    with torch.no_grad():
        clean = model.run_with_cache(ids, time=time, names_filter=Z)[1][Z]

        def patch(value, hook):
            value[:, 1, HEAD] = clean[:, 1, HEAD]
            return value

        plain = metric_of(model(other, time=time))
        patched = metric_of(model.run_with_hooks(other, time=time, fwd_hooks=[(Z, patch)]))
    found = patching_effects(model, ids, other, metric_of, [Z], heads=[HEAD], positions=[1], time=time)
    assert float(found["attn.hook_z"][LAYER if found.sizes["layer"] > 1 else 0, 0, 0]) == pytest.approx(
        float(patched - plain), abs=1e-5
    )
    with pytest.raises(SettingError, match="reads the noise level of its canvas; pass time="):
        patching_effects(model, ids, other, metric_of, [Z])
