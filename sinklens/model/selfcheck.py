"""The self-check that every model must pass before `sinklens.load` returns it.

On a few tokens it verifies that every hook point fires exactly once per pass, with its documented shape; that watching
the points changes nothing; that softmax rows sum to 1; that attention is bidirectional (or causal, or block-causal) as
the family specifies; and that an edit of each kind of point reaches the logits. A model that fails is rejected, because
later measurements would not describe what it computes.

Three passes suffice for any number of points: one without hooks, one watched at every point, and one with edits. The
edits share a pass: at the entry of the last layer the single prompt is expanded to one row per kind of point, and each
row gets one edit. Only that layer and the head see more than one row, so on a large model the pass takes little longer
than any other. Kinds of points that the last layer does not have (a dense MLP before mixtures of experts) are edited in
all layers that have them, in two further passes.

A model with an encoder is checked in three passes over a short text and a short canvas, with one row per kind of point
throughout, and edits in all layers of the part that has the point. The last encoder layer's output reaches nothing.

Limitation: the check runs short passes in the model's dtype and cannot detect a fault that needs a long context. A
layer whose output is zero also hides its edits, so a kind of point whose edit in the last layer has no effect is edited
in all layers before the model is rejected. `sinklens.load(..., check=False)` skips the check.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
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
EMBED = names.EMBED[0].name
INDICES = "hook_expert_indices"


def kinds_of(parts: names.Parts) -> list[str]:
    """The editable points after the embedding, for a last layer with these parts; ``{}`` stands for the layer."""
    inside = [f"blocks.{{}}.{name}" for name, _ in names.block_specs(parts) if name not in READ_ONLY]
    final = [spec.name for spec in names.FINAL_MODULATION if parts.modulated]
    return [*inside, *(f"ln_final.{spec.name}" for spec in names.norm_specs(parts)), *final]


def check(tree: HookTree, causal: bool) -> None:
    """Run the self-check.

    Raises:
        SelfCheckError: a check failed; the message gives the measured value.
    """
    if tree.architecture.encoder:
        _check_with_encoder(tree)
        return
    with torch.no_grad():
        blocks = rule_of(tree.hf.config)
        tokens = TOKENS if blocks is None else max(TOKENS, blocks.length + 2)  # more than one block
        ids = (torch.arange(tokens) * 7 + 3).remainder(tree.cfg.d_vocab)[None].to(tree.cfg.device)
        plain = tree(ids, **_time(tree))
        _check_finite(plain)
        seen, hooked = _watched_pass(tree, ids)
        _check_change(tree, plain, hooked[:1])
        _check_points(tree, seen, tokens)
        _check_patterns(tree, seen, "", causal, blocks)
        outside = list(names.TIME) if tree.architecture.time else []
        if tree.architecture.positions:
            outside += [*names.EMBED, names.POSITIONS]  # their sum enters the first layer
        else:
            _check_embedding(tree, ids)
        if outside and (silent := _silent(tree, ids, {spec.name: [spec.name] for spec in outside})):
            _refuse_silent(silent)
        _check_edits(tree, ids, seen, hooked)


def _check_with_encoder(tree: HookTree) -> None:
    """`check` of a model whose encoder reads the text before a canvas."""
    parts = dict.fromkeys(tree.parts)
    kinds = {
        EMBED: [EMBED],
        f"{names.ENCODER}{EMBED}": [f"{names.ENCODER}{EMBED}"],
        "denoise.hook_self_conditioning": ["denoise.hook_self_conditioning"],
        **{f"ln_final.{spec.name}": [f"ln_final.{spec.name}"] for spec in names.NORM},
    }
    layers = range(tree.cfg.n_layers)
    for prefix, read in (("", layers), (names.ENCODER, layers[:-1])):
        for name in dict.fromkeys(name for one in parts for name, _ in names.block_specs(one) if name not in READ_ONLY):
            kinds[f"{prefix}blocks.*.{name}"] = [f"{prefix}blocks.{layer}.{name}" for layer in read]
    with torch.no_grad():
        plain = _canvas_logits(tree, 1, [])
        seen, keep = _keeping(tree)
        _check_finite(plain)
        _check_change(tree, plain, _canvas_logits(tree, 1, [keep]))
        _check_points(tree, seen, TOKENS)
        _check_patterns(tree, seen, names.ENCODER, causal=True, blocks=None)
        _check_patterns(tree, seen, "", causal=False, blocks=None)
        kinds = {kind: places for kind, places in kinds.items() if places}
        silent = _without_effect(tree, kinds, lambda hooks: _canvas_logits(tree, len(kinds), hooks))
    if silent:
        _refuse_silent(silent)


def _canvas_logits(tree: HookTree, rows: int, hooks: list[HookPair]) -> Float[Tensor, "row pos vocab"]:
    """Logits of a canvas of `TOKENS` tokens after as many others, the same in every row."""
    ids = (torch.arange(2 * TOKENS) * 7 + 3).remainder(tree.cfg.d_vocab).expand(rows, -1).to(tree.cfg.device)
    passes = tree.canvas_pass
    cache = DynamicCache(config=tree.hf.config)
    with tree.hooks(fwd_hooks=hooks):
        passes.encode(ids[:, :TOKENS], None, cache)
        return tree.head(passes.decode(ids[:, TOKENS:], None, cache))


def _check_finite(plain: Tensor) -> None:
    if not torch.isfinite(plain).all():
        raise SelfCheckError("the model's logits are not finite in a plain pass; its weights are broken.")


def _check_change(tree: HookTree, plain: Tensor, hooked: Tensor) -> None:
    """Check that watching changes nothing."""
    change = (hooked - plain).abs().max().item() / max(1.0, plain.abs().max().item())
    _require(change, TOLERANCE.get(tree.cfg.dtype, 1e-3), "watching every point changes the logits by")


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


def _keeping(tree: HookTree) -> tuple[dict[str, list[Tensor]], HookPair]:
    """The first row of each point's values, and the hook that fills it in."""
    seen: dict[str, list[Tensor]] = {name: [] for name in tree.point_names() if not name.startswith("denoise.")}
    return seen, (lambda name: name in seen, lambda value, hook: seen[hook.name].append(value[:1]))


def _watched_pass(tree: HookTree, ids: Int[Tensor, "1 pos"]) -> tuple[dict[str, list[Tensor]], Tensor]:
    """The first row of each point's value, and the logits with one row per kind of point in the last layer."""
    seen, keep = _keeping(tree)
    hooks: list[HookPair] = [
        keep,
        (_entry(tree), lambda value, hook: value.expand(len(kinds_of(tree.parts[-1])), -1, -1).clone()),
    ]
    return seen, _spreading(tree, ids, hooks)


def _spreading(tree: HookTree, ids: Int[Tensor, "1 pos"], hooks: list[HookPair]) -> Float[Tensor, "row pos vocab"]:
    """Logits of a pass that ends with more rows than it started with."""
    with tree.hooks(fwd_hooks=hooks):
        return tree.hf(input_ids=ids, use_cache=False, **_time(tree)).logits


def _time(tree: HookTree) -> dict[str, Any]:
    """A noise level for passes of a network that reads one."""
    return {"time": TIME} if tree.timed else {}


def _entry(tree: HookTree) -> str:
    """The point at the entry of the last layer."""
    return f"blocks.{tree.cfg.n_layers - 1}.{names.RESID_PRE.name}"


def _check_points(tree: HookTree, seen: dict[str, list[Tensor]], tokens: int) -> None:
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


def _check_embedding(tree: HookTree, ids: Int[Tensor, "1 pos"]) -> None:
    """Check that an edit of the embedding reaches the first layer, whose entry is a kind; the pass ends there."""
    put: list[Tensor] = []

    def edit(value: Tensor, hook: Any) -> Tensor:
        put.append(_other(value, hook.name))
        return put[0]

    def arrive(value: Tensor, hook: Any) -> None:
        raise _ArrivedError(torch.equal(value, put[0]))

    try:
        hooks = [(EMBED, edit), (f"blocks.0.{names.RESID_PRE.name}", arrive)]
        tree.run_with_hooks(ids, fwd_hooks=hooks, **_time(tree))
    except _ArrivedError as arrived:
        if not arrived.args[0]:
            _refuse_silent([EMBED])


class _ArrivedError(Exception):
    """Ends a pass; its argument is whether the edit arrived."""


def _check_edits(
    tree: HookTree, ids: Int[Tensor, "1 pos"], seen: dict[str, list[Tensor]], hooked: Float[Tensor, "row pos vocab"]
) -> None:
    """Check that an edit of each kind of point after the embedding reaches the logits.

    Args:
        seen, hooked: from the watched pass. The pass with edits enters its last layer with the same stream and watches
            the same points there, so values that no edit reaches are bitwise equal.
    """
    layers, entry, kinds = tree.cfg.n_layers, _entry(tree), kinds_of(tree.parts[-1])
    if len(hooked) != len(kinds):  # expanding the rows in the watched pass is an edit, too
        _refuse_silent([kinds[0].format("*")])
    rows = {kind.format(layers - 1): row for row, kind in enumerate(kinds)}

    def edit(value: Tensor, hook: Any) -> Tensor:
        changed = (seen[entry][0].expand(len(kinds), -1, -1) if hook.name == entry else value).clone()
        changed[rows[hook.name]] = _other(changed[rows[hook.name]], hook.name)
        return changed

    edited = _spreading(tree, ids, [(name, edit) for name in rows])
    silent = [kind for row, kind in enumerate(kinds) if _same(tree, edited[row], hooked[row])]
    silent += [kind for parts in dict.fromkeys(tree.parts) for kind in kinds_of(parts) if kind not in kinds]
    if not any(seen[f"blocks.{layer}.hook_mlp_out"][0].any() for layer in range(layers)):
        silent = [kind for kind in silent if ".ln2." not in kind and ".mlp." not in kind]  # zeros hide these edits
    if silent:
        places = {kind: [kind.format(layer) for layer in range(layers)] for kind in silent}
        silent = _silent(
            tree, ids, {kind: [name for name in all_of if name in seen] for kind, all_of in places.items()}
        )
    if silent:
        _refuse_silent([kind.format("*") for kind in silent])


def _refuse_silent(points: Sequence[str]) -> None:
    raise SelfCheckError(
        f"edits of {', '.join(points)} do not change the logits. Either the model does not run sinklens's code there, "
        f"or this part of it adds nothing in any layer; sinklens.load(..., check=False) loads it anyway."
    )


def _silent(tree: HookTree, ids: Int[Tensor, "1 pos"], places: dict[str, Sequence[str]]) -> list[str]:
    """The keys of `places` whose points can be edited without any effect on the logits of a pass over `ids`.

    In both passes all attention keys have different values: if all values were equal, it would make no difference which
    keys attention selects.
    """
    rows = {name: row for row, kind in enumerate(places) for name in places[kind]}

    def vary(value: Tensor, hook: Any) -> Tensor:
        varied = _other(value[:1], hook.name).expand_as(value).clone()
        if hook.name in rows:
            varied[rows[hook.name]] = value[rows[hook.name]]
        return varied

    values: list[HookPair] = [(f"blocks.{layer}.attn.hook_v", vary) for layer in range(tree.cfg.n_layers)]
    batch = ids.expand(len(places), -1)
    return _without_effect(
        tree, places, lambda hooks: tree.run_with_hooks(batch, fwd_hooks=[*values, *hooks], **_time(tree))
    )


def _without_effect(
    tree: HookTree, places: Mapping[str, Sequence[str]], run: Callable[[list[HookPair]], Float[Tensor, "row pos vocab"]]
) -> list[str]:
    """The keys of `places` whose points can be edited without any effect on the logits.

    Each key of `places` gets a separate row of the batch that `run` computes. The same pass runs with and without
    edits, under the same hooks, so values that no edit reaches are bitwise equal.
    """
    rows = {name: row for row, kind in enumerate(places) for name in places[kind]}
    editing = False

    def edit(value: Tensor, hook: Any) -> Tensor | None:
        if not editing:
            return None
        changed, row = value.clone(), rows[hook.name]
        changed[row] = _other(changed[row], hook.name)
        return changed

    hooks: list[HookPair] = [(name, edit) for name in rows]
    before = run(hooks)
    editing = True
    after = run(hooks)
    return [kind for row, kind in enumerate(places) if _same(tree, before[row], after[row])]


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
    if name.endswith(INDICES):
        return torch.where(value == 0, 1, 0)
    if name.endswith("hook_attn_mask"):
        hidden = torch.zeros_like(value)
        hidden[..., 0] = HIDDEN
        return hidden
    count = torch.arange(value.numel(), device=value.device, dtype=torch.float32)
    signs = 1 - 2 * (count % 2) if name.endswith("hook_scale") else 1
    return ((1 + count.cos() / 2) * signs).view(value.shape).to(value.dtype)


def _require(value: float, limit: float, what: str) -> None:
    if not value <= limit:
        raise SelfCheckError(f"{what} {value:.3g}; at most {limit:.3g} is allowed. The hook points cannot be trusted.")
