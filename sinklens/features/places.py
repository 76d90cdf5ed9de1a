"""The places at which features are read or changed: a scope, and what restricts every intervention.

A *scope* is one or several of the states that a position of a step has, named as in ``where=``: ``"prompt"``;
``"masked"``, still undecided; ``"committed"``, a position of the answer that has its token; and ``"decided"``, the
first and the last, every token. ``"all"`` is every position. The state is that of the canvas that the step works on,
with edits at ``denoise.hook_canvas``.

Pitfall: a position changes its state during a run. Two SAEs, one for masked and one for decided positions, together
cover every position.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool
from torch import Tensor

from sinklens.errors import HookNameError, SettingError
from sinklens.hooks import names
from sinklens.hooks.points import Point
from sinklens.interventions.places import Places, of_any_head
from sinklens.runs.intervention import Canvas, HookSource, Pairs, RunContext, Snapshot

if TYPE_CHECKING:
    from sinklens.model import Model

STATES = ("prompt", "masked", "committed")
NAMED = {"all": STATES, "decided": ("prompt", "committed")}
Scope = str | Sequence[str]


def states_of(scope: Scope) -> tuple[str, ...]:
    """The states in `scope`, in the order of `STATES`.

    Raises:
        SettingError: a state is unknown, or the list is empty.
    """
    given = (scope,) if isinstance(scope, str) else tuple(scope)
    unknown = [name for name in given if name not in (*STATES, *NAMED)]
    if unknown or not given:
        raise SettingError(
            f"scope must be one or several of {', '.join(map(repr, (*STATES, *NAMED)))}; got {scope!r}. 'committed' "
            f"positions belong to the answer, 'decided' ones also to the prompt."
        )
    chosen = {state for name in given for state in NAMED.get(name, (name,))}
    return tuple(name for name in STATES if name in chosen)


def state_masks(canvas: Snapshot, prompt_length: int) -> dict[str, Bool[Tensor, "batch pos"]]:
    """True where a position of the canvas is in each state of `STATES`; padding counts as prompt."""
    prompt = torch.arange(canvas.ids.shape[1], device=canvas.ids.device) < prompt_length
    masked = canvas.undecided & ~prompt
    return {"prompt": prompt.expand_as(masked), "masked": masked, "committed": ~masked & ~prompt}


def stream_point(model: "Model", point: str) -> str:
    """The canonical name of a point whose value has a vector at each position, [batch, pos, ...].

    Raises:
        HookNameError: there is no such point.
        SettingError: its value has other axes.
    """
    if not isinstance(point, str):
        raise HookNameError(f"point must be the name of one hook point; got {point!r}.")
    name = names.select(point, model.hook_names(), model.cfg.n_layers)[0]
    axes = names.axes_of(name)
    if axes[:2] != ["batch", "pos"] or len(axes) < 3 or name.startswith("denoise."):
        raise SettingError(
            f"{name} has the axes {' '.join(axes)}; features need a vector at each position, as at "
            f"blocks.0.hook_resid_post."
        )
    return name


class ScopedPlaces:
    """Selects the queries of a pass that are in scope, at the steps and positions of an intervention.

    List `first` before the hooks that use it, and `last` after them.
    """

    def __init__(self, what: HookSource, scope: Scope, model: "Model", run: RunContext | None, point: str) -> None:
        self._states, self._run = states_of(scope), run
        inside = [int(point.split(".")[1])] if point.startswith("blocks.") else []
        self._heads = range(model.cfg.n_heads)
        self._positions = Places(what, model, run, inside)
        if not inside:
            self._positions.refuse_by_layer(point)
        self._everywhere = self._states == STATES
        if not self._everywhere and run is None:
            raise SettingError(
                f"scope={scope!r} needs a run, which knows the state of each position; in a single pass use "
                f"scope='all' with positions=."
            )
        if self._states == ("masked",) and model.mask_token_id is None:
            raise SettingError(f"scope='masked' selects nothing: {model.name} has no mask token. Use 'decided'.")
        self._canvas = None if run is None else Canvas(run)

    @property
    def first(self) -> Pairs:
        """The hooks that find positions, and keep the canvas of the step."""
        if self._canvas is None or self._everywhere:
            return self._positions.first()
        return [("denoise.hook_canvas", self._canvas.hook), *self._positions.first()]

    @property
    def last(self) -> Pairs:
        """The hooks that keep what the next step needs."""
        return self._positions.last()

    def of(self, hook: Point, value: Tensor) -> Bool[Tensor, "batch pos"] | None:
        """True at the selected places of a pass; None if no place is selected. Padding is never selected.

        Args:
            hook: the point.
            value: its value, [batch, pos, ...].
        """
        (rows, queries), step = value.shape[:2], hook.step or 0
        found = self._positions.of_queries(hook, queries, value.device)
        if found is None:
            return None
        active = of_any_head(found, self._heads).expand(rows, -1)
        if self._run is None:
            return active
        first = self._run.first(step, queries)
        here = slice(first, first + queries)
        active = active & self._run.real[:, here].to(value.device)
        if self._everywhere:
            return active
        assert self._canvas is not None, "a scope needs a run"
        assert self._canvas.now is not None, "the canvas point comes before every other"
        states = state_masks(self._canvas.now, self._run.prompt_length)
        chosen = torch.stack([states[name] for name in self._states]).any(dim=0)
        chosen = torch.nn.functional.pad(chosen, (0, max(0, here.stop - chosen.shape[1])))
        return active & chosen[:, here].to(value.device)
