"""Every experiment on every kind of model, with and without caches: a row of a padded batch equals the row alone.

What an experiment does not offer is in `REFUSED`, with the words of the error; every other combination must work.
Networks that read a noise level, and GPT-2, are small models of random weights that read ids. Passes of their own read
the noise level of the step; `attribution_patching` and others get it as ``time=``.
"""

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pytest
import torch
from layouts import change_config, write_family
from timed import loader

import sinklens
from sinklens.errors import SinklensError
from sinklens.experiments import (
    LogitLens,
    attribution_patching,
    corrupted,
    edge_attribution,
    effect,
    jump_undone,
    logit_lens,
    of_step,
    patching_effects,
    path_patching_effects,
    read_attribution,
    sink_jumps,
    sweep,
    write_attribution,
)
from sinklens.experiments.jumps import Jump
from sinklens.interventions import AblateHeads, AblateValues, Activations, PatchHooks, Steer
from sinklens.model.files import find_checkpoint
from sinklens.sinks import EpsilonOverMean

FEW = "Question: Ben has 9 eggs. He finds 4 more. How many eggs does Ben have now?\nAnswer:"
MANY = "Question: Ada has 9 cups and 3 plates. At the market she buys 4 more cups. How many cups has Ada?\nAnswer:"
OTHER = {" 9": " 8"}
SHORT = {"gen_length": 8}
SLOW = {"entropy_bound": 1e-6, "confidence_threshold": 0.0, "stability_threshold": 6, "max_denoising_steps": 6}
POLICY = {"cache": "dual", "block_length": 4} | SHORT
KINDS = {
    "tiny-llada": [SHORT, POLICY, {"cache": "delayed"} | SHORT],
    "tiny-dream": [SHORT, {"cache": "dual"} | SHORT, POLICY | {"sampler": "dream-blocks"}],
    "tiny-mmada": [SHORT, POLICY],
    "tiny-llada-moe": [SHORT, POLICY],
    "tiny-sdar": [{"gen_length": 16}, {"gen_length": 16, "use_cache": True}],
    "sdar-moe": [{"gen_length": 16}],
    "tiny-canvas": [SLOW],
    "tiny-llama": [SHORT, SHORT | {"use_cache": False}],
}


class Case(NamedTuple):
    """A kind of model, the settings of its runs, and the place that the experiments look at."""

    name: str
    settings: dict
    few: object = FEW
    many: object = MANY
    step: int = 3
    layer: int = 2
    head: int = 1
    key: int = 5
    last: int = 3

    @property
    def z(self):
        return f"blocks.{self.layer}.attn.hook_z"

    def prompts(self, run):
        """Those of a run: the shorter one alone, or both."""
        return (
            ([self.few] if isinstance(self.few, list) else self.few) if len(run.canvas) == 1 else [self.few, self.many]
        )

    @property
    def traits(self):
        """What decides whether an experiment can be made."""
        found = {"tiny-llama": {"autoregressive"}, "tiny-canvas": {"canvas"}, "gpt2": {"autoregressive", "gpt2"}}
        found = set(found.get(self.name, ())) | ({"policy"} if "cache" in self.settings else set())
        found |= {"cached blocks"} if self.settings.get("use_cache") and self.name == "tiny-sdar" else set()
        return sorted(found | ({"ids"} if self.few is not FEW else set()))


CASES = {f"{name}-{'-'.join(map(str, way))}": Case(name, way) for name, ways in KINDS.items() for way in ways}
IDS = {
    "mdlm": ("mdlm", {}),
    "mdlm under a policy": ("mdlm", {"cache": "delayed"}),
    "mdlm that reads it": ("mdlm timed", {}),
    "remdm": ("mdlm timed", {"sampler": "remdm"}),
    "sedd": ("sedd", {}),
    "duo": ("duo", {}),
    "gidd": ("gidd", {}),
    "gpt2": ("gpt2", {}),
}
PLACE = {"few": [5, 9, 13, 7], "many": [20, 9, 31, 7, 8, 11], "step": 2, "layer": 1, "key": 2}
CASES |= {case: Case(name, {"gen_length": 6} | way, **PLACE) for case, (name, way) in IDS.items()}
REFUSED = {
    ("jumps", "autoregressive"): "sink_jumps needs a run of a diffusion model with recorded sinks",
    ("jumps", "policy"): r"with cache=.*, a step sums attention over the queries that it computes",
    ("jumps", "cached blocks"): r"with use_cache=True, a step sums attention over the queries that it computes",
    ("undone", "autoregressive"): "jump_undone compares what components wrote on the canvases of two steps",
    ("undone", "policy"): r"with cache=.*, steps read keys and values as earlier steps computed them",
    ("undone", "canvas"): "also reads the predictions of the step before, which a separate pass over a canvas lacks",
    ("writers", "policy"): r"with cache=.*, steps read keys and values as earlier steps computed them",
    ("writers", "canvas"): "also reads the predictions of the step before, which a separate pass over a canvas lacks",
    ("readers", "policy"): r"with cache=.*, steps read keys and values as earlier steps computed them",
    ("readers", "canvas"): "normalizes what its sublayers read or write, so there is no direct path of a single head",
    ("lens", "policy"): r"with cache=.*, steps read keys and values as earlier steps computed them",
    ("lens", "canvas"): "also reads the predictions of the step before, which a separate pass over a canvas lacks",
    ("lens in the run", "policy"): (
        r"complete passes, and steps under a cache policy compute only a part of the canvas; run without cache=\."
    ),
    (
        "lens in the run",
        "cached blocks",
    ): r"complete passes, and step \d+ computes only a part of the canvas; run with use_cache=False\.",
    ("lens in the run", "canvas"): "LogitLens is not available for diffusion-gemma models",
    ("writers", "gpt2"): "adds learned positions to the stream; use edge_attribution",
    ("edges", "canvas"): "normalizes what its sublayers read or write, so there is no direct path of a single head",
    ("sweep", "cached blocks"): "MaskedLogits needs the logits of all masked positions; run with use_cache=False",
    ("effect", "cached blocks"): "MaskedLogits needs the logits of all masked positions; run with use_cache=False",
    (
        "metric",
        "policy",
    ): "metric= runs single steps, and a step under a cache policy needs the keys of the steps before",
}
"""(experiment, trait of the case) -> the words of the error."""


def expert_model():
    """SDAR with experts, which does not ship: random weights that read text."""
    with TemporaryDirectory() as place:
        sizes = {"vocab_size": 643, "num_hidden_layers": 4, "max_position_embeddings": 128, "mlp_only_layers": []}
        write_family(Path(place), "sdar-moe", **sizes)
        for file in find_checkpoint("tiny-sdar", None).glob("tokenizer*"):
            shutil.copy(file, place)
        return sinklens.load(change_config(Path(place), mask_token_id=1, bos_token_id=2, eos_token_id=0))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_positions": 64, "n_embd": 24, "n_layer": 3, "n_head": 4, "vocab_size": 160, "initializer_range": 0.3}
    return sinklens.load(GPT2LMHeadModel(GPT2Config(bos_token_id=1, eos_token_id=2, **sizes)).eval())


@pytest.fixture(scope="module")
def runs(conformance, tmp_path_factory):
    """The run of the shorter prompt alone, and that of both, in which it is padded."""
    load, random = cache(loader(conformance, tmp_path_factory.mktemp)), {"sdar-moe": expert_model, "gpt2": gpt2}

    @cache
    def made(name):
        case = CASES[name]
        model = case.name if case.few is FEW else load(case.name) if case.name != "gpt2" else None
        model = random[case.name]() if case.name in random else model
        prompts = (case.few if case.few is FEW else [case.few], [case.few, case.many])
        return [sinklens.generate(model, some, progress=False, **case.settings) for some in prompts]

    return made


def pads(run):
    return int(run.real[0].long().argmax())


def own(run, values, axis):
    """`values` at the tokens of the first row, of a canvas or of its last columns."""
    size = values.shape[axis]
    real = run.real[0, :size] if run.model.causal else run.real[0, -size:]
    return np.compress(real.numpy(), np.asarray(values), axis=axis)


def jumps(run, case):
    found = sink_jumps(run, EpsilonOverMean(0.2))[:3]
    return [(*jump[:4], jump.old - pads(run), jump.new - pads(run)) for jump in found]


def undone(run, case):
    step = case.step + ("ids" in case.traits)  # a step of random models may change nothing on the canvas
    jump = Jump(1.0, step, case.layer, case.head, pads(run) + 1, pads(run) + case.key)
    return [jump_undone(run, jump, letter=letter) for letter in "qk"]


def writers(run, case):
    found = write_attribution(run, case.step, case.layer, case.head, key=pads(run) + case.key)
    return found[["from_key", "from_query"]].to_array().to_numpy()


def readers(run, case):
    return read_attribution(run, case.step, case.layer, case.head, key=pads(run) + case.key)["kl"].to_numpy() * 100


def lens(run, case):
    return logit_lens(run.model, run, steps=[case.step], layers=[0, case.layer])["entropy"].to_numpy()


def lens_in_the_run(run, case):
    reading = LogitLens(layers=[0, case.layer])
    again = sinklens.generate(run.model, case.prompts(run), hooks=reading, replay=run, progress=False, **case.settings)
    return reading.read(again)["entropy"].sel(step=case.step).to_numpy()


def other_prompt(run, case, name=None):
    kept = Activations(names=name or case.z)
    other = corrupted(run, OTHER, hooks=kept, record_sinks=False, progress=False)
    assert not torch.equal(other.canvas[0, 0], run.canvas[0, 0])
    return kept, other


def corrupting(run, case):
    kept, other = other_prompt(run, case)
    value, window = kept.caches[case.step][case.z][0], kept.caches[case.step].windows.get(case.z)
    assert other.settings == run.settings
    return value[-1] if run.model.causal else value[places(run, case, window or range(len(value)))]


def places(run, case, window):
    """Indices in a pass of the first undecided positions of the first row that the step computes."""
    chosen = run.undecided[0, case.step] & run.real[0]
    if run.cache is not None:
        chosen &= torch.from_numpy(run.sinks["fresh"].to_numpy()[0, case.step]).any(dim=0)
    return [column - window.start for column in chosen.nonzero()[:, 0].tolist() if column in window][:3]


def patched(run, case):
    kept, _ = other_prompt(run, case)
    some = {} if run.model.causal or "canvas" in case.traits else {"where": "masked"}
    patch = PatchHooks(source=kept.caches, names=case.z, heads=[case.head], steps=[1, case.step], **some)
    return stream_under(run, patch, case)


def exact_values(run, case):
    """Values of an exact run on the same canvases, patched into the run; see `PatchHooks` on cached blocks."""
    kept, exact = Activations(names=case.z), {k: v for k, v in case.settings.items() if k not in ("cache", "use_cache")}
    sinklens.generate(
        run.model, case.prompts(run), hooks=[AblateHeads(layers=[0]), kept], replay=run, progress=False, **exact
    )
    some = {"where": "masked"} if "cached blocks" in case.traits else {}
    return stream_under(run, PatchHooks(source=kept.caches, steps=[1, case.step], **some), case)


def replaced(run, case):
    where = torch.zeros(1, 1, 1, 1, run.canvas.shape[2], dtype=torch.bool)
    where[..., pads(run) + case.key] = True
    return stream_under(run, AblateValues(where=where, layers=[case.layer]), case)


def stream_under(run, hooks, case):
    """The last stream of a step at the undecided positions that it computes, under a replay with `hooks`."""
    name = f"blocks.{run.model.cfg.n_layers - 1}.hook_resid_post"
    kept = Activations(names=name)
    shared = {"replay": run, "record_sinks": False, "progress": False, **case.settings}
    sinklens.generate(run.model, case.prompts(run), hooks=[hooks, kept], **shared)
    value = kept.caches[case.step][name][0].numpy()
    if run.model.causal:
        return value[-1]
    return value[places(run, case, kept.caches[case.step].windows.get(name, range(len(value))))]


def two_inputs(run, case):
    """A step's ids with and without the changed words, a metric of the first row, their mask and noise level."""
    given = of_step(run, case.step)
    nine, eight = (9, 8) if "ids" in case.traits else map(run.model.to_single_token, (" 9", " 8"))
    last = given.columns(0)[-1] - (0 if not run.model.tree.architecture.encoder else given.ids.shape[1] - 24)
    metric = lambda logits: logits[0, last, :50].logsumexp(-1)  # noqa: E731
    return (run.model, given.ids, torch.where(given.ids == nine, eight, given.ids), metric), {
        "attention_mask": given.attention_mask,
        "time": run.time_at(case.step),
    }


def attributed(run, case):
    asked, how = two_inputs(run, case)
    found = [
        attribution_patching(*asked, [case.z], **how),
        patching_effects(*asked, [case.z], heads=[case.head], **how),
    ]
    return np.concatenate([own(run, one["attn.hook_z"].to_numpy(), 2).ravel() for one in found])


def edges(run, case):
    asked, how = two_inputs(run, case)
    chosen = {"senders": ["embed", "L0H1"], "receivers": ["L1H0.k", f"{case.layer}_mlp_in"]}
    found = [edge_attribution(*asked, **how), path_patching_effects(*asked, **chosen, **how)]
    return np.concatenate([one["effect"].to_numpy().ravel() for one in found])


def ablated(case):
    return AblateHeads(layers=[case.layer], heads=[case.head])


def sweeping(run, case):
    given = {"replay": True, "progress": False, **case.settings}
    found = sweep(run.model, case.prompts(run), {"a": ablated(case)}, **given)
    return found["kl"].isel(prompt=0, step=slice(0, 6)).to_numpy()


def metric(run, case):
    def largest(output):
        """Of the logits at the first undecided position, or the last one where all are decided."""
        logits = output.logits.flatten(0, -2).unflatten(0, (len(output.canvas), -1))
        if output.undecided.shape[1] != logits.shape[1]:
            return logits[:, 0].amax(dim=-1)
        first = torch.where(output.undecided.any(dim=1), output.undecided.long().argmax(dim=1), -1)
        return logits[torch.arange(len(logits)), first].amax(dim=-1)

    shared = {"metric": largest, "replay": True, "progress": False, **case.settings}
    found = sweep(run.model, case.prompts(run), {"a": ablated(case)}, **shared)
    return found["metric"].isel(prompt=0, step=slice(0, 6)).to_numpy()


def effects(run, case):
    found = effect(run.model, case.prompts(run), ablated(case), **case.settings)
    return found.under_replay["kl"].isel(batch=0, step=slice(0, 6)).to_numpy()


EXPERIMENTS = {
    "jumps": jumps, "undone": undone, "writers": writers, "readers": readers, "lens": lens,
    "lens in the run": lens_in_the_run, "corrupted": corrupting, "patched": patched, "exact values": exact_values,
    "replaced values": replaced, "attributed": attributed, "edges": edges, "sweep": sweeping,
    "metric": metric, "effect": effects,
}  # fmt: skip


def made(experiment, name):
    """Random models have no words to exchange."""
    return "ids" not in CASES[name].traits or experiment not in ("corrupted", "patched", "lens in the run")


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("experiment", "name"), [(one, name) for one in EXPERIMENTS for name in CASES if made(one, name)]
)
@pytest.mark.filterwarnings("ignore::sinklens.errors.PromptWarning")
def test_an_experiment_on_a_padded_row_equals_the_row_alone_or_is_refused(runs, experiment, name):
    case, found = CASES[name], []
    words = [REFUSED[experiment, trait] for trait in case.traits if (experiment, trait) in REFUSED]
    assert not bool(runs(name)[1].real[0].all())
    for run in runs(name):
        if words:
            with pytest.raises(SinklensError, match=words[0]):
                EXPERIMENTS[experiment](run, case)
        else:
            found.append(np.asarray(EXPERIMENTS[experiment](run, case), dtype=float))
    if found:
        alone, padded = found
        np.testing.assert_allclose(padded[: len(alone)], alone, atol=2e-3, rtol=1e-3)
        assert np.abs(np.nan_to_num(alone)).max() > 0


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", ["mdlm", "mdlm that reads it", "sedd", "gidd", "duo"])
def test_a_metric_of_single_steps_is_that_of_the_run(runs, name):
    """Steer and AblateHeads run only the steps they name, at the noise level of the step."""
    (alone, _), case = runs(name), CASES[name]
    direction, prompts, kept = torch.linspace(-1, 1, alone.model.cfg.d_model), [case.few], {}
    changes = {
        "heads": AblateHeads(layers=[case.layer], steps=[case.step]),
        "stream": Steer(direction=direction, layers=[0], steps=[case.step]),
        "masked": Steer(direction=direction, layers=[0], steps=[case.step], where="masked"),
    }
    given = {"replay": True, **case.settings}
    found = sweep(alone.model, prompts, changes, metric=lambda output: output.logits[:, -1, 3], **given)
    for number, change in enumerate(changes.values()):
        keep = ("denoise.hook_logits", lambda value, hook: kept.update({hook.step: float(value[0, -1, 3])}))
        given = {"replay": alone, "record_sinks": False, **case.settings}
        sinklens.generate(alone.model, prompts, hooks=[change, keep], **given)
        assert float(found["metric"][number, 0, case.step]) == pytest.approx(kept[case.step], abs=1e-4)
        assert found["metric"][number, 0].notnull().to_numpy().nonzero()[0].tolist() == [case.step]
