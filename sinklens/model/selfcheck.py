"""The self-check that every model must pass before `sinklens.load` returns it.

On a few tokens it verifies that every hook point fires exactly once per pass, with its documented shape; that watching
the points changes nothing; that softmax rows sum to 1; that attention is bidirectional (or causal, or block-causal) as
the family specifies; and that an edit of each kind of point reaches the logits. A model that fails is rejected, because
later measurements would not describe what it computes.

Four passes suffice for any number of points: one without hooks, one watched at every point, and two that differ in
edits alone. These two have one row of the batch per kind of point, and edit it in all layers that have the point, since
a layer whose output is zero hides its edits. A model with an encoder reads a short text and then a short canvas; its
last encoder layer's output reaches nothing.

Limitation: the check runs short passes in the model's dtype and cannot detect a fault that needs a long context.
`sinklens.load(..., check=False)` skips the check.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicCache

from sinklens.errors import SelfCheckError
from sinklens.hooks import names
from sinklens.hooks.attention.blocks import Blocks, rule_of
from sinklens.hooks.attention.normalizers import normalizer_of, softmax
from sinklens.hooks.front import HookPair
from sinklens.hooks.tree import HookTree

TOKENS = 6
TIME = 0.5
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
HIDDEN = -1e4  # added to the scores of a key: no attention, in every dtype
READ_ONLY = tuple(f"attn.{name}" for name in names.READ_ONLY)

Seen = Mapping[str, list[Tensor]]
Run = Callable[[int, list[HookPair]], Float[Tensor, "row pos vocab"]]


def check(tree: HookTree, causal: bool) -> None:
    """Run the self-check.

    Raises:
        SelfCheckError: a check failed; the message gives the measured value.
    """
    encoder, blocks = tree.architecture.encoder, rule_of(tree.hf.config)
    tokens = TOKENS if blocks is None else max(TOKENS, blocks.length + 2)  # more than one block
    run = partial(_canvas_logits if encoder else _logits, tree, tokens)
    seen: dict[str, list[Tensor]] = {name: [] for name in tree.point_names() if not name.startswith("denoise.")}
    keep = (lambda name: name in seen, lambda value, hook: seen[hook.name].append(value))
    with torch.no_grad():
        plain = run(1, [])
        if not torch.isfinite(plain).all():
            raise SelfCheckError("the model's logits are not finite in a plain pass; its weights are broken.")
        _check_change(tree, plain, run(1, [keep]), run)
        _check_points(tree, seen, tokens)
        if encoder:
            _check_patterns(tree, seen, names.ENCODER, causal=True, blocks=None)
        _check_patterns(tree, seen, "", causal, blocks)
        _check_edits(tree, seen, run)


def _logits(tree: HookTree, tokens: int, rows: int, hooks: list[HookPair]) -> Float[Tensor, "row pos vocab"]:
    """Logits of `tokens` tokens, the same in every row; a network that reads a noise level gets one."""
    ids = (torch.arange(tokens) * 7 + 3).remainder(tree.cfg.d_vocab).expand(rows, -1).to(tree.cfg.device)
    time: dict[str, Any] = {"time": TIME} if tree.timed else {}
    return tree.run_with_hooks(ids, fwd_hooks=hooks, **time)


def _canvas_logits(tree: HookTree, tokens: int, rows: int, hooks: list[HookPair]) -> Float[Tensor, "row pos vocab"]:
    """Logits of a canvas of `tokens` tokens after as many others, the same in every row."""
    ids = (torch.arange(2 * tokens) * 7 + 3).remainder(tree.cfg.d_vocab).expand(rows, -1).to(tree.cfg.device)
    cache = DynamicCache(config=tree.hf.config)
    with tree.hooks(fwd_hooks=hooks):
        tree.canvas_pass.encode(ids[:, :tokens], None, cache)
        return tree.head(tree.canvas_pass.decode(ids[:, tokens:], None, cache))


def _check_change(tree: HookTree, plain: Tensor, hooked: Tensor, run: Run) -> None:
    """Check that watching changes nothing; else name the kinds of points that change the logits if watched alone."""
    limit, largest = TOLERANCE.get(tree.cfg.dtype, 1e-3), max(1.0, plain.abs().max().item())

    def change(logits: Tensor) -> float:
        return (logits - plain).abs().max().item() / largest

    if change(hooked) <= limit:
        return
    alone: dict[str, list[HookPair]] = {}
    for name in (name for name in tree.point_names() if not name.startswith("denoise.")):
        alone.setdefault(re.sub(r"\d+", "*", name), []).append((name, lambda value, hook: None))
    found = [kind for kind, hooks in alone.items() if not change(run(1, hooks)) <= limit]
    raise SelfCheckError(
        f"watching every point changes the logits by {change(hooked):.3g}; at most {limit:.3g} is allowed. Watched "
        f"alone, {', '.join(found) or 'no kind of point'} changes them as much. The hook points cannot be trusted."
    )


def _check_points(tree: HookTree, seen: Seen, tokens: int) -> None:
    """Check that every point fired once, with its shape."""
    layers = tree.cfg.n_layers
    with_pattern = sum(len(seen[f"blocks.{layer}.attn.hook_pattern"]) == 1 for layer in range(layers))
    if with_pattern != layers:
        raise SelfCheckError(
            f"{with_pattern} of {layers} layers showed a pattern; the others do not run sinklens's "
            f"attention (attn_implementation is {tree.hf.config._attn_implementation!r})."
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


def _shape(tree: HookTree, name: str, tokens: int, seen: Seen) -> tuple[int, ...]:
    """The shape that the table of points gives for a point in the pass of the check."""
    cfg, kind = tree.cfg, name.rsplit(".", 1)[-1]
    d_head, kv_head, keys = cfg.d_head, cfg.n_key_value_heads, tokens
    if ".attn." in name and tree.architecture.encoder:  # layers differ, and a window hides keys
        layer = name.split(".attn.")[0]
        attn: Any = tree.get_submodule(f"{layer}.attn")
        kv_head, _, d_head = attn.W_K.shape
        keys = seen[f"{layer}.attn.hook_rot_k"][0].shape[1]
    sizes = {
        "batch": 1, "pos": tokens, "query": tokens, "key": keys, "head": cfg.n_heads, "d_head": d_head,
        "kv_head": kv_head, "d_model": cfg.d_model, "d_mlp": cfg.d_mlp, "query|1": 1, "1": 1,
        "expert": cfg.num_experts or 0, "k": cfg.experts_per_token or 0, "d_cond": cfg.d_cond or 0,
    }  # fmt: skip
    return tuple(sizes[axis] for axis in names.axes_of(kind))


def _check_patterns(tree: HookTree, seen: Seen, prefix: str, causal: bool, blocks: Blocks | None) -> None:
    """Check sums and direction of the patterns below `prefix`."""
    limit, sums_to_one = max(TOLERANCE.get(tree.cfg.dtype, 1e-3), 1e-3), normalizer_of(tree.hf) is softmax
    for number in range(tree.cfg.n_layers):
        pattern, layer = seen[f"{prefix}blocks.{number}.attn.hook_pattern"][0].float(), f"{prefix}layer {number}"
        off = (pattern.sum(-1) - 1).abs().max().item()
        if sums_to_one and not off <= limit:
            raise SelfCheckError(
                f"rows of the pattern of {layer} miss 1 by {off:.3g}; at most {limit:.3g} is allowed. The hook points "
                f"cannot be trusted."
            )
        _check_direction(pattern, layer, causal if blocks is None else blocks.length == 1, blocks)


def _check_direction(
    pattern: Float[Tensor, "batch head query key"], layer: str, causal: bool, blocks: Blocks | None
) -> None:
    later = pattern.triu(1 + pattern.shape[-1] - pattern.shape[-2]).sum().item()
    if blocks is not None:
        number = torch.arange(pattern.shape[-1], device=pattern.device) // blocks.length
        beyond = pattern.masked_fill(number[None, :] <= number[:, None], 0.0).sum().item()
        if beyond > 0:
            raise SelfCheckError(
                f"{layer} attends to later blocks of {blocks.length} positions (mass {beyond:.3g}), but its family "
                f"is block-causal."
            )
    if causal and later > 0:
        raise SelfCheckError(f"{layer} attends to later positions (mass {later:.3g}), but its family is causal.")
    if not causal and later == 0:
        raise SelfCheckError(
            f"{layer} never attends to later positions, but its family is bidirectional: the causal mask is still on."
        )


def _check_edits(tree: HookTree, seen: Seen, run: Run) -> None:
    """Check that an edit of each kind of point reaches the logits.

    Both passes run under the same hooks, so values that no edit reaches are bitwise equal. The attention keys have
    different values in both: if all values were equal, it would make no difference which keys attention selects.
    """
    places = _kinds(tree, seen)
    rows, editing = {name: row for row, kind in enumerate(places) for name in places[kind]}, False

    def edit(value: Tensor, hook: Any) -> Tensor:
        changed, row = value.clone(), rows[hook.name]
        if hook.name.endswith("attn.hook_v"):
            changed[:] = _other(value[:1], hook.name)
            changed[row] = value[row]
        if editing:
            changed[row] = _other(changed[row], hook.name)
        return changed

    before = run(len(places), [(name, edit) for name in rows])
    editing = True
    after = run(len(places), [(name, edit) for name in rows])
    silent = [kind for row, kind in enumerate(places) if _same(tree, before[row], after[row])]
    if silent:
        raise SelfCheckError(
            f"edits of {', '.join(silent)} do not change the logits. Either the model does not run sinklens's code "
            f"there, or this part of it adds nothing in any layer; sinklens.load(..., check=False) loads it anyway."
        )


def _kinds(tree: HookTree, seen: Seen) -> dict[str, Sequence[str]]:
    """The points that an edit can reach the logits from, by kind; ``*`` stands for the layers."""
    parts, layers, last = dict.fromkeys(tree.parts), range(tree.cfg.n_layers), tree.parts[-1]
    final = [spec.name for spec in names.FINAL_MODULATION if last.modulated]
    outside = [*final, *(f"ln_final.{spec.name}" for spec in names.norm_specs(last))]
    first = [*names.EMBED, *(names.TIME if tree.architecture.time else ())]
    first += [names.POSITIONS] if tree.architecture.positions else []
    outside += [spec.name for spec in first]
    if tree.architecture.encoder:
        outside += [f"{names.ENCODER}{names.EMBED[0].name}", "denoise.hook_self_conditioning"]
    found: dict[str, Sequence[str]] = {name: [name] for name in outside}
    below = dict.fromkeys(name for one in parts for name, _ in names.block_specs(one) if name not in READ_ONLY)
    if not any(seen[f"blocks.{layer}.{names.MLP_OUT.name}"][0].any() for layer in layers):
        below = {name: None for name in below if not name.startswith(("ln2.", "mlp."))}  # zeros hide these edits
    for prefix, read in (("", layers), (names.ENCODER, layers[:-1] if tree.architecture.encoder else layers[:0])):
        for name in below:
            found[f"{prefix}blocks.*.{name}"] = [f"{prefix}blocks.{layer}.{name}" for layer in read]
    found = {kind: [name for name in points if name in seen or kind in outside] for kind, points in found.items()}
    return {kind: points for kind, points in found.items() if points}


def _same(tree: HookTree, found: Tensor, before: Tensor) -> bool:
    """Whether no edit reached a row; with experts up to rounding, as other rows' tokens share their matrix products."""
    if not any(parts.experts for parts in tree.parts):
        return torch.equal(found, before)
    noise = 4 * torch.finfo(before.dtype).eps * before.abs().max()
    return bool((found - before).abs().max() <= noise)


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
