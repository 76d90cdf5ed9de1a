"""Interventions on networks that are conditioned on a noise level: MDLM, BD3-LM, SEDD, Duo and GIDD.

The network reads one number for each row, its *time*. It becomes a vector, the *conditioning*, from which every layer
computes a shift, a scale and a gate for its attention and for its MLP:

    time → hook_cond → modulation of each layer, and of the final norm

`ForceTime` changes the time, `FreezeCond` the conditioning in all layers or in some, and `ClampGates` single gates. The
sampler and its schedule stay as they are, so a step decides as much as before.

An untimed network (MDLM, BD3-LM) reads time 0 whatever it is given. Its gates are constants, which can be clamped; the
other two interventions are refused, because they would change nothing.

Pitfall: no canvas of training had a noise level that differs from its time. Compare with a change of the same size in
the other direction.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.names import MODULATION
from sinklens.hooks.points import Point
from sinklens.runs.intervention import Intervention, Pairs, RunContext, within

if TYPE_CHECKING:
    from sinklens.model import Model

COND = "hook_cond"


class _Conditioning(Intervention):
    """Base class of interventions on what the noise level changes, which is the same at all positions of a row."""

    within_step: ClassVar[bool] = True
    refused: ClassVar[tuple[str, ...]] = ("heads", "positions")

    def _check(self, model: "Model", timed: bool = True) -> None:
        """Check that the network has modulations and, if it must be `timed`, that it reads its time."""
        what = type(self).__name__
        if not model.tree.architecture.time:
            raise SettingError(f"{model.name} is not conditioned on a noise level; leave {what} out.")
        if timed and not model.tree.timed:
            raise SettingError(
                f"{model.name} is untimed: it reads time 0 at every step, so {what} would change nothing. Use a timed "
                f"model, such as Duo or SEDD; ClampGates also works here."
            )


@dataclass(frozen=True, kw_only=True)
class ForceTime(_Conditioning):
    """Make the network read another noise level than that of its step.

        ForceTime(time=0.1, steps=range(4))  # the first canvases, as if they were almost clean
        ForceTime(time=run.time.flip(1))     # the noise levels of a run, in reverse

    Attributes:
        time: the noise level as the network reads it (σ, or t for GIDD): one number, one per row, or one per row and
            step as in ``run.time``. In a run of several rows, an axis of size 1 is repeated.
    """

    refused: ClassVar[tuple[str, ...]] = ("layers", "heads", "positions")

    time: "float | Float[Tensor, '#batch'] | Float[Tensor, '#batch step']"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = torch.as_tensor(self.time)
        if given.ndim > 2 or given.numel() == 0:
            raise SettingError(
                f"time must be a number, or have the axes [batch] or [batch, step]; got shape {list(given.shape)}."
            )
        if not bool((given >= 0).all()) or bool(given.isinf().any()):
            raise SettingError("time must have finite numbers of at least 0.")

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        self._check(model)
        in_step, levels = self.step_test(run), torch.as_tensor(self.time).float()

        def force(value: Float[Tensor, " batch"], hook: Point) -> Tensor | None:
            return of_rows(levels, value, hook, 0, "time") if in_step(hook.step) else None

        return [("hook_time", force)]


@dataclass(frozen=True, kw_only=True)
class FreezeCond(_Conditioning):
    """Keep the conditioning of a step, or use that of another run, in all layers or in some.

        FreezeCond(of_step=0)                    # all later steps are modulated like the first
        FreezeCond(cond=cache["hook_cond"], layers=[2])

    Attributes:
        cond: the conditioning, one vector for all rows, [d_cond], one per row, [batch, d_cond], or one per row and
            step, [batch, step, d_cond].
        of_step: instead of `cond`, the step of this run whose conditioning later steps keep.
        layers: layers whose modulations are computed from it; None for all layers and the final norm.
    """

    within_step: ClassVar[bool] = False

    cond: "Float[Tensor, '*batch d_cond'] | None" = None
    of_step: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.cond is None) == (self.of_step is None):
            raise SettingError("pass either cond=, a vector for each row, or of_step=, a step of the run.")

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        self._check(model)
        architecture = model.tree.architecture
        if self.cond is not None and (self.cond.ndim > 3 or self.cond.shape[-1:] != (model.config.cond_dim,)):
            raise SettingError(
                f"cond must end with an axis of {model.config.cond_dim} numbers, after at most [batch, step]; got "
                f"shape {list(self.cond.shape)}."
            )
        if self.of_step is not None and run.single:
            raise SettingError("of_step= names a step of a run, which a single pass has not; pass cond=.")
        at = None if self.of_step is None else within("step", [self.of_step], run.steps)[0]
        in_step, layers = self.step_test(run), self.chosen_layers(model) if self.layers is not None else []
        now: dict[str, Tensor] = {}
        kept: dict[int | None, Tensor] = {} if self.cond is None else {None: self.cond}

        def condition(value: Float[Tensor, "batch d_cond"], hook: Point) -> Tensor | None:
            now.clear()
            if at is not None and hook.step == at:
                kept[at] = value.detach().clone()
            elif at in kept and in_step(hook.step):
                now[COND] = of_rows(kept[at], value, hook, 1, "cond")
            return now.get(COND) if self.layers is None else None

        def part(layer: int, number: int) -> Callable[[Tensor, Point], Tensor | None]:
            block: Any = model.tree.hf.get_submodule(f"{architecture.base}.{architecture.layers}")[layer]
            made: Callable[[Tensor], Tensor] = block.get_submodule(architecture.modulation)

            def change(value: Float[Tensor, "batch d_model"], hook: Point) -> Tensor | None:
                return made(now[COND]).chunk(len(MODULATION), dim=-1)[number] if now else None

            return change

        parts = [(layer, number, spec.name) for layer in layers for number, spec in enumerate(MODULATION)]
        changes = [(f"blocks.{layer}.adaln.{name}", part(layer, number)) for layer, number, name in parts]
        return [(COND, condition), *changes]


@dataclass(frozen=True, kw_only=True)
class ClampGates(_Conditioning):
    """Set or limit the gates with which layers write to the residual stream; at 0, a layer writes nothing.

        ClampGates(layers=[1], of="attn", at=0.0)

    Attributes:
        of: whose output: "attn", "mlp" or "both".
        at: the value of all of a gate's dimensions, or one for each, [d_model].
        mode: "set" gates to `at`; or "limit" their magnitude to it.
    """

    of: Literal["attn", "mlp", "both"] = "both"
    at: "float | int | Float[Tensor, ' d_model']" = 0.0
    mode: Literal["set", "limit"] = "set"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "limit" and bool((torch.as_tensor(self.at) < 0).any()):
            raise SettingError(f"a limit must not be negative; got at={self.at!r}.")

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        self._check(model, timed=False)
        in_step, bound = self.step_test(run), torch.as_tensor(self.at)
        if bound.shape not in ((), (model.cfg.d_model,)):
            raise SettingError(f"at must be one number, or {model.cfg.d_model}; got shape {list(bound.shape)}.")

        def clamp(gate: Float[Tensor, "batch d_model"], hook: Point) -> Tensor | None:
            if not in_step(hook.step):
                return None
            most = bound.to(gate)
            return most.expand_as(gate) if self.mode == "set" else gate.clamp(-most, most)

        parts = ("attn", "mlp") if self.of == "both" else (self.of,)
        layers = self.chosen_layers(model)
        return [(f"blocks.{layer}.adaln.hook_{part}_gate", clamp) for layer in layers for part in parts]


def of_rows(
    given: Float[Tensor, "..."], value: Float[Tensor, "batch *shape"], hook: Point, inner: int, name: str
) -> Float[Tensor, "batch *shape"]:
    """`given`, [*shape], [batch, *shape] or [batch, step, *shape], for the rows and the step of `value`.

    Args:
        inner: number of axes of a row's value.

    Raises:
        SettingError: `given` has another number of rows, or no such step.
    """
    if given.ndim == inner + 2:
        step = int(hook.step or 0)
        if step >= given.shape[1]:
            raise SettingError(f"{name} has {given.shape[1]} steps, and the run is at step {step}.")
        given = given[:, step]
    rows = len(given) if given.ndim > inner else 1
    if len(value) % rows:
        raise SettingError(f"{name} has {rows} rows, but the pass has {len(value)}; pass one, or {len(value)}.")
    repeated = given.to(value).expand(rows, *value.shape[1:])
    return repeated.repeat(len(value) // rows, *(1,) * inner)
