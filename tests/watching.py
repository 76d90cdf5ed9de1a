"""Runs whose values are kept step by step, and the same steps computed again in plain torch."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from building import Edit, PlainPass, plain_pass
from torch import Tensor

import sinklens
from sinklens import Generation, Model
from sinklens.hooks.names import position_axis

SHORT, LONG = "w7 w12 w33 w5", "w8 w9 w10 w11 w12 w13 w14"
PADDED = [SHORT, LONG]
"""Prompts of the models that read words; together, the first is padded by three."""

Z = "blocks.1.attn.hook_z"


class Watched(NamedTuple):
    """A run, and what passed some points.

    Attributes:
        run: the run.
        values: step -> point -> value, behind all other hooks.
        ends: step -> where the keys of its pass end, if a point of an attention was kept.
    """

    run: Generation
    values: dict[int, dict[str, Tensor]]
    ends: dict[int, int]

    def stacked(self, point: str, step: int) -> Tensor:
        """The values of an attention point in all layers, [layer, ...]."""
        layers = range(self.run.model.cfg.n_layers)
        return torch.stack([self.values[step][f"blocks.{layer}.attn.{point}"] for layer in layers])


def watch(
    model: Model, prompts: Any, hooks: Sequence[Any] = (), points: Sequence[str] = ("hook_pattern",), **settings: Any
) -> Watched:
    """Run `model` as `sinklens.generate` does and keep what passes the points whose names end in one of `points`."""
    values: dict[int, dict[str, Tensor]] = {}
    ends: dict[int, int] = {}

    def keep(value: Tensor, hook: Any) -> None:
        values.setdefault(hook.step, {})[hook.name] = value.clone()
        if ".attn." in hook.name:
            ends[hook.step] = hook.key_positions.stop

    keeping = [(lambda name: name.endswith(tuple(points)), keep)] if points else []
    run = sinklens.generate(model, prompts, hooks=[*hooks, *keeping], **short(model, settings))
    return Watched(run, values, ends)


def short(model: Model, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings`, for few steps where they do not say how many."""
    of_blocks = {"denoising_steps": 2} if model.block_length is not None else {"steps": 4}
    few = {"gen_length": 5} if model.config.is_causal else {"gen_length": 8, **of_blocks}
    return {"record_sinks": False, "progress": False} | (few if "gen_length" not in settings else {}) | settings


def entered(run: Generation, step: int) -> tuple[Tensor, Tensor]:
    """Ids that step `step` of a run worked on, and which are real; of an autoregressive run the text so far."""
    length = run.prompt_length + step if run.model.config.is_causal else run.canvas.shape[2]
    return run.canvas[:, step, :length], run.real[:, :length]


def logits_of(watched: Watched) -> Tensor:
    """The logits of all steps, of those tokens that the steps decide on: [batch, step, pos, vocab]."""
    seen = [watched.values[step]["denoise.hook_logits"] for step in range(watched.run.steps_run)]
    return torch.stack([logits[:, -1:] if watched.run.model.config.is_causal else logits for logits in seen], dim=1)


def again(run: Generation, step: int, edits: dict[str, Edit] | None = None) -> PlainPass:
    """A step of `run` in plain torch, under `edits` of points."""
    ids, real = entered(run, step)
    with torch.no_grad():
        return plain_pass(run.model, ids, real, edits)


def compared(watched: Watched, edits: Callable[[int], dict[str, Edit]]) -> Iterator[tuple[int, PlainPass]]:
    """Each step of a run and its pass in plain torch under the edits of that step, whose values are equal.

    All values that were kept are compared, at the real positions that the step computed, except the logits of Dream,
    which are shifted by one.
    """
    run, model = watched.run, watched.run.model
    for step in range(run.steps_run):
        (ids, real), plain = entered(run, step), again(run, step, edits(step))
        stop = watched.ends.get(step, ids.shape[1])
        real = real & in_complete_blocks(model, real, stop)
        values = plain.values | {"denoise.hook_logits": plain.logits}
        shifted = {"denoise.hook_logits"} if model.family == "dream" else set()
        for name in watched.values[step].keys() - shifted:
            axis = position_axis(name) % values[name].ndim
            shown, wanted = (value.movedim(axis, 1) for value in (watched.values[step][name], values[name]))
            part = slice(stop - shown.shape[1], stop)
            shown, wanted = shown[real[:, part]], wanted[:, part][real[:, part]]
            torch.testing.assert_close(shown, wanted, atol=2e-4 if "pattern" in name else 1e-3, rtol=1e-4)
            assert "pattern" not in name or torch.equal(shown == 0, wanted == 0)
        yield step, plain


def stacked(plain: PlainPass, point: str) -> Tensor:
    """The values of an attention point in all layers of a plain pass, [layer, ...]."""
    return torch.stack([value for name, value in plain.values.items() if name.endswith(f".attn.{point}")])


def in_complete_blocks(model: Model, real: Tensor, stop: int) -> Tensor:
    """Positions whose block ends before `stop`; those of a cut block see keys that are missing there."""
    if model.block_length is None:
        return real
    last = (real.cumsum(dim=1) - 1) // model.block_length * model.block_length + model.block_length - 1
    return real.long().argmax(dim=1, keepdim=True) + last < stop


def add(bias: Tensor) -> Edit:
    """An edit that adds `bias`."""
    return lambda value: value + bias


def hidden(keys: Tensor) -> Tensor:
    """An additive mask: −inf where `keys` is True, else 0."""
    return torch.zeros(keys.shape).masked_fill(keys, -torch.inf)


def sinks_by_loop(
    patterns: Tensor,
    run: Generation,
    step: int,
    *,
    top_k: int = 1,
    weakest: bool = False,
    epsilon: float | None = None,
    layers: Sequence[int] = (0, 1, 2),
    heads: Sequence[int] = range(6),
    positions: Sequence[int] | None = None,
    only: str | None = None,
) -> Tensor:
    """The keys that a rule selects from the full patterns [layer, batch, head, query, key] of `step`, as a mask."""
    (ids, real), causal = entered(run, step), bool(run.model.config.is_causal)
    taken = torch.zeros(patterns.shape[:3] + patterns.shape[4:], dtype=torch.bool)
    for row in range(len(ids)):
        there = [place for place in range(ids.shape[1]) if real[row, place]]
        sums = patterns[:, row][:, :, [ids.shape[1] - 1] if causal else there].double().sum(2)
        sums = (sums * (len(there) if causal else 1)).tolist()
        may = [key for key in there if _allowed(run, ids[row], key - there[0], key, positions, only)]
        for layer, head in itertools.product(layers, heads):
            scores = {key: sums[layer][head][key] for key in there}
            found = sorted(may, key=lambda key, scores=scores: scores[key] if weakest else -scores[key])[:top_k]
            if epsilon is not None:
                total, others = sum(scores.values()), len(there) - 1
                found = [key for key in may if scores[key] > (total - scores[key]) / others + epsilon]
            taken[layer, row, head, found] = True
    return taken


def _allowed(
    run: Generation, ids: Tensor, place: int, column: int, positions: Sequence[int] | None, only: str | None
) -> bool:
    """Whether a key may be taken: `place` counts from the row's first token, `column` over the canvas."""
    masked = int(ids[column]) == run.model.mask_token_id
    states = {"prompt": column < run.prompt_length, "masked": masked}
    states["committed"] = not masked and not states["prompt"]
    back = column - run.canvas.shape[2]
    return (only is None or states[only]) and (positions is None or bool({place, back} & {*positions}))


def same(one: Watched, other: Watched) -> bool:
    """Whether two runs have the same canvases and the same logits, bit for bit."""
    return torch.equal(one.run.canvas, other.run.canvas) and torch.equal(logits_of(one), logits_of(other))


def unwatched(model: Model) -> bool:
    """Whether no hook is left on any point, and no step counts."""
    return not any(point.watched for point in model.tree.hook_points()) and model.tree.watch.forward_pass.step is None


def masked_keys(watched, step):
    """Keys that the last query of each layer, row and head ignores, by position counted from the row's first."""
    pattern, real = watched.stacked("hook_pattern", step)[:, :, :, -1], watched.run.real[:, : watched.run.prompt_length]
    pads = (~real).sum(dim=1).tolist()
    return [
        [[(head[pad:] == 0).nonzero()[:, 0].tolist() for head in row] for row, pad in zip(layer, pads, strict=True)]
        for layer in pattern
    ]
