"""The self-check that every model must pass before `sinklens.load` returns it.

On a few tokens it verifies that every hook point fires exactly once per pass, with its documented shape; that watching
the points changes nothing; that softmax rows sum to 1; that attention is bidirectional (or causal, or block-causal) as
the family specifies; and that an edit of each kind of point reaches the logits. A model that fails is rejected, because
later measurements would not describe what it computes.

Four passes suffice for any number of points: one without hooks, one watched at every point, and two of a batch with one
row per kind of point, without and with an edit of that kind in all layers that have it. The values at the keys differ
in both: if all were equal, it would make no difference which keys attention selects.

A model with an encoder is checked on a short text and a short canvas. The last encoder layer's output reaches nothing.

Limitation: the check runs short passes in the model's dtype and cannot detect a fault that needs a long context, nor a
kind of point whose edits are lost in some layers only. `sinklens.load(..., check=False)` skips the check.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache

from sinklens.errors import SelfCheckError, require
from sinklens.hooks import names
from sinklens.hooks.attention.blocks import Blocks, rule_of
from sinklens.hooks.attention.normalizers import normalizer_of, softmax
from sinklens.hooks.front import HookPair
from sinklens.hooks.tree import HookTree

TOKENS = 6
LONGEST = 4096  # with blocks that are longer, a pass of two would need more memory than the model
EDITED = 2  # tokens of the passes with edits, whose rows are many: two keys suffice to hide one
TIME = 0.5
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
HIDDEN = -1e4  # added to the scores of a key: no attention, in every dtype
Run = Callable[..., Float[Tensor, "row pos vocab"]]


def check(tree: HookTree, causal: bool) -> None:
    """Run the self-check.

    Raises:
        SelfCheckError: a check failed; the message gives the measured value.
    """
    blocks = rule_of(tree.hf.config)
    tokens = TOKENS if blocks is None else min(max(TOKENS, blocks.length + 2), LONGEST)  # more than one block
    run: Run = partial(_canvas_logits if tree.architecture.encoder else _logits, tree)
    seen: dict[str, list[Tensor]] = {name: [] for name in tree.point_names() if not name.startswith("denoise.")}
    tree.watch.recompute = True  # what the check changes and what it only reads then take the same way
    with torch.no_grad():
        plain = run(1, tokens, [])
        require(
            torch.isfinite(plain).all(),
            "the model's logits are not finite in a plain pass; its weights are broken.",
            SelfCheckError,
        )
        hooked = run(1, tokens, [(seen.__contains__, lambda value, hook: seen[hook.name].append(value))])
        change = (hooked - plain).abs().max().item() / max(1.0, plain.abs().max().item())
        _require(change, TOLERANCE.get(tree.cfg.dtype, 1e-3), "watching every point changes the logits by")
        _check_points(tree, seen, tokens)
        if tree.architecture.encoder:
            _check_patterns(tree, seen, names.ENCODER, causal=True, blocks=None)
        _check_patterns(tree, seen, "", causal, blocks)
        silent = _silent(tree, run)
    tree.watch.recompute = False
    if not any(value.any() for name, (value,) in seen.items() if name.endswith("hook_mlp_out")):
        silent = [kind for kind in silent if ".ln2." not in kind and ".mlp." not in kind]  # zeros hide these edits
    require(
        not silent,
        f"edits of {', '.join(silent)} do not change the logits. Either the model does not run sinklens's code "
        f"there, or this part of it adds nothing in any layer; sinklens.load(..., check=False) loads it anyway.",
        SelfCheckError,
    )


def _logits(tree: HookTree, rows: int, tokens: int, hooks: list[HookPair]) -> Float[Tensor, "row pos vocab"]:
    """Logits of a pass over `tokens` tokens, the same in every row."""
    time: dict[str, Any] = {"time": TIME} if tree.timed else {}
    with tree.hooks(fwd_hooks=hooks):
        return tree.forward(_ids(tree, rows, tokens), **time)


def _canvas_logits(tree: HookTree, rows: int, tokens: int, hooks: list[HookPair]) -> Float[Tensor, "row pos vocab"]:
    """Logits of a canvas of `tokens` tokens after as many others, the same in every row."""
    ids, passes, cache = _ids(tree, rows, 2 * tokens), tree.canvas_pass, DynamicCache(config=tree.hf.config)
    with tree.hooks(fwd_hooks=hooks):
        passes.encode(ids[:, :tokens], None, cache)
        return tree.head(passes.decode(ids[:, tokens:], None, cache))


def _ids(tree: HookTree, rows: int, tokens: int) -> Int[Tensor, "row pos"]:
    return (torch.arange(tokens) * 7 + 3).remainder(tree.cfg.d_vocab).expand(rows, -1).to(tree.cfg.device)


def _check_patterns(
    tree: HookTree, seen: dict[str, list[Tensor]], prefix: str, causal: bool, blocks: Blocks | None
) -> None:
    """Check sums and direction of the patterns below `prefix`."""
    tolerance = max(TOLERANCE.get(tree.cfg.dtype, 1e-3), 1e-3)
    for layer in range(tree.cfg.n_layers):
        pattern = seen[f"{prefix}blocks.{layer}.attn.hook_pattern"][0]
        if normalizer_of(tree.hf) is softmax:
            off = (pattern.float().sum(-1) - 1).abs().max().item()
            _require(off, tolerance, f"rows of the pattern of {prefix}layer {layer} miss 1 by")
        _check_direction(pattern, f"{prefix}layer {layer}", causal, blocks)


def _check_points(tree: HookTree, seen: dict[str, list[Tensor]], tokens: int) -> None:
    """Check that every point fired once, with its shape."""
    layers = tree.cfg.n_layers
    with_pattern = sum(len(seen[f"blocks.{layer}.attn.hook_pattern"]) == 1 for layer in range(layers))
    require(
        with_pattern == layers,
        f"{with_pattern} of {layers} layers showed a pattern; the others do not run sinklens's "
        f"attention (attn_implementation is {tree.hf.config._attn_implementation!r}).",
        SelfCheckError,
    )
    for name, values in seen.items():
        if len(values) != 1:
            others = sum(len(values) != 1 for values in seen.values()) - 1
            raise SelfCheckError(
                f"{name} was reached {len(values)} times in one pass, and {others} other points not exactly once "
                f"either; every point must be reached exactly once. A module of this model does not run its class's "
                f"forward: pass the model to sinklens.load before other libraries change its modules."
            )
        if values[0].shape != (expected := _shape(tree, name, tokens, seen)):
            raise SelfCheckError(
                f"{name} showed a value of shape {list(values[0].shape)}, but {list(expected)} was expected; "
                f"the module at this point does not compute what sinklens assumes."
            )


def _shape(tree: HookTree, name: str, tokens: int, seen: dict[str, list[Tensor]]) -> tuple[int, ...]:
    """The shape that the table of points gives for a point in the pass of the check."""
    cfg, kind = tree.cfg, name.rsplit(".", 1)[-1]
    d_head, kv_head, keys = cfg.d_head, cfg.n_key_value_heads, tokens
    if ".attn." in name and tree.architecture.encoder:  # layers differ, and a window hides keys
        layer = name.split(".attn.")[0]
        kv_head, d_head = seen[f"{layer}.attn.hook_v"][0].shape[2:]
        keys = seen[f"{layer}.attn.hook_rot_k"][0].shape[1]
    sizes = {
        "batch": 1, "pos": tokens, "query": tokens, "key": keys, "head": cfg.n_heads, "d_head": d_head,
        "kv_head": kv_head, "d_model": cfg.d_model, "d_mlp": cfg.d_mlp, "query|1": 1, "1": 1,
        "expert": cfg.num_experts or 0, "k": cfg.experts_per_token or 0, "d_cond": cfg.d_cond or 0,
    }  # fmt: skip
    return tuple(sizes[axis] for axis in names.axes_of(kind))


def _check_direction(
    pattern: Float[Tensor, "batch head query key"], layer: str, causal: bool, blocks: Blocks | None
) -> None:
    later = pattern.float().triu(1 + pattern.shape[-1] - pattern.shape[-2]).sum().item()
    if blocks is not None:
        causal = blocks.length == 1
        number = torch.arange(pattern.shape[-1], device=pattern.device) // blocks.length
        beyond = pattern.float().masked_fill(number[None, :] <= number[:, None], 0.0).sum().item()
        require(
            beyond <= 0,
            f"{layer} attends to later blocks of {blocks.length} positions (mass {beyond:.3g}), but its family "
            f"is block-causal.",
            SelfCheckError,
        )
    require(
        not causal or later <= 0,
        f"{layer} attends to later positions (mass {later:.3g}), but its family is causal.",
        SelfCheckError,
    )
    require(
        causal or later != 0,
        f"{layer} never attends to later positions, but its family is bidirectional: the causal mask is still on.",
        SelfCheckError,
    )


def _kinds(tree: HookTree) -> dict[str, list[str]]:
    """The points whose edits reach the logits, by kind: those of all layers are one."""
    nowhere = (
        f"{names.ENCODER}blocks.{tree.cfg.n_layers - 1}.",
        f"{names.ENCODER}ln_final.",
    )  # their output goes nowhere
    found: dict[str, list[str]] = {}
    for name in tree.point_names():
        of_sampler = name.startswith("denoise.") and not name.endswith(".hook_self_conditioning")
        if not of_sampler and not name.startswith(nowhere) and not name.endswith(names.READ_ONLY):
            found.setdefault(re.sub(r"blocks\.\d+", "blocks.*", name), []).append(name)
    return found


def _silent(tree: HookTree, run: Run) -> list[str]:
    """The kinds of points that can be edited in all layers without any effect on the logits.

    Each kind has a row of the batch. The same pass runs with and without edits, under the same hooks, so values that
    no edit reaches are bitwise equal.
    """
    kinds = _kinds(tree)
    rows = {name: row for row, kind in enumerate(kinds) for name in kinds[kind]}
    editing = False

    def edit(value: Tensor, hook: Any) -> Tensor | None:
        row, vary = rows[hook.name], hook.name.endswith("attn.hook_v")
        if not editing and not vary:
            return None
        changed = _other(value[:1], hook.name).expand_as(value).clone() if vary else value.clone()
        changed[row] = _other(value[row], hook.name) if editing else value[row]
        return changed

    hooks: list[HookPair] = [(rows.__contains__, edit)]  # one predicate: each name would be looked up among all
    before = run(len(kinds), EDITED, hooks)
    editing = True
    after = run(len(kinds), EDITED, hooks)
    return [kind for row, kind in enumerate(kinds) if _same(tree, before[row], after[row])]


def _same(tree: HookTree, found: Tensor, before: Tensor) -> bool:
    """Whether no edit reached a row; with experts up to rounding, as other rows' tokens share their matrix products."""
    if not any(parts.experts for parts in tree.parts):
        return torch.equal(found, before)
    return bool((found - before).abs().max() <= 4 * torch.finfo(before.dtype).eps * before.abs().max())


def _other(value: Tensor, name: str) -> Tensor:
    """A replacement for `value`: the first key hidden, another expert, or numbers between 1/2 and 3/2.

    Every second scale of a norm is negative, since the norms of queries, keys and values undo a positive factor.
    """
    if name.endswith("hook_expert_indices"):
        return torch.where(value == 0, 1, 0)
    if name.endswith("hook_attn_mask"):
        hidden = torch.zeros_like(value)
        hidden[..., 0] = HIDDEN
        return hidden
    count = torch.arange(value.numel(), device=value.device, dtype=torch.float32)
    signs = 1 - 2 * (count % 2) if name.endswith("hook_scale") else 1
    return ((1 + count.cos() / 2) * signs).view(value.shape).to(value.dtype)


def _require(value: float, limit: float, what: str) -> None:
    require(
        value <= limit,
        f"{what} {value:.3g}; at most {limit:.3g} is allowed. The hook points cannot be trusted.",
        SelfCheckError,
    )
