"""What every loaded model has to show before sinklens hands it out.

Four things are tried on a few tokens: watching changes nothing, rows of a softmax sum to 1, attention is bidirectional
(or causal) as the family says, and editing the pattern of some layer reaches the logits. A model that fails is refused,
because every later measurement would be of something other than the model.

One way this fails: the check runs one short pass in the model's own type; it cannot see a fault that needs a long
context. `sinklens.load(..., check=False)` skips it.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.errors import SelfCheckError
from sinklens.hooks.normalizers import softmax, way_of
from sinklens.hooks.tree import HookTree

TOKENS = 6
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


def check(tree: HookTree, causal: bool) -> None:
    """Run the self-check.

    Raises:
        SelfCheckError: names what failed, with the figure.
    """
    with torch.no_grad():
        ids = (torch.arange(TOKENS) * 7 + 3).remainder(tree.cfg.d_vocab)[None].to(tree.cfg.device)
        plain = tree(ids)
        if not torch.isfinite(plain).all():
            raise SelfCheckError("the model's logits are not finite on a plain pass; its weights are broken.")
        patterns, hooked = _watched_pass(tree, ids)
        scale = max(1.0, plain.abs().max().item())
        tolerance = TOLERANCE.get(tree.cfg.dtype, 1e-3)
        _require((hooked - plain).abs().max().item() / scale, tolerance, "watching every pattern changes the logits by")
        if len(patterns) != tree.cfg.n_layers:
            raise SelfCheckError(
                f"{len(patterns)} of {tree.cfg.n_layers} layers showed a pattern; the others do not run sinklens's "
                f"attention (attn_implementation is {tree.hf.config._attn_implementation!r})."
            )
        for layer, pattern in enumerate(patterns):
            if way_of(tree.hf) is softmax:
                off = (pattern.float().sum(-1) - 1).abs().max().item()
                _require(off, max(tolerance, 1e-3), f"rows of the pattern of layer {layer} miss 1 by")
            _check_direction(pattern, layer, causal)
        _check_edit(tree, ids, plain)


def _watched_pass(tree: HookTree, ids: Int[Tensor, "batch pos"]) -> tuple[list[Tensor], Tensor]:
    seen: list[Tensor] = []
    hook: list[Any] = [(lambda name: name.endswith("hook_pattern"), lambda value, hook: seen.append(value))]
    return seen, tree.run_with_hooks(ids, fwd_hooks=hook)


def _check_direction(pattern: Float[Tensor, "batch head query key"], layer: int, causal: bool) -> None:
    later = pattern.float().triu(1).sum().item()
    if causal and later > 0:
        raise SelfCheckError(
            f"layer {layer} attends to later positions (mass {later:.3g}) though its family is causal."
        )
    if not causal and later == 0:
        raise SelfCheckError(
            f"layer {layer} never attends to later positions though its family is bidirectional: "
            f"the causal mask is still on."
        )


def _check_edit(tree: HookTree, ids: Int[Tensor, "batch pos"], plain: Float[Tensor, "batch pos vocab"]) -> None:
    def drop_all(value: Tensor, hook: object) -> Tensor:
        return torch.zeros_like(value)

    for layer in range(tree.cfg.n_layers):  # one may have an output projection of zeros, and say nothing
        edited = tree.run_with_hooks(ids, fwd_hooks=[(f"blocks.{layer}.attn.hook_pattern", drop_all)])
        if not torch.equal(edited, plain):
            return
    raise SelfCheckError(
        "setting the pattern of any layer to zero leaves the logits as they were: edits do not reach them. Either the "
        "model runs another attention, or its attention adds nothing in any layer; sinklens.load(..., check=False) "
        "loads it all the same."
    )


def _require(value: float, limit: float, what: str) -> None:
    if not value <= limit:
        raise SelfCheckError(f"{what} {value:.3g}; at most {limit:.3g} is allowed. The hook points cannot be trusted.")
