"""Two runs compared: the effect of an intervention, of a cache policy, or of another model.

There are two comparisons. *Free-running*: the runs are independent; after the first difference they work on different
canvases, and later differences are consequences, not direct effects. *Under replay* (``replay=`` the base run): the
changed run computes everything itself, but every step begins on the base run's canvas, which isolates the effect of
each step.

`effect` makes the runs and both comparisons in one call. `compare` reads canvases of two runs, and logits where both
kept them with `MaskedLogits`; `sinks_compared` reads their sinks.

A row of an autoregressive run that has ended waits for the others of its batch; tokens added while it waits are not
counted.

Pitfall: a confidence of 1 cannot rise. Means over positions hide that near the end of a run most positions are certain;
inspect the steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from sinklens.errors import SettingError, require
from sinklens.interventions.logits import MaskedLogits
from sinklens.model import load
from sinklens.runs import generate
from sinklens.runs.request import Hooks, hook_list
from sinklens.runs.result import Generation
from sinklens.sampling.key_cache import Policy
from sinklens.sinks.detectors import Detector
from sinklens.sinks.record import Record
from sinklens.sinks.track import SinkTrack
from sinklens.utils.arguments import Seed, checked


@dataclass(frozen=True)
class Effect:
    """What a change does to runs of the same prompts, as returned by `effect`.

    Its repr counts answers that stay the same in free runs, and shows the KL on the base run's canvases ("under
    replay"). The keys of a control are counted over rows, steps, layers and heads.

    Attributes:
        base, free, replayed: the run without the change, with it, and with it on the base run's canvases.
        free_running, under_replay: `compare` of base with `free` and with `replayed`.
        same_queries: the base run repeated, with sink scores summed over the queries that `replayed` computed; None
            without a cache policy, or without sinks.
    """

    base: Generation
    free: Generation
    replayed: Generation
    free_running: xr.Dataset
    under_replay: xr.Dataset
    same_queries: Generation | None = None

    @property
    def sinks_moved(self) -> float:
        """Share of heads, over prompts and steps, whose strongest key is another one under replay."""
        cfg = self.base.model.cfg
        return float(self.under_replay["sinks_moved"].mean()) / (cfg.n_layers * cfg.n_heads)

    def __repr__(self) -> str:
        same, kl, keys = self.free_running["same_answer"], self.under_replay["kl"], self.free.control_keys
        note = "" if keys is None else f"; controls picked {int(keys.picked.sum())} of {int(keys.requested.sum())} keys"
        if self.free.chosen and not any(bool(one.places.any()) for one in self.free.chosen):
            note = "; no rule found a place, so it changed nothing"
        return (
            f"Effect({int(same.sum())} of {same.size} answers stay the same, mean KL under replay "
            f"{float(kl.mean()):.3g} nats over {kl.shape[1]} steps{note})"
        )


@checked
def effect(
    model: Any,
    prompts: Any,
    hooks: Hooks = (),
    *,
    other: Any = None,
    cache: Policy | str | None = None,
    seed: Seed = 0,
    **settings: Any,
) -> Effect:
    """Run `model` on `prompts` without a change, with it, and with it under replay; compare, logits included.

    The change is an intervention (`hooks`), a cache policy, or another model. With `cache` or `other`, ``under_replay``
    also has the counts of `sinks_compared`. A step under a cache policy computes fewer queries, and sums over fewer
    queries give other sinks even if no attention changed. So a fourth run repeats the exact one with sums over the
    queries of the third, and these two are compared.

        full, small = sinklens.load("tiny-llada"), sinklens.load("tiny-llada", quantization="bnb-int8")
        print(effect(full, prompts, other=small, gen_length=16).sinks_moved)

    Args:
        prompts: as in `sinklens.generate`; with several prompts, each measure is [batch, …] (use
            `analyses.estimates.tables.mean_interval` for its interval over them).
        hooks: an intervention, or a list of interventions and (name, function) pairs.
        other: a model with the same layers, heads and vocabulary, such as the quantized one, that makes the second and
            third run. What holds for prompts of one kind may not hold for others.
        cache: a cache policy or its name, for the second and third run.
        seed, **settings: as in `sinklens.generate`.

    Raises:
        SettingError: models of different sizes.
    """
    entries, model, other = hook_list(hooks), load(model), None if other is None else load(other)
    sizes = [(one.cfg.n_layers, one.cfg.n_heads, one.cfg.d_vocab) for one in (model, other or model)]
    require(
        sizes[0] == sizes[1],
        f"compared models must have the same layers, heads and vocabulary; got {sizes[0]} and {sizes[1]}. Compare "
        f"a quantized model with the one that was quantized.",
    )
    settings |= {"seed": seed, "progress": False}
    kept = [MaskedLogits() for _ in range(3)]
    base = generate(model, prompts, hooks=[kept[0]], **settings)
    free = generate(other or model, prompts, hooks=[*entries, kept[1]], cache=cache, **settings)
    replayed = generate(other or model, prompts, hooks=[*entries, kept[2]], cache=cache, replay=base, **settings)
    free_running, under_replay = (
        compare(base, run, kept[0].kept, logits.kept) for run, logits in ((free, kept[1]), (replayed, kept[2]))
    )
    same = None
    if (cache is not None or other is not None) and replayed.sinks is not None:
        if cache is not None:
            record = Record(queries=replayed.sinks["fresh"].any("layer") if "fresh" in replayed.sinks else None)
            same = generate(model, prompts, replay=base, **settings | {"record_sinks": record})
        under_replay = xr.merge([under_replay, sinks_compared(same or base, replayed)], join="outer")
    return Effect(base, free, replayed, free_running, under_replay, same)


@checked
def compare(
    base: Generation,
    changed: Generation,
    base_logits: Mapping[int, Tensor] | None = None,
    changed_logits: Mapping[int, Tensor] | None = None,
    attended: Bool[np.ndarray, "batch step pos"] | None = None,
    *,
    edited: bool = False,
) -> xr.Dataset:
    """Compare two runs of the same prompts and settings.

    Per [batch, step], over the positions masked in both, or the position being decoded (NaN where there are none, and
    at steps without logits; a cache policy has none at positions that it does not compute):
        ``kl``: mean of Σ_v p(v) log(p(v)/q(v)) in nats, p the base run's distribution and q the changed run's;
        ``top1_agreement``: share of positions with the same most likely token;
        ``confidence``, ``confidence_changed``: mean probability of the most likely token;
        with `attended` also ``change_attended`` and ``change_rest``: mean change of that probability at the marked
        positions, and at the others.
    Per [batch]:
        ``order``: Kendall's τ-b of the steps at which the answer's positions were decided, in an autoregressive run up
        to the earlier end; NaN where all steps are equal;
        ``first_divergent_step``: the first step after which the canvas differs from the base run's (0 also if the runs
        begin on different canvases); -1 if none does;
        ``changed_share``: share of the answer's positions with a different final token, including those after an end
        token; in an autoregressive run, of the positions up to the later end;
        ``edit_distance``: Levenshtein distance of the answers in tokens, up to the first end token;
        ``same_answer``: whether `edit_distance` is 0;
        ``control_requested``, ``control_picked``: if `changed` has controls (``pick=``), the number of keys that they
        control for, and of the control keys, over steps, layers and heads.

    Args:
        base_logits, changed_logits: `MaskedLogits.kept` of the two runs.
        attended: positions to report separately, e.g. those that attended to a masked sink.
        edited: the runs are known to share their prompts even if an intervention changed or lengthened them. Runs of
            different lengths are then compared by their answers only.

    Raises:
        SettingError: not runs, runs of different prompts or lengths, logits of only one run or of different steps, or
            `attended` without logits.
    """
    if not edited:
        _check_same_prompts(base, changed)
    missing = [base_logits, changed_logits].count(None)
    require(
        missing != 1 and (not missing or attended is None),
        "pass both base_logits and changed_logits, or neither; attended= needs them.",
    )
    if base_logits and changed_logits and not set(base_logits) & set(changed_logits):
        raise SettingError(
            f"no step has the logits of both runs: base_logits holds steps {sorted(base_logits)}, changed_logits "
            f"{sorted(changed_logits)}. Keep the same steps in both, MaskedLogits(steps=...)."
        )
    found, rows = _answers(base, changed), range(len(base.answers))
    if base.canvas.shape[2] != changed.canvas.shape[2]:
        return xr.Dataset(found)
    found["first_divergent_step"] = ("batch", np.array([_first_difference(base, changed, row) for row in rows]))
    if base_logits is None or changed_logits is None:
        return xr.Dataset(found)
    steps = max(base.steps_run, changed.steps_run)
    return xr.Dataset(
        found | _of_steps(base, changed, base_logits, changed_logits, attended, steps), {"step": np.arange(steps)}
    )


def _check_same_prompts(base: Generation, changed: Generation) -> None:
    require(
        not base.model.tree.changes_attention or base.settings.name == changed.settings.name,
        f"these runs decode in two modes ({base.settings.name}, {changed.settings.name}), so a step of one is no "
        f"step of the other; compare runs in one mode.",
    )
    sizes = [[len(run.answers), run.canvas.shape[2]] for run in (base, changed)]
    require(
        sizes[0] == sizes[1],
        f"compared runs must have the same prompts and lengths; got {sizes[0]} and {sizes[1]} (rows, positions).",
    )
    start = base.prompt_length
    same = start == changed.prompt_length and torch.equal(base.real, changed.real)
    require(
        same and torch.equal(base.canvas[:, 0, :start], changed.canvas[:, 0, :start]),
        "compared runs must have the same prompts; these do not. Rerun one with the prompts of the other.",
    )


def _answers(base: Generation, changed: Generation) -> dict[str, Any]:
    """The part of `compare` that uses only the answers; the prompts may have different lengths."""
    from rapidfuzz.distance import Levenshtein
    from scipy.stats import kendalltau

    order, changes, distance = [], [], []
    for row in range(len(base.answers)):
        decided = [_decided(run, row) for run in (base, changed)]
        steps = [run.unmask_step[row, places].numpy() for run, places in zip((base, changed), decided, strict=True)]
        shared = min(map(len, steps))
        order.append(kendalltau(steps[0][:shared], steps[1][:shared]).statistic if shared > 1 else np.nan)
        pairs = list(zip_longest(*(run.tokens[row, _decided(run, row)].tolist() for run in (base, changed))))
        changes.append(sum(before != after for before, after in pairs) / len(pairs))
        texts = [run.tokens[row, _until_end(run, row)].tolist() for run in (base, changed)]
        distance.append(Levenshtein.distance(*([token for token in text if token >= 0] for text in texts)))
    found: dict[str, Any] = {
        "order": np.array(order, dtype=float), "changed_share": np.array(changes),
        "edit_distance": np.array(distance), "same_answer": np.array(distance) == 0,
    }  # fmt: skip
    if (keys := changed.control_keys) is not None and keys.requested.any():
        found |= {"control_requested": keys.requested.numpy(), "control_picked": keys.picked.numpy()}
    return {name: ("batch", values) for name, values in found.items()}


def _until_end(run: Generation, row: int) -> slice:
    """The answer before its first end token. Masks that remain count as tokens; undecoded positions (< 0) do not."""
    start, stop = run.prompt_length, run.prompt_length + run.settings.gen_length
    ends = np.flatnonzero(np.isin(run.tokens[row, start:stop].numpy(), run.model.eos_token_ids))
    return slice(start, start + int(ends[0]) if len(ends) else stop)


def _decided(run: Generation, row: int) -> slice:
    """The answer; of an autoregressive run what was decoded up to and including its end."""
    start, stop = run.prompt_length, run.prompt_length + run.settings.gen_length
    end = min(_until_end(run, row).stop + 1, stop)
    return slice(start, min(end, start + run.steps_run)) if run.causal else slice(start, stop)


def _first_difference(base: Generation, changed: Generation, row: int) -> int:
    first, second = (run.canvas[row, : _last_change(run, row) + 2] for run in (base, changed))
    shared = min(len(first), len(second))
    differs = (first[:shared] != second[:shared]).any(dim=1).nonzero()
    if len(differs):
        return max(0, int(differs[0]) - 1)
    return -1 if len(first) == len(second) else shared - 1


def _last_change(run: Generation, row: int) -> int:
    """The last step that changed the row's canvas before it ended; -1 if none did."""
    if run.causal:
        return min(_until_end(run, row).stop - run.prompt_length, run.steps_run - 1)
    changes = (run.canvas[row, 1:] != run.canvas[row, :-1]).any(dim=1).nonzero()
    return int(changes[-1]) if len(changes) else -1


def _of_steps(
    base: Generation,
    changed: Generation,
    base_logits: Mapping[int, Tensor],
    changed_logits: Mapping[int, Tensor],
    attended: Bool[np.ndarray, "batch step pos"] | None,
    steps: int,
) -> dict[str, Any]:
    from pandas import DataFrame

    names = ["kl", "top1_agreement", "confidence", "confidence_changed"]
    names += [] if attended is None else ["change_attended", "change_rest"]
    found = {name: np.full((len(base.answers), steps), np.nan) for name in names}
    for step in sorted(set(base_logits) & set(changed_logits)):
        base_places, changed_places = kept_places(base, step), kept_places(changed, step)
        both = base_places & changed_places & base.active[:, [step]] & changed.active[:, [step]]
        p = base_logits[step][both[base_places]].double().log_softmax(-1)
        q = changed_logits[step][both[changed_places]].double().log_softmax(-1)
        known = ~(p.isnan() | q.isnan()).any(dim=-1)  # a cache policy does not compute every masked position
        p, q, both = p[known], q[known], both.masked_scatter(both, known)
        values = {
            "kl": torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1).numpy(),
            "top1_agreement": (p.argmax(-1) == q.argmax(-1)).double().numpy(),
            "confidence": p.amax(-1).exp().numpy(),
            "confidence_changed": q.amax(-1).exp().numpy(),
        }
        if attended is not None:
            marked = attended[:, step][both.numpy()]
            change = values["confidence_changed"] - values["confidence"]
            values["change_attended"] = np.where(marked, change, np.nan)
            values["change_rest"] = np.where(marked, np.nan, change)
        means = DataFrame(values).groupby(both.nonzero()[:, 0].numpy()).mean()  # without NaN
        for name in names:
            found[name][means.index, step] = means[name]
    return {name: (("batch", "step"), value) for name, value in found.items()}


def kept_places(run: Generation, step: int) -> Bool[Tensor, "batch pos"]:
    """Where `MaskedLogits` kept logits: masked positions; in an autoregressive run the position being decoded."""
    if not run.causal:
        masked = run.undecided[:, step] & run.real
        if (block := run.step_blocks[step]) is not None:
            masked[:, : block.start] = masked[:, block.stop :] = False
        return masked
    place = torch.zeros_like(run.real)
    place[:, run.prompt_length + step] = True
    return place


@checked
def sinks_compared(base: Generation, changed: Generation, detector: Detector | None = None) -> xr.Dataset:
    """Sinks of `base` that `changed` lacks, and the reverse, in the steps that both ran.

    Per [batch, step], summed over layers and heads: ``sinks``, the number of base's sinks; ``sinks_lost``, those of
    them that `changed` lacks; ``sinks_added``, sinks of `changed` that base lacks; ``sinks_moved``, the number of heads
    whose strongest key is another one. Scores are scaled to a mean of 1 over the keys of a head, because a step under a
    cache policy has fewer queries.

    Pitfall: after two free runs diverge, the tokens at a position differ, too; a comparison under replay holds them
    fixed. Also, keys that only some queries attend to count as lost in a step that does not compute these queries;
    compare runs with the same queries (`Record.queries`), as `effect` does.

    Args:
        detector: what a sink is, by its scores; default `EpsilonOverMean()`.

    Raises:
        SettingError: a run did not record its sinks, or the runs have different positions.
    """
    if base.sinks is None or changed.sinks is None:
        raise SettingError("sinks_compared needs the sinks of both runs; run them with record_sinks=True.")
    require(
        base.canvas.shape[::2] == changed.canvas.shape[::2],
        f"compared runs must have the same prompts and lengths; got {list(base.canvas.shape[::2])} and "
        f"{list(changed.canvas.shape[::2])} (rows, positions).",
    )
    steps = list(range(min(base.steps_run, changed.steps_run)))
    found, top = [], []
    for track in (base.sinks, changed.sinks):
        data = track.data.isel(step=steps)
        score = data["score"].where(data["is_real"])
        found.append(SinkTrack(data.assign(score=score / score.mean("pos"))).detect(detector))
        top.append(score.fillna(-np.inf).argmax("pos"))
    before, after = found
    counts = {"sinks": before, "sinks_lost": before & ~after, "sinks_added": after & ~before}
    summed = {name: marked.sum(("layer", "head", "pos")) for name, marked in counts.items()}
    summed["sinks_moved"] = (top[0] != top[1]).sum(("layer", "head"))
    return xr.Dataset(summed).drop_vars(["batch"], errors="ignore")
