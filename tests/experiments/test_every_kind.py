"""Every experiment on every kind of model, with and without caches: a row of a padded batch equals the row alone.

What an experiment does not offer is in `REFUSED`, with the words of the error; every other combination must work.
"""

import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from layouts import change_config, write_family

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
    path_across_steps,
    path_patching_effects,
    read_attribution,
    sink_jumps,
    sweep,
    write_attribution,
)
from sinklens.interventions import AblateHeads, AblateValues, Activations, PatchHooks
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
CASES = [(name, settings) for name, ways in KINDS.items() for settings in ways]
STEP, LAYER, HEAD = 3, 2, 1
Z = f"blocks.{LAYER}.attn.hook_z"
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
    ("paths", "autoregressive"): "steps of an autoregressive run share keys and values",
    ("paths", "policy"): r"with cache=.*, steps share keys and values, not only the canvas",
    ("paths", "canvas"): "PathPatch is not available for diffusion-gemma models, whose passes cover one canvas",
    ("edges", "canvas"): "normalizes what its sublayers read or write, so there is no direct path of a single head",
    ("sweep", "cached blocks"): "MaskedLogits needs the logits of all masked positions; run with use_cache=False",
    ("effect", "cached blocks"): "MaskedLogits needs the logits of all masked positions; run with use_cache=False",
    (
        "metric",
        "policy",
    ): "metric= runs single steps, and a step under a cache policy needs the keys of the steps before",
}
"""(experiment, trait of the case) -> the words of the error."""


def traits(name, settings):
    """What decides whether an experiment can be made."""
    found = {"tiny-llama": {"autoregressive"}, "tiny-canvas": {"canvas"}}.get(name, set())
    found |= {"policy"} if "cache" in settings else set()
    return found | ({"cached blocks"} if settings.get("use_cache") and name == "tiny-sdar" else set())


def model_of(name):
    """A shipped name; or for SDAR with experts, which does not ship, a model with random weights that reads text."""
    if name != "sdar-moe":
        return name
    with TemporaryDirectory() as place:
        sizes = {"vocab_size": 643, "num_hidden_layers": 4, "max_position_embeddings": 128, "mlp_only_layers": []}
        write_family(Path(place), name, **sizes)
        for file in find_checkpoint("tiny-sdar", None).glob("tokenizer*"):
            shutil.copy(file, place)
        return sinklens.load(change_config(Path(place), mask_token_id=1, bos_token_id=2, eos_token_id=0))


@cache
def made(case):
    """The run of the shorter prompt alone, and that of both, in which it is padded."""
    name, settings = CASES[case]
    model = model_of(name)
    return [sinklens.generate(model, prompts, progress=False, **settings) for prompts in (FEW, [FEW, MANY])]


def pads(run):
    return int(run.real[0].long().argmax())


def own(run, values, axis):
    """`values` at the tokens of the first row, of a canvas or of its last columns."""
    size = values.shape[axis]
    real = run.real[0, :size] if run.model.causal else run.real[0, -size:]
    return np.compress(real.numpy(), np.asarray(values), axis=axis)


def jumps(run, settings):
    return [(*jump[:4], jump.old - pads(run), jump.new - pads(run)) for jump in sink_jumps(run, EpsilonOverMean(0.2))][
        :3
    ]


def undone(run, settings):
    jump = sinklens.experiments.Jump(1.0, STEP, LAYER, HEAD, pads(run) + 2, pads(run) + 5)
    return [jump_undone(run, jump, letter=letter) for letter in "qk"]


def writers(run, settings):
    return (
        write_attribution(run, STEP, LAYER, HEAD, key=pads(run) + 5)[["from_key", "from_query"]].to_array().to_numpy()
    )


def readers(run, settings):
    table = read_attribution(
        run, STEP, LAYER, HEAD, key=pads(run) + 5, readers={"next": ["L3H0.q"], "mlp": ["3_mlp_in"]}
    )
    return table["kl"].to_numpy() * 100


def lens(run, settings):
    return logit_lens(run.model, run, steps=[STEP], layers=[0, 3])["entropy"].to_numpy()


def lens_in_the_run(run, settings):
    reading = LogitLens(layers=[0, 3])
    again = sinklens.generate(run.model, prompts_of(run), hooks=reading, replay=run, progress=False, **settings)
    return reading.read(again)["entropy"].sel(step=STEP).to_numpy()


def prompts_of(run):
    return FEW if run.single else [FEW, MANY]


def other_prompt(run, settings, name=Z):
    kept = Activations(names=name)
    other = corrupted(run, OTHER, hooks=kept, record_sinks=False, progress=False)
    assert not torch.equal(other.canvas[0, 0], run.canvas[0, 0])
    return kept, other


def corrupting(run, settings):
    kept, other = other_prompt(run, settings)
    value, window = kept.caches[STEP][Z][0], kept.caches[STEP].windows.get(Z)
    assert other.settings == run.settings
    return value[-1] if run.model.causal else value[places(run, window or range(len(value)))]


def places(run, window):
    """Indices in a pass of the first undecided positions of the first row that the step computes."""
    chosen = run.undecided[0, STEP] & run.real[0]
    if run.cache is not None:
        chosen &= torch.from_numpy(run.sinks["fresh"].to_numpy()[0, STEP]).any(dim=0)
    return [column - window.start for column in chosen.nonzero()[:, 0].tolist() if column in window][:3]


def patched(run, settings):
    kept, _ = other_prompt(run, settings)
    some = (
        {} if run.model.causal or "entropy_bound" in settings else {"where": "masked"}
    )  # see PatchHooks on cached blocks
    patch = PatchHooks(source=kept.caches, names=Z, heads=[HEAD], steps=[1, STEP], **some)
    return stream_under(run, patch, settings)


def exact_values(run, settings):
    """Values of an exact run on the same canvases, patched into the run."""
    kept, exact = Activations(names=Z), {k: v for k, v in settings.items() if k not in ("cache", "use_cache")}
    sinklens.generate(run.model, prompts_of(run), hooks=kept, replay=run, progress=False, **exact)
    return stream_under(run, PatchHooks(source=kept.caches, steps=[1, STEP]), settings)


def replaced(run, settings):
    where = torch.zeros(1, 1, 1, 1, run.canvas.shape[2], dtype=torch.bool)
    where[..., pads(run) + 5] = True
    return stream_under(run, AblateValues(where=where, layers=[LAYER]), settings)


def stream_under(run, hooks, settings):
    """The last stream of a step at the undecided positions that it computes, under a replay with `hooks`."""
    name, kept = "blocks.3.hook_resid_post", Activations(names="blocks.3.hook_resid_post")
    shared = {"replay": run, "record_sinks": False, "progress": False, **settings}
    sinklens.generate(run.model, prompts_of(run), hooks=[hooks, kept], **shared)
    value = kept.caches[STEP][name][0].numpy()
    if run.model.causal:
        return value[-1]
    return value[places(run, kept.caches[STEP].windows.get(name, range(len(value))))]


def paths(run, settings):
    kept, _ = other_prompt(run, settings, "blocks.0.attn.hook_z")
    names = {"sender": "L0H1", "receiver": f"L{LAYER}H{HEAD}.q", "source": kept.caches}
    found = path_across_steps(run, **names, step=1, receiver_step=STEP)
    return np.concatenate([own(run, found.changed[0], 0), stream_under(run, found.patch, settings).ravel()])


def two_inputs(run):
    """A step's ids with and without the changed words, their mask, and a metric of the first row."""
    given = of_step(run, STEP)
    nine, eight = (run.model.to_single_token(text) for text in (" 9", " 8"))
    other = torch.where(given.ids == nine, eight, given.ids)
    last = given.columns(0)[-1] - (0 if not run.model.tree.architecture.encoder else given.ids.shape[1] - 24)
    return given.ids, other, lambda logits: logits[0, last, :50].logsumexp(-1), given.attention_mask


def attributed(run, settings):
    ids, other, metric, mask = two_inputs(run)
    found = attribution_patching(run.model, ids, other, metric, [Z], mask)["attn.hook_z"].to_numpy()
    true = patching_effects(run.model, ids, other, metric, [Z], mask, heads=[HEAD], at_once=64)[
        "attn.hook_z"
    ].to_numpy()
    return np.concatenate([own(run, found, 2).ravel(), own(run, true, 2).ravel()])


def edges(run, settings):
    ids, other, metric, mask = two_inputs(run)
    found = edge_attribution(run.model, ids, other, metric, mask)["effect"].to_numpy()
    chosen = {"senders": ["embed", "L0H1"], "receivers": ["L1H0.k", "2_mlp_in"]}
    true = path_patching_effects(run.model, ids, other, metric, mask, **chosen)["effect"].to_numpy()
    return np.concatenate([found.ravel(), true.ravel()])


ABLATE = AblateHeads(layers=[LAYER], heads=[HEAD])


def sweeping(run, settings):
    found = sweep(run.model, prompts_of(run), {"a": ABLATE}, replay=True, progress=False, **settings)
    return found["kl"].isel(prompt=0, step=slice(0, 6)).to_numpy()


def metric(run, settings):
    def largest(output):
        """Of the logits at the first undecided position."""
        logits = output.logits.flatten(0, -2).unflatten(0, (len(output.canvas), -1))
        first = output.undecided.long().argmax(dim=1) if output.undecided.shape[1] == logits.shape[1] else 0
        return logits[torch.arange(len(logits)), first].amax(dim=-1)

    shared = {"metric": largest, "replay": True, "progress": False, **settings}
    return (
        sweep(run.model, prompts_of(run), {"a": ABLATE}, **shared)["metric"].isel(prompt=0, step=slice(0, 6)).to_numpy()
    )


def effects(run, settings):
    found = effect(run.model, prompts_of(run), ABLATE, **settings)
    return found.under_replay["kl"].isel(batch=0, step=slice(0, 6)).to_numpy()


EXPERIMENTS = {
    "jumps": jumps, "undone": undone, "writers": writers, "readers": readers, "lens": lens,
    "lens in the run": lens_in_the_run, "corrupted": corrupting, "patched": patched, "exact values": exact_values,
    "replaced values": replaced, "paths": paths, "attributed": attributed, "edges": edges, "sweep": sweeping,
    "metric": metric, "effect": effects,
}  # fmt: skip


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{name}-{'-'.join(map(str, way))}" for name, way in CASES])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_on_a_padded_row_equals_the_row_alone_or_is_refused(experiment, case):
    settings = CASES[case][1]
    words = [REFUSED[experiment, trait] for trait in sorted(traits(*CASES[case])) if (experiment, trait) in REFUSED]
    alone, both = made(case)
    assert not bool(both.real[0].all())
    if words:
        for run in (alone, both):
            with pytest.raises(SinklensError, match=words[0]):
                EXPERIMENTS[experiment](run, settings)
        return
    one, other = (np.asarray(EXPERIMENTS[experiment](run, settings), dtype=float) for run in (alone, both))
    np.testing.assert_allclose(other, one, atol=2e-3, rtol=1e-3)
    assert one.size
    assert np.abs(np.nan_to_num(one)).max() > 0
