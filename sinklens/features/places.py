"""The places at which features are read or changed: a scope, and what restricts every intervention.

A *scope* is one or several of the states that a position of a step has, named as in ``where=``: ``"prompt"``;
``"masked"``, still undecided; ``"committed"``, a position of the answer that has its token; and ``"decided"``, the
first and the last, every token. ``"all"`` is every position. The state is that of the canvas that the step works on,
with edits at ``denoise.hook_canvas``.

Pitfall: a position changes its state during a run. Two SAEs, one for masked and one for decided positions, together
cover every position.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import HookNameError, require
from sinklens.hooks import names
from sinklens.hooks.points import Point
from sinklens.interventions.places import Places
from sinklens.interventions.rules import Chooser, Moment, OfKind, Rule
from sinklens.model import Model
from sinklens.runs.intervention import Pairs, Reader, RunContext
from sinklens.runs.result import Generation
from sinklens.sinks.kinds import STATES, state_codes
from sinklens.utils.arguments import as_tuple

NAMED = {"all": STATES, "decided": ("prompt", "committed")}
Scope = str | Sequence[str]


def states_of(scope: Scope) -> tuple[str, ...]:
    """The states in `scope`, in the order of `STATES`.

    Raises:
        SettingError: a state is unknown, or the list is empty.
    """
    given = as_tuple(scope)
    unknown = [name for name in given if name not in (*STATES, *NAMED)]
    require(
        not unknown and given,
        f"scope must be one or several of {', '.join(map(repr, (*STATES, *NAMED)))}; got {scope!r}. 'committed' "
        f"positions belong to the answer, 'decided' ones also to the prompt.",
    )
    chosen = {state for name in given for state in NAMED.get(name, (name,))}
    return tuple(name for name in STATES if name in chosen)


def states_of_run(run: "Generation") -> Int[np.ndarray, "batch step pos"]:
    """The `PlaceState` of every position of every canvas, that after the last step included."""
    every = np.ones(run.canvas.shape, dtype=bool)
    return state_codes(run.undecided.cpu().numpy(), every, run.prompt_length).astype(np.int8)


def in_scope(run: "Generation", scope: Scope) -> Bool[np.ndarray, "batch step pos"]:
    """Whether the state of a position is in a scope, as `states_of_run`."""
    return np.isin(states_of_run(run), [STATES.index(state) for state in states_of(scope)])


def places_of_step(run: "Generation", step: int) -> Bool[np.ndarray, "batch pos"]:
    """True at the places of a step that `collect` stores.

    No padding, no row that waits for the rest of its batch, and in an autoregressive run each token at the step that
    reads it first.
    """
    real, columns = run.real.cpu().numpy(), np.arange(run.canvas.shape[2])
    places = real & run.active[:, step].cpu().numpy()[:, None]
    if not run.causal:
        return places
    return places & (columns < run.prompt_length if step == 0 else columns == run.prompt_length + step - 1)


def stream_point(model: "Model", point: str) -> str:
    """The canonical name of a point whose value has a vector at each position, [batch, pos, ...].

    Raises:
        HookNameError: there is no such point.
        SettingError: its value has other axes.
    """
    require(isinstance(point, str), f"point must be the name of one hook point; got {point!r}.", HookNameError)
    name = names.select(point, model.hook_names(), model.cfg.n_layers)[0]
    axes = names.axes_of(name)
    require(
        axes[:2] == ["batch", "pos"] and len(axes) >= 3 and not name.startswith("denoise."),
        f"{name} has the axes {' '.join(axes)}; features need a vector at each position, as at "
        f"blocks.0.hook_resid_post.",
    )
    return name


@dataclass(frozen=True)
class InScope(OfKind):
    """Positions whose state is in a scope."""

    @classmethod
    def within(cls, scope: Scope, where: Rule | None = None) -> Rule | None:
        """The rule of a scope, limited to that of ``where=``; None for all positions."""
        states = states_of(scope)
        if states == STATES:
            return where
        return cls(states) if where is None else cls(states) & where

    def start(self, now: Moment) -> Chooser:
        require(
            tuple(self.names) != ("masked",) or now.model.mask_token_id is not None,
            f"scope='masked' selects nothing: {now.model.name} has no mask token. Use 'decided'.",
        )
        return super().start(now)


def selected(places: Places, hook: Point, value: Tensor) -> Bool[Tensor, "batch pos"] | None:
    """True at the places of a value [batch, pos, ...], without padding; None if there are none in this pass."""
    rows, queries = value.shape[:2]
    found = places.of_queries(hook, queries, value.device)
    if found is None:
        return None
    first = hook.forward_pass.first(queries)
    return found.any(dim=1).expand(rows, -1) & hook.forward_pass.real[:, first : first + queries].to(value.device)


@dataclass(eq=False)
class ScopeReader(Reader):
    """Hands the activations at the places of a scope to a function, pass by pass.

    Attributes:
        point: canonical name of the point.
        take: gets the point, the places [batch, pos] of the pass and the activations [place, d], in float32.
        scope: see the module.
    """

    point: str
    take: Callable[[Point, Bool[Tensor, "batch pos"], Float[Tensor, "place d"]], None]
    _: KW_ONLY
    scope: Scope = "all"

    @property
    def rule(self) -> Rule | None:
        """The rule of ``scope=``."""
        return InScope.within(self.scope)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        places = Places(self, model, run, [self.point])

        def read(value: Tensor, hook: Point) -> None:
            if (chosen := selected(places, hook, value)) is not None:
                self.take(hook, chosen, value[chosen].flatten(1).float())

        return places.around([(self.point, read)])
