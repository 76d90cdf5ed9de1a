"""The taps of a mixture of experts: the router's logits, the experts it chooses, their weights and their outputs.

A *router* maps each token to one logit per expert, chooses k experts and weights them; the output of the layer is the
weighted sum of their outputs, plus that of a *shared expert* that sees every token. The points follow each other, and
editing one changes those after it:

- ``hook_router_logits``: experts are chosen and weighted from the value that the hooks return;
- ``hook_expert_indices``: an expert that a hook puts in gets the weight that the router's logits give it;
- ``hook_expert_weights``: multiplied with the outputs as they are, without another normalization;
- ``hook_expert_out``: each chosen expert alone; while it is watched, the experts are computed a second time.

transformers' routers compute logits, choice and weights in one function, so the rules are written out here
(`ROUTING`); a test compares each with transformers' own, bit for bit.

Limitation: experts see batch and position as one axis, and transformers computes all tokens of an expert at once. The
last bits of a token's result therefore depend on which other tokens have the same expert.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from sinklens.errors import SettingError
from sinklens.hooks.architectures import Experts
from sinklens.hooks.offload import class_forward, value_of
from sinklens.hooks.points import Point, Tap, read_at


class Routing(NamedTuple):
    """How a router turns logits into experts and weights.

    Attributes:
        choose: (router, logits [token, expert]) -> the chosen experts [token, k]; None if the router reads its logits
            from a module of its own (`Experts.logits`) and so follows edits automatically.
        weigh: (router, first output of the router [token, expert], experts [token, k]) -> their weights [token, k].
    """

    choose: Callable[[Any, Tensor], Tensor] | None
    weigh: Callable[[Any, Tensor, Tensor], Tensor]


def _top_softmax(router: Any, logits: Float[Tensor, "token expert"]) -> Int[Tensor, "token k"]:
    return logits.softmax(dim=-1, dtype=torch.float).topk(router.top_k, dim=-1).indices


def _softmax_weights(
    router: Any, logits: Float[Tensor, "token expert"], experts: Int[Tensor, "token k"]
) -> Float[Tensor, "token k"]:
    """Softmax over all experts, in float32; divided by the sum over the chosen ones if the router says so."""
    weights = logits.softmax(dim=-1, dtype=torch.float).gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype)


def _top_of_groups(router: Any, logits: Float[Tensor, "token expert"]) -> Int[Tensor, "token k"]:
    """The best experts of the best groups, by sigmoid plus a bias that affects only this choice.

    A group is a run of consecutive experts; its score is the sum of its two best experts.
    """
    scores = logits.sigmoid() + value_of(router, "e_score_correction_bias")
    grouped = scores.unflatten(-1, (router.num_group, -1))
    best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(router.topk_group, dim=-1, sorted=False).indices
    kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, True)
    scores = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    return scores.topk(router.top_k, dim=-1, sorted=False).indices


def _sigmoid_weights(
    router: Any, logits: Float[Tensor, "token expert"], experts: Int[Tensor, "token k"]
) -> Float[Tensor, "token k"]:
    """Sigmoid without the bias; divided by the sum over the chosen ones if the router says so, then scaled."""
    weights = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * router.routed_scaling_factor


def _scaled_probabilities(
    router: Any, probabilities: Float[Tensor, "token expert"], experts: Int[Tensor, "token k"]
) -> Float[Tensor, "token k"]:
    """Probabilities divided by their sum over the chosen experts, times each expert's own scale."""
    weights = probabilities.gather(1, experts)
    return weights / weights.sum(dim=-1, keepdim=True) * value_of(router, "per_expert_scale")[experts]


ROUTING = {
    "softmax": Routing(_top_softmax, _softmax_weights),
    "scaled softmax": Routing(None, _scaled_probabilities),
    "grouped sigmoid": Routing(_top_of_groups, _sigmoid_weights),
}


class ExpertTaps:
    """The taps of one mixture of experts. It keeps batch and positions of the pass, which the router does not see."""

    def __init__(self, mlp: nn.Module, points: Any, experts: Experts, undo: ExitStack) -> None:
        self.points, self.rule = points, ROUTING[experts.routing]
        self.shape = torch.Size()
        shown = [point for name, point in points.named_children() if name.startswith(("hook_router", "hook_expert"))]
        router, mixed = mlp.get_submodule(experts.router), mlp.get_submodule(experts.experts)
        Tap(undo, shown, lambda: mlp.register_forward_pre_hook(self._enter).remove)
        Tap(undo, shown, lambda: router.register_forward_hook(self._route).remove)
        Tap(undo, shown, lambda: mixed.register_forward_hook(self._mix).remove)
        if experts.logits:
            scored = router.get_submodule(experts.logits)
            through = partial(self._through, points.hook_router_logits)  # the router itself reads these logits
            Tap(undo, shown, lambda: scored.register_forward_hook(lambda _, __, logits: through(logits)).remove)

    def _enter(self, _module: nn.Module, inputs: tuple[Tensor]) -> None:
        self.shape = inputs[0].shape[:2]

    def _route(
        self, router: Any, _inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, weights and indices, after the hooks on each."""
        logits, weights, indices = output
        if self.points.hook_router_logits.watched and self.rule.choose is not None:
            logits = self._through(self.points.hook_router_logits, logits)
            indices = self.rule.choose(router, logits)
            weights = self.rule.weigh(router, logits, indices)
        if self.points.hook_expert_indices.watched:
            indices = self._through(self.points.hook_expert_indices, indices).long()
            self._check(indices, logits.shape[-1])
            weights = self.rule.weigh(router, logits, indices)
        return logits, self._through(self.points.hook_expert_weights, weights), indices

    def _through(self, point: Point, value: Tensor) -> Tensor:
        """`value`, whose first axis is batch and position, passed through `point` if the point is watched."""
        return point(value.unflatten(0, self.shape)).flatten(0, 1) if point.watched else value

    def _check(self, indices: Tensor, count: int) -> None:
        outside = indices[(indices < 0) | (indices >= count)]
        if outside.numel():
            raise SettingError(
                f"{self.points.hook_expert_indices.name} was set to {int(outside[0])}, but the layer has {count} "
                f"experts, 0 to {count - 1}. To ablate an expert, set its weight at hook_expert_weights to 0."
            )

    def _mix(self, experts: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> Tensor | None:
        """The weighted sum of the chosen experts' outputs, while these are watched."""
        point = self.points.hook_expert_out
        if not point.watched:
            return None
        tokens, indices, weights = inputs
        alone = indices.reshape(-1, 1)
        each = class_forward(
            experts,
            tokens.repeat_interleave(indices.shape[1], dim=0),
            alone,
            torch.ones_like(alone, dtype=weights.dtype),
        )
        shown, only_read = read_at(point, each.unflatten(0, (*self.shape, -1)))
        if only_read:
            return None
        return (shown.flatten(0, 1) * weights[..., None]).sum(dim=1).to(output.dtype)
