"""Collect activations of runs on disk, to train an SAE on them.

`collect` runs the prompts in batches and keeps the activation at a point wherever the scope, the steps and a detector
select the place. Only one batch is in memory. A row that waits for others of its batch, because it has ended, is left
out, so the places do not depend on the batch size.

Pitfall: the places of a run are not alike in number. A diffusion run of S steps has each prompt token S times, with
hardly different activations; collect "masked" and "decided" positions separately, or only some steps.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.families import settings_for
from sinklens.features.places import (
    InScope,
    PointPlaces,
    Scope,
    places_of_step,
    states_of,
    states_of_run,
    stream_point,
    widths_at,
)
from sinklens.features.store import COLUMNS, ActivationStore, array_of
from sinklens.hooks.points import Point
from sinklens.interventions.rules import Rule
from sinklens.interventions.scores import states_now
from sinklens.model import Model
from sinklens.runs import generate
from sinklens.runs.identity import fingerprint
from sinklens.runs.intervention import Canvas, Pairs, Reader, RunContext, place_mask, within
from sinklens.sampling.policies import CachePolicy, as_policy
from sinklens.sinks import Detector, Record
from sinklens.sinks.kinds import STATES
from sinklens.sinks.store import StoredType
from sinklens.utils.arguments import Count, Seed, read_as
from sinklens.utils.progress import OnProgress

if TYPE_CHECKING:
    from sinklens.runs.result import Generation

BYTES = {"float32": 4, "float16": 2, "bfloat16": 4}  # bfloat16 is rounded float32


def collect(
    model: Model,
    prompts: Sequence[Any],
    point: str | Sequence[str],
    to: str | Path,
    *,
    scope: Scope = "all",
    only_steps: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    detector: Detector | None = None,
    layers: Sequence[int] | None = None,
    record_sinks: Record | None = None,
    cache: CachePolicy | None = None,
    batch: Count = 16,
    seed: Seed = 0,
    chat_template: bool | str = False,
    dtype: StoredType = "float32",
    report: OnProgress | None = None,
    **settings: Any,
) -> ActivationStore:
    """Run `model` on `prompts` and write the activations at `point` to a Zarr store; the same call resumes.

    Args:
        model: the model.
        prompts: texts, or rows of token ids.
        point: a point with a vector at each position, or several, which share one store; heads are flattened.
        to: path of the store, a new folder or that of an interrupted call with the same arguments.
        scope: states of the positions that are kept: "all", or one or several of "prompt", "masked",
            "committed" and "decided" (prompt and committed).
        only_steps, positions: indices, as ``steps=`` and ``positions=`` of an intervention; None means all. ``steps=``
            itself is the sampler's setting.
        detector: keep only the positions that are a sink of this detector at the step, in any head of `layers`.
        layers: layers in which `detector` looks; None means all.
        record_sinks: what `detector` needs beyond the scores, e.g. ``Record(["values"])``.
        cache: a cache policy, as in `sinklens.generate`; the places are then those that the steps compute.
        batch: prompts per run; the places do not depend on it. Copies of a prompt run in separate batches, since copies
            in one batch would get different random numbers. With a detector and cached blocks (``use_cache``), each
            prompt runs alone, because the queries that a step sums over are those of all rows of its batch.
        seed, chat_template, **settings: as in `sinklens.generate`.
        dtype: type of the activations on disk; float16 and bfloat16 halve the room.
        report: called after each batch with the number of finished prompts and of all prompts.

    Raises:
        SettingError: there are no prompts, a batch below 1, `layers` or `record_sinks` without a detector, a model
            without a mask token, or `to` holds something else.
    """
    listed = listed_prompts(prompts, "collect")
    _check(model, point, batch, detector, layers, record_sinks)
    names = _names(model, point)
    if not names or len(set(names)) < len(names):
        raise SettingError(f"collect needs at least one point, each once; got {point!r}.")
    by_blocks = settings_for(model, dict(settings)).caches_keys
    takes = [
        _Take(name, scope=states_of(scope), steps=only_steps, positions=positions, by_blocks=by_blocks)
        for name in names
    ]
    take = takes[0]
    seen_in = within("layer", layers, model.cfg.n_layers)
    about = {
        **_place_settings(take, detector, layers, record_sinks), **run_settings(model, listed, settings, cache),
        "seed": seed, "chat_template": chat_template, "dtype": dtype,
    }  # fmt: skip
    about |= {} if isinstance(point, str) else {"point": names}
    batch = 1 if detector is not None and take.by_blocks and model.tree.attention_blocks is not None else batch
    widths = widths_at(model, names)
    store = ActivationStore.begin(to, about, widths[names[0]] if isinstance(point, str) else widths)
    for start, part in batches(listed, lambda: store.prompts_done, batch, report):
        run = generate(
            model, part, seed=seed, chat_template=chat_template, hooks=takes, progress=False, cache=cache,
            record_sinks=False if detector is None else record_sinks or True, **settings,
        )  # fmt: skip
        found = None
        if detector is not None and run.sinks is not None:
            found = run.sinks.detect(detector).isel(layer=seen_in).any(("layer", "head")).to_numpy()
        rows = [one.rows(run, start, found) for one in takes]
        store.append(rows[0] if isinstance(point, str) else _joined(names, rows), start + len(part))
    return store


class StoreSize(NamedTuple):
    """How large a store would be, before compression.

    Attributes:
        places: number of rows.
        bytes: activations and columns.
        sampled: number of prompts that were run; an estimate unless it is all of them.
    """

    places: int
    bytes: int
    sampled: int


def store_size(
    model: Model,
    prompts: Sequence[Any],
    points: str | Sequence[str],
    *,
    scope: Scope = "all",
    only_steps: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    dtype: StoredType = "float32",
    sample: Count = 4,
    **settings: Any,
) -> StoreSize:
    """The size of what `collect` would store, from runs of the first prompts; exact if `sample` covers all.

    Args:
        points: one point or several.
        sample: number of prompts to run, alone; the others are taken to have as many places on average.
        scope, only_steps, positions, dtype, **settings: as in `collect`; a detector would only keep fewer places.

    Raises:
        SettingError: no prompts, a sample below 1, or see `collect`.
    """
    read_as(Count, "sample", sample)
    some = listed_prompts(prompts, "store_size")[:sample]
    counts = []
    for prompt in some:
        run = generate(model, [prompt], record_sinks=False, progress=False, **settings)
        states, limit = states_of_run(run), place_mask(positions, run.real).cpu().numpy()
        wanted = np.isin(states, [STATES.index(state) for state in states_of(scope)])
        steps = within("step", only_steps, run.steps_run)
        counts.append(sum(int((places_of_step(run, step) & limit & wanted[:, step]).sum()) for step in steps))
    names = _names(model, points)
    width = sum(widths_at(model, names)[name] for name in names)
    places = round(sum(counts) * len(prompts) / len(some))
    columns = sum(np.dtype(kind).itemsize for kind in COLUMNS.values())
    return StoreSize(places, places * (width * BYTES[dtype] + columns), len(some))


def _names(model: Model, points: str | Sequence[str]) -> list[str]:
    return [stream_point(model, one) for one in ([points] if isinstance(points, str) else points)]


def _joined(names: Sequence[str], rows: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The rows of several points as rows of one store.

    Raises:
        SettingError: under a cache policy, the points have values at other places.
    """
    for other in rows[1:]:
        if any(not np.array_equal(rows[0][name], other[name]) for name in COLUMNS):
            raise SettingError(
                f"{', '.join(names)} have values at different places here; collect each to its own store."
            )
    places = {name: rows[0][name] for name in COLUMNS}
    return places | {
        array_of(name): part["activation"] for name, part in zip(names, rows, strict=True) if "activation" in part
    }


def batches(
    prompts: list[Any], done: Callable[[], int], size: int, report: OnProgress | None
) -> Iterator[tuple[int, list[Any]]]:
    """The prompts that are not done, in batches without copies, each with the number of its first prompt."""
    while (first := done()) < len(prompts):
        part = prompts[first : first + size]
        repeated = (at for at, prompt in enumerate(part) if prompt in part[:at])
        yield first, part[: next(repeated, len(part))]
        if report is not None:
            report(done(), len(prompts))


def listed_prompts(prompts: Sequence[Any], what: str) -> list[Any]:
    """The prompts as texts and lists of ids.

    Raises:
        SettingError: there are none.
    """
    if isinstance(prompts, str) or not len(prompts):
        raise SettingError(f"{what} needs a list of at least one prompt.")
    return [prompt if isinstance(prompt, str) else torch.as_tensor(prompt).tolist() for prompt in prompts]


def _check(
    model: Model, point: str | Sequence[str], batch: int, detector: Detector | None, layers: Sequence[int] | None,
    record_sinks: Record | None,
) -> None:  # fmt: skip
    """Refuse arguments of `collect` that cannot be carried out."""
    read_as(Count, "batch", batch)
    if detector is None and (layers is not None or record_sinks is not None):
        raise SettingError("layers= and record_sinks= belong to detector=; pass a detector or leave them out.")
    if model.tree.architecture.encoder:
        raise SettingError(
            f"collect needs a model with a mask token; {model.name} has a canvas of random tokens. Keep its "
            f"activations with a hook function: generate(model, prompt, hooks=[({point!r}, function)])."
        )


def _place_settings(
    take: "_Take", detector: Detector | None, layers: Sequence[int] | None, record_sinks: Record | None
) -> dict[str, Any]:
    """What a store records about which places it holds."""
    queries = None if record_sinks is None else record_sinks.queries
    return {
        **({} if queries is None else {"queries": fingerprint(queries)}),
        "point": take.point,
        "scope": list(take.scope),
        "only_steps": None if take.steps is None else list(take.steps),
        "positions": None if take.positions is None else list(take.positions),
        "detector": None if detector is None else fingerprint(detector),
        "layers": None if layers is None else list(layers),
    }


def run_settings(
    model: Model, prompts: list[Any], settings: dict[str, Any], cache: CachePolicy | None
) -> dict[str, Any]:
    """What a store records about the model, the prompts, the sampler and its cache policy."""
    policy = as_policy(cache)
    return {
        **({} if policy is None else {"cache": fingerprint(policy)}),
        "model": model.name,
        "weights": model.fingerprint,
        "settings": json.loads(json.dumps(asdict(settings_for(model, dict(settings))))),
        "prompts": len(prompts),
        "prompts_sha256": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
    }


@dataclass(eq=False)
class _Take(Reader):
    """Keeps the activations of a run at a point, with their places.

    Attributes:
        by_blocks: whether keys of finished blocks are cached, if the model has blocks.
    """

    point: str
    _: KW_ONLY
    scope: Scope = "all"
    by_blocks: bool = False
    kept: list[dict[str, np.ndarray]] = field(default_factory=list, init=False, repr=False)

    @property
    def rule(self) -> Rule | None:
        """The rule of ``scope=``."""
        return InScope.within(self.scope)

    def pairs(self, model: Model, run: RunContext) -> Pairs:
        places, canvas = PointPlaces(self, model, run, self.point), Canvas(run)
        held: list[tuple[Tensor, Tensor | None, int]] = []
        rows = _RowColumns(model, run, self.by_blocks)
        self.kept.clear()

        def hold(value: Tensor, hook: Point) -> None:
            held[:] = [(value, places.selected(hook, value), hook.step or 0)]
            rows.begin()

        def take(confidence: Tensor, hook: Point) -> None:
            rows.end(confidence)
            ((value, chosen, step),), columns, active = held, rows.columns, hook.forward_pass.active
            assert active is not None
            if chosen is None:
                return
            if columns is not None:
                first = hook.forward_pass.first(value.shape[1])
                chosen = chosen & columns[:, first : first + value.shape[1]].to(chosen.device)
            own = _own(run, step, value.shape[1]).to(chosen.device)
            self.kept.append(_rows(value, chosen & own & active[:, None].to(chosen.device), canvas, run, step))

        pairs: Pairs = [("denoise.hook_canvas", canvas.hook), *places.first()]
        pairs += [(self.point, hold), ("denoise.hook_confidence", take)]
        return [*pairs, *places.last()]

    def rows(
        self, run: "Generation", first: int, found: Bool[np.ndarray, "batch step pos"] | None
    ) -> dict[str, np.ndarray]:
        """What was kept of a run whose prompts are numbered from `first`, where `found`, as rows of a store."""
        if not self.kept:
            return {name: np.zeros(0, dtype=np.int32) for name in COLUMNS}
        joined = {name: np.concatenate([part[name] for part in self.kept]) for name in self.kept[0]}
        self.kept.clear()
        wanted = np.argsort(joined["row"], kind="stable")
        if found is not None:
            wanted = wanted[found[joined["row"], joined["step"], joined["column"]][wanted]]
        joined = {name: values[wanted] for name, values in joined.items()}
        pads = (~run.real).long().cumprod(dim=1).sum(dim=1).numpy()
        row, column = joined.pop("row"), joined.pop("column")
        return {**joined, "prompt": first + row, "pos": column - pads[row]}


class _RowColumns:
    """The positions that each row of a step computes when it runs alone; a pass computes those of any of its rows.

    With cached blocks, a row computes the block of its step before, up to its current one; at the first step, all.

    Attributes:
        columns: the positions of the step that ends, [batch, pos]; None for all.
    """

    def __init__(self, model: Model, run: RunContext, by_blocks: bool) -> None:
        self._tree, self._run = model.tree, run
        self._by_blocks = by_blocks and model.tree.attention_blocks is not None
        self._block = torch.full(run.real.shape[:1], -1, device=run.real.device)
        self._numbers: Tensor | None = None
        self.columns: Tensor | None = None

    def begin(self) -> None:
        """Read how the pass that runs counts blocks."""
        blocks = self._tree.attention_blocks if self._by_blocks else None
        self._numbers = None if blocks is None else blocks.numbers(self._run.real)

    def end(self, confidence: Float[Tensor, "batch pos"]) -> None:
        """Set `columns`: the current blocks of the step are those that have a confidence."""
        if self._numbers is None:
            self.columns = self._run.forward_pass.computed
            return
        undecided = confidence.to(self._numbers.device) > -torch.inf
        block = torch.where(undecided, self._numbers, -1).amax(dim=1)
        self.columns = (self._numbers >= self._block[:, None]) & (self._numbers <= block[:, None])
        self._block = torch.where(block >= 0, block, self._block)


def _own(run: RunContext, step: int, queries: int) -> Tensor:
    """True at the queries that belong to the step; a pass without a cache recomputes those of earlier steps."""
    own = torch.zeros(queries, dtype=torch.bool)
    for span in run.forward_pass.spans(queries):
        own[span.start : span.stop] = span.step == step
    return own


def _rows(value: Tensor, chosen: Tensor, canvas: Canvas, run: RunContext, step: int) -> dict[str, np.ndarray]:
    """The chosen places of a pass."""
    assert canvas.now is not None
    row, column = (index.cpu() for index in chosen.nonzero(as_tuple=True))
    column = column + run.forward_pass.first(value.shape[1])
    return {
        "activation": value[chosen].detach().flatten(1).float().cpu().numpy(),
        "row": row.numpy(),
        "column": column.numpy(),
        "step": np.full(len(row), step),
        "state": states_now(run, canvas.now).cpu()[row, column].numpy(),
        "token_id": canvas.now.ids.cpu()[row, column].numpy(),
    }
