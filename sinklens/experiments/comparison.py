"""The effect of an intervention: a comparison of two runs of the same prompts.

There are two comparisons. *Free-running*: the runs are independent; after the first difference they work on different
canvases, and later differences are consequences, not direct effects. *Under replay* (``replay=`` the base run): the
changed run computes everything itself, but every step begins on the base run's canvas, which isolates the effect of
each step.

`compare` reads canvases, and logits where both runs kept them with `MaskedLogits`; `effect` (effects.py) makes the runs
and both comparisons in one call. Runs in two modes of a model that changes its attention have different steps, and are
compared by their answers.

A row of an autoregressive run that has ended waits for the others of its batch; tokens added while it waits are not
counted.

Pitfall: a confidence of 1 cannot rise. Means over positions hide that near the end of a run most positions are certain;
inspect the steps.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.experiments.step_ids import of_step
from sinklens.runs.intervention import within
from sinklens.runs.result import Generation, require_run


def compare(
    base: Generation,
    changed: Generation,
    base_logits: Mapping[int, Tensor] | None = None,
    changed_logits: Mapping[int, Tensor] | None = None,
    attended: Bool[np.ndarray, "batch step pos"] | None = None,
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
        begin on different canvases); -1 if none does; for runs in two modes instead ``first_divergent_position``, the
        first position of the answer with another token, or -1;
        ``changed_share``: share of the answer's positions with a different final token, including those after an end
        token; in an autoregressive run, of the positions up to the later end;
        ``edit_distance``: Levenshtein distance of the answers in tokens, up to the first end token;
        ``same_answer``: whether that is 0;
        ``control_requested``, ``control_picked``: if `changed` has controls (``pick=``), the number of keys that they
        control for, and of the control keys, over steps, layers and heads.

    Args:
        base_logits, changed_logits: `MaskedLogits.kept` of the two runs.
        attended: positions to report separately, e.g. those that attended to a masked sink; see `attention_to`.

    Raises:
        SettingError: not runs, runs of different prompts or lengths, logits of only one run or of different steps, or
            `attended` without logits.
    """
    require_run(base, "base")
    require_run(changed, "changed")
    _check_same_prompts(base, changed)
    return compared(base, changed, base_logits, changed_logits, attended)


def compared(
    base: Generation,
    changed: Generation,
    base_logits: Mapping[int, Tensor] | None = None,
    changed_logits: Mapping[int, Tensor] | None = None,
    attended: Bool[np.ndarray, "batch step pos"] | None = None,
) -> xr.Dataset:
    """`compare` without checking prompts, for runs known to share them even if an intervention edited them."""
    if attended is not None and (base_logits is None or changed_logits is None):
        raise SettingError(
            "attended= splits the change of confidence, which needs the logits of both runs; pass them, too."
        )
    if (base_logits is None) != (changed_logits is None):
        raise SettingError("pass both base_logits and changed_logits, or neither; got only one.")
    if base_logits and changed_logits and not set(base_logits) & set(changed_logits):
        raise SettingError(
            f"no step has the logits of both runs: base_logits holds steps {sorted(base_logits)}, changed_logits "
            f"{sorted(changed_logits)}. Keep the same steps in both, MaskedLogits(steps=...)."
        )
    found = answers_compared(base, changed)
    if two_modes(base, changed):
        if base_logits is not None:
            raise SettingError(
                "these runs decode in two modes, so a step of one is no step of the other; leave the logits out. "
                "sinklens.experiments.modes_compared compares the predictions of both modes at equal text."
            )
        found["first_divergent_position"] = ("batch", np.array([_parting(base, changed, r) for r in _rows(base)]))
        return xr.Dataset(found)
    found["first_divergent_step"] = ("batch", np.array([_first_difference(base, changed, r) for r in _rows(base)]))
    if base_logits is None or changed_logits is None:
        return xr.Dataset(found)
    steps = max(base.steps_run, changed.steps_run)
    found |= _of_steps(base, changed, base_logits, changed_logits, attended, steps)
    return xr.Dataset(found, coords={"step": np.arange(steps)})


def two_modes(base: Generation, changed: Generation) -> bool:
    """Whether two runs of one model decode in different modes."""
    return base.model.tree.changes_attention and base.settings.name != changed.settings.name


def _parting(base: Generation, changed: Generation, row: int) -> int:
    """The first position with another token in the answers up to and including their ends; -1 if there is none."""
    pairs = zip_longest(*(_decided_tokens(run, row) for run in (base, changed)))
    parted = (at for at, (one, other) in enumerate(pairs, base.prompt_length) if one != other)
    return next(parted, -1)


def _check_same_prompts(base: Generation, changed: Generation) -> None:
    if two_modes(base, changed):
        _check_answers(base, changed)
    elif base.canvas.shape[0] != changed.canvas.shape[0] or base.canvas.shape[2] != changed.canvas.shape[2]:
        raise SettingError(
            f"compared runs must have the same prompts and lengths; got {list(base.canvas.shape[::2])} and "
            f"{list(changed.canvas.shape[::2])} (rows, positions)."
        )
    shared = slice(0, base.prompt_length + base.settings.gen_length)
    same = base.prompt_length == changed.prompt_length and torch.equal(base.real[:, shared], changed.real[:, shared])
    if not same or not torch.equal(base.canvas[:, 0, : base.prompt_length], changed.canvas[:, 0, : base.prompt_length]):
        raise SettingError(
            "compared runs must have the same prompts; these do not. Rerun one with the prompts of the other."
        )


def _check_answers(base: Generation, changed: Generation) -> None:
    if len(base.answers) != len(changed.answers) or base.settings.gen_length != changed.settings.gen_length:
        raise SettingError(
            f"compared runs must have the same prompts and gen_length; got {len(base.answers)} rows of "
            f"{base.settings.gen_length} and {len(changed.answers)} of {changed.settings.gen_length} positions."
        )


def _rows(run: Generation) -> range:
    return range(len(run.answers))


def answers_compared(base: Generation, changed: Generation) -> dict[str, Any]:
    """The part of `compare` that uses only the answers; the prompts may have different lengths."""
    from rapidfuzz.distance import Levenshtein
    from scipy.stats import kendalltau

    order, changes, distance = [], [], []
    for row in _rows(base):
        steps = [_unmask_steps(run, row) for run in (base, changed)]
        shared = min(map(len, steps))
        order.append(kendalltau(steps[0][:shared], steps[1][:shared]).statistic if shared > 1 else np.nan)
        pairs = list(zip_longest(*(_decided_tokens(run, row) for run in (base, changed))))
        changes.append(sum(before != after for before, after in pairs) / len(pairs))
        distance.append(Levenshtein.distance(*(_answer(run, row) for run in (base, changed))))
    return {
        "order": ("batch", np.array(order, dtype=float)),
        "changed_share": ("batch", np.array(changes)),
        "edit_distance": ("batch", np.array(distance)),
        "same_answer": ("batch", np.array(distance) == 0),
        **_control_keys(changed),
    }


def _control_keys(run: Generation) -> dict[str, Any]:
    """The numbers of control keys, if there was something to control for."""
    found = run.control_keys
    if found is None or not found.requested.any():
        return {}
    return {
        "control_requested": ("batch", found.requested.numpy()),
        "control_picked": ("batch", found.picked.numpy()),
    }


def _positions(run: Generation) -> slice:
    """Positions of the answer."""
    return slice(run.prompt_length, run.prompt_length + run.settings.gen_length)


def _answer(run: Generation, row: int) -> list[int]:
    """Tokens up to the first end token; remaining masks count as tokens, undecoded positions do not."""
    return [token for token in run.tokens[row, _positions(run)].tolist()[: _length(run, row)] if token >= 0]


def _decided_tokens(run: Generation, row: int) -> list[int]:
    """Tokens of the answer; for an autoregressive answer those decoded up to and including its end."""
    tokens = run.tokens[row, _positions(run)].tolist()
    if run.model.tree.changes_attention:  # what follows the end depends on the mode
        return tokens[: _length(run, row) + 1]
    return tokens[: min(_length(run, row) + 1, run.steps_run)] if run.causal else tokens


def _length(run: Generation, row: int) -> int:
    """Positions of the answer before its first end token."""
    ends = _is_end(run, run.tokens[row, _positions(run)]).nonzero()
    return int(ends[0]) if len(ends) else run.settings.gen_length


def _unmask_steps(run: Generation, row: int) -> Int[np.ndarray, " pos"]:
    """The step at which each position was decided; for an autoregressive answer up to and including its end."""
    steps = run.unmask_step[row, _positions(run)].numpy()
    return steps[: len(_decided_tokens(run, row))]


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
        return min(_length(run, row), run.steps_run - 1)
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
    rows = len(base.answers)
    names = ["kl", "top1_agreement", "confidence", "confidence_changed"]
    names += [] if attended is None else ["change_attended", "change_rest"]
    found = {name: np.full((rows, steps), np.nan) for name in names}
    for step in sorted(set(base_logits) & set(changed_logits)):
        base_places, changed_places = kept_places(base, step), kept_places(changed, step)
        both = base_places & changed_places & _running(base, step) & _running(changed, step)
        p = base_logits[step][both[base_places]].double().log_softmax(-1)
        q = changed_logits[step][both[changed_places]].double().log_softmax(-1)
        known = ~(p.isnan() | q.isnan()).any(dim=-1)  # a cache policy does not compute every masked position
        p, q, both = p[known], q[known], both.masked_scatter(both, known)
        confidence, confidence_changed = p.amax(-1).exp().numpy(), q.amax(-1).exp().numpy()
        values = {
            "kl": torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1).numpy(),
            "top1_agreement": (p.argmax(-1) == q.argmax(-1)).double().numpy(),
            "confidence": confidence,
            "confidence_changed": confidence_changed,
        }
        row_of = both.nonzero()[:, 0].numpy()
        for name, value in values.items():
            found[name][:, step] = _row_means(value, row_of, rows)
        if attended is not None:
            marked = attended[:, step][both.numpy()]
            change = confidence_changed - confidence
            found["change_attended"][:, step] = _row_means(change[marked], row_of[marked], rows)
            found["change_rest"][:, step] = _row_means(change[~marked], row_of[~marked], rows)
    return {name: (("batch", "step"), value) for name, value in found.items()}


def _row_means(values: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    sums, numbers = np.bincount(rows, values, count), np.bincount(rows, minlength=count)
    return np.where(numbers > 0, sums / np.maximum(numbers, 1), np.nan)


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


def _running(run: Generation, step: int) -> Bool[Tensor, "batch 1"]:
    """False at rows of an autoregressive run that had ended before `step`."""
    return run.active[:, [step]] if run.causal else torch.ones(len(run.answers), 1, dtype=torch.bool)


def _is_end(run: Generation, ids: Int[Tensor, "*rows pos"]) -> Bool[Tensor, "*rows pos"]:
    return torch.isin(ids, torch.tensor(run.model.eos_token_ids, dtype=ids.dtype))


def attention_to(
    run: Generation, keys: Bool[xr.DataArray, "batch _ layer head pos"], steps: Sequence[int] | None = None
) -> Float[np.ndarray, "batch step pos"]:
    """Attention that each query of `run` gives to `keys`, averaged over layers and heads.

    NaN at padding, at positions that are not decoded yet, and at other `steps`.

    Recomputed by one pass of the unchanged model over each step's canvas. With ``keys = MaskSinks(...).keys(changed)``
    it shows which positions had attended to the sinks that were masked.

    Args:
        keys: keys from a track of this run with all its layers and heads; for some of the steps only, with their
            numbers in the coordinate ``step``.
        steps: step numbers; negative ones count from the end. By default those of `keys`.

    Raises:
        SettingError: a step that the run or `keys` does not have, or `keys` of another run or with only some layers or
            heads; or steps whose passes saw a window of the text.
    """
    require_run(run, "run")
    steps, keys = _steps_of(run, keys, steps)
    found = np.full((len(run.answers), run.steps_run, run.canvas.shape[2]), np.nan)
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(run.model.cfg.n_layers)]
    for step in steps:
        ids, real, time = of_step(run, step)
        exists = int((run.canvas[0, step] >= 0).sum())
        ids, real = ids[:, :exists], real[:, :exists]
        seen = run.model.tree.peek(ids, real, names, time, run.kind_at(step))
        wanted = torch.from_numpy(keys.sel(step=step).transpose("batch", "layer", "head", "pos").to_numpy())
        mass = torch.zeros(ids.shape)
        for layer, name in enumerate(names):
            mask = wanted[:, layer, :, :exists, None].to(seen[name])
            mass += (seen[name] @ mask)[..., 0].mean(dim=1).float().cpu()
        found[:, step, :exists] = np.where(real.cpu(), mass / len(names), np.nan)
    return found


def _steps_of(run: "Generation", keys: xr.DataArray, steps: Sequence[int] | None) -> tuple[list[int], xr.DataArray]:
    """The steps as non-negative numbers, and `keys` with numbered steps, after checking both against `run`."""
    cfg = run.model.cfg
    here = {"batch": len(run.answers), "layer": cfg.n_layers, "head": cfg.n_heads, "pos": run.canvas.shape[2]}
    there = {axis: keys.sizes.get(axis) for axis in here}
    if here != there:
        raise SettingError(f"keys has {there}, this run {here}; pass keys of this run, with all its layers and heads.")
    if "step" not in keys.coords:
        keys = keys.assign_coords(step=np.arange(keys.sizes["step"]))
    known = keys["step"].to_numpy().tolist()
    chosen = [step for step in known if step < run.steps_run] if steps is None else within("step", steps, run.steps_run)
    if set(chosen) - set(known):
        raise SettingError(f"keys has no step {min(set(chosen) - set(known))}; choose from {known}.")
    return chosen, keys
