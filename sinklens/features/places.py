"""The places at which features are read or changed: a scope, positions and steps.

A *scope* is one or several of three states that a position of a step has, as in sinklens.sinks.kinds: ``"prompt"``;
``"masked"``, still undecided; ``"decided"``, a position of the answer that has its token. ``"all"`` is every position.
The state is that of the canvas that the step works on, with edits at ``denoise.hook_canvas``.

Pitfall: a position changes its state during a run. Two SAEs, one for each state, together cover every position.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool
from torch import Tensor

from sinklens.errors import HookNameError, SettingError
from sinklens.hooks import names
from sinklens.interventions import places as interventions_places
from sinklens.interventions.where import AtPositions
from sinklens.runs.intervention import Canvas, Pairs, RunContext, Snapshot

if TYPE_CHECKING:
    from sinklens.model import Model

STATES = ("prompt", "masked", "decided")
Scope = str | Sequence[str]


def states_of(scope: Scope) -> tuple[str, ...]:
    """The states in `scope`, in the order of `STATES`.

    Raises:
        SettingError: a state is unknown, or there is none.
    """
    given = (scope,) if isinstance(scope, str) else tuple(scope)
    unknown = [name for name in given if name not in (*STATES, "all")]
    if unknown or not given:
        raise SettingError(
            f"scope must be 'all' or one or several of {', '.join(map(repr, STATES))}; got {scope!r}. A decided "
            f"position belongs to the answer; for every token write scope=('prompt', 'decided')."
        )
    return STATES if "all" in given else tuple(name for name in STATES if name in given)


def state_masks(canvas: Snapshot, prompt_length: int) -> dict[str, Bool[Tensor, "batch pos"]]:
    """True where a position of the canvas is in each state of `STATES`; padding counts as prompt."""
    prompt = torch.arange(canvas.ids.shape[1], device=canvas.ids.device) < prompt_length
    masked = canvas.undecided & ~prompt
    return {"prompt": prompt.expand_as(masked), "masked": masked, "decided": ~masked & ~prompt}


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


class Places:
    """Selects the queries of a pass that are in scope, at the steps, positions and places of an intervention.

    List `pairs` before the hooks that use it, and `last` after them.
    """

    def __init__(self, what: AtPositions, scope: Scope, model: "Model", run: RunContext | None, point: str) -> None:
        self._states, self._run = states_of(scope), run
        parts = stream_point(model, point).split(".")
        self._layer = int(parts[1]) if parts[0] == "blocks" else None
        self._places = interventions_places.Places(what, model, run, [] if self._layer is None else [self._layer])
        if self._layer is None:
            self._places.refuse_by_layer(point)
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
    def pairs(self) -> Pairs:
        """The hooks that find the places and keep the canvas of the step."""
        if self._canvas is None or self._everywhere:
            return self._places.first()
        return [*self._places.first(), ("denoise.hook_canvas", self._canvas.hook)]

    @property
    def last(self) -> Pairs:
        """The hooks that keep the scores of the step for the next."""
        return self._places.last()

    def of(self, step: int | None, queries: int, rows: int, device: torch.device) -> Bool[Tensor, "batch pos"] | None:
        """True at the selected places of a pass; None if there are none. Padding is never selected.

        Args:
            step: the current step; None outside a run.
            queries, rows: positions and rows of the pass.
        """
        found = self._places.of_pass(step or 0, self._layer, queries, device)
        if found is None:
            return None
        active = found.any(dim=1).expand(rows, -1)
        if self._run is None:
            return active
        first = self._run.first(step or 0, queries)
        here = slice(first, first + queries)
        active = active & self._run.real[:, here].to(device)
        if self._everywhere:
            return active
        assert self._canvas is not None, "a scope needs a run"
        assert self._canvas.now is not None, "the canvas point comes before every other"
        states = state_masks(self._canvas.now, self._run.prompt_length)
        chosen = torch.stack([states[name] for name in self._states]).any(dim=0)
        return active & torch.nn.functional.pad(chosen, (0, max(0, here.stop - chosen.shape[1])))[:, here].to(device)
