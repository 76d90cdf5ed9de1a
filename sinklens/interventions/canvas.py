"""Interventions on the canvas itself: tokens forced or masked again, and an extra token that serves as a sink.

One way this fails: a sampler plans how many positions it decides per step. What is masked again in the last steps may
stay masked; the answer then says so (`Answer.masks`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.base import Canvas, Intervention, Pairs, Surroundings, within

if TYPE_CHECKING:
    from sinklens.model import Model


@dataclass(frozen=True, kw_only=True)
class ForceTokens(Intervention):
    """Put tokens on the canvas when the chosen steps begin.

    Attributes:
        tokens: position -> token id; negative positions count from the end of the canvas.
    """

    tokens: Mapping[int, int]

    def on(self, model: "Model", run: Surroundings | None = None) -> Pairs:
        """See `Intervention.on`."""
        _needs_run(self, run)
        in_step = self.step_test(run)
        for token in self.tokens.values():
            if not 0 <= token < model.cfg.d_vocab:
                raise SettingError(f"token {token} does not exist; the vocabulary is 0 to {model.cfg.d_vocab - 1}.")

        def force(value: Int[Tensor, "batch pos"], hook: Point) -> Tensor | None:
            if not in_step(hook.step):
                return None
            value = value.clone()
            for position, token in self.tokens.items():
                value[:, within("position", [position], value.shape[1])] = token
            return value

        return [("denoise.hook_canvas", force)]


@dataclass(frozen=True, kw_only=True)
class Remask(Intervention):
    """Mask `positions` of the answer again when the chosen steps begin; diffusion models only."""

    def on(self, model: "Model", run: Surroundings | None = None) -> Pairs:
        """See `Intervention.on`."""
        _needs_run(self, run)
        assert run is not None
        if run.causal:
            raise SettingError("an autoregressive model has no mask token; Remask is for diffusion models.")
        in_step = self.step_test(run)
        places = within("position", self.positions, run.real.shape[1])
        if self.positions is not None and any(place < run.prompt_length for place in places):
            raise SettingError(
                f"Remask takes positions of the answer, {run.prompt_length} to {run.real.shape[1] - 1}; got {places}."
            )
        places = [place for place in places if place >= run.prompt_length]

        def remask(value: Int[Tensor, "batch pos"], hook: Point) -> Tensor | None:
            if not in_step(hook.step):
                return None
            value = value.clone()
            value[:, places] = run.mask_id
            return value

        return [("denoise.hook_canvas", remask)]


@dataclass(frozen=True, kw_only=True)
class SinkToken(Intervention):
    """An extra token that sees itself alone and is seen by all (One Token Is Enough, 2601.19657; there trained).

    It stands before the prompt or behind the answer and is part of the canvas: positions of the others move by one
    in the first case, their distances do not change. In ``t.sinks`` it is a position like any other.

    Attributes:
        at: "front" or "end"; "end" for diffusion models only.
        token: its id; by default the start token, or else the end token.
        value: "own", what the model computes for it; or "zero", so that attention to it carries nothing.
    """

    at: Literal["front", "end"] = "front"
    token: int | None = None
    value: Literal["own", "zero"] = "own"

    def __post_init__(self) -> None:
        if self.at not in ("front", "end") or self.value not in ("own", "zero"):
            raise SettingError(f"at is 'front' or 'end' and value 'own' or 'zero'; got {self.at!r} and {self.value!r}.")

    def extend(
        self, model: "Model", ids: Int[Tensor, "batch pos"], real: Bool[Tensor, "batch pos"]
    ) -> tuple[Int[Tensor, "batch longer"], Bool[Tensor, "batch longer"], Int[Tensor, "batch behind"]]:
        """See `Intervention.extend`."""
        if self.at == "end" and bool(model.config.is_causal):
            raise SettingError("an autoregressive answer has no end to put a token behind; use at='front'.")
        extra = ids.new_full((len(ids), 1), self._token(model))
        if self.at == "end":
            return ids, real, extra
        return torch.cat([extra, ids], dim=1), torch.cat([torch.ones_like(extra).bool(), real], dim=1), ids[:, :0]

    def _token(self, model: "Model") -> int:
        if self.token is not None:
            if not 0 <= self.token < model.cfg.d_vocab:
                raise SettingError(
                    f"token {self.token} does not exist; the vocabulary is 0 to {model.cfg.d_vocab - 1}."
                )
            return self.token
        candidates = [*model.special_tokens["start"], *model.special_tokens["end"]]
        if not candidates:
            raise SettingError(f"{model.name} names no start and no end token; say which with token=.")
        return candidates[0]

    def on(self, model: "Model", run: Surroundings | None = None) -> Pairs:
        """See `Intervention.on`; in a single pass the extra token is part of the ids already."""
        layers, in_step = self.chosen_layers(model), self.step_test(run)
        canvas = Canvas()
        place = 0 if self.at == "front" else -1

        def whole(value: Tensor) -> bool:
            """Whether a pass computes all positions, the extra one among them."""
            return canvas.ids is None or value.shape[1] == canvas.ids.shape[1]

        queries: dict[str, int] = {}

        def count(value: Float[Tensor, "batch pos head d_head"], hook: Point) -> None:
            queries["now"] = value.shape[1] if whole(value) else 0

        def alone(value: Float[Tensor, "batch head query key"], hook: Point) -> Tensor | None:
            if not in_step(hook.step) or not queries["now"]:
                return None
            value = value.expand(-1, -1, queries["now"], -1).clone()
            own = value[:, :, place, place].clone()
            value[:, :, place] = -torch.inf
            value[:, :, place, place] = own
            return value

        def empty(value: Float[Tensor, "batch pos kv_head d_head"], hook: Point) -> Tensor | None:
            if not in_step(hook.step) or not whole(value):
                return None
            value = value.clone()
            value[:, place] = 0
            return value

        pairs: Pairs = [("denoise.hook_canvas", canvas.hook)] if run is not None else []
        for layer in layers:
            at = f"blocks.{layer}.attn"
            if self.value == "zero":
                pairs.append((f"{at}.hook_v", empty))
            pairs += [(f"{at}.hook_rot_q", count), (f"{at}.hook_attn_mask", alone)]
        return pairs


def _needs_run(what: Intervention, run: Surroundings | None) -> None:
    if run is None:
        raise SettingError(
            f"{type(what).__name__} changes the canvas of a run; for a single pass give other ids, or use generate."
        )
