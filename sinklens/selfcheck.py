"""What every loaded model has to show before sinklens hands it out.

On a few tokens: every hook point of a pass fires exactly once, with the shape that its name stands for; watching them
changes nothing; rows of a softmax sum to 1; attention is bidirectional (or causal) as the family says; and an edit of
each kind of point reaches the logits. A model that fails is refused, because every later measurement would be of
something other than the model.

Three passes do it, however many points there are: one that nobody watches, one that is watched at every point, and one
with edits. The edits share a pass: at the entry of the last layer the one prompt spreads to a row for each kind of
point, and each row gets one edit. Only that layer and the head see more than one row, so the pass takes little longer
than any other where the model is large.

One way this fails: the check runs short passes in the model's own type; it cannot see a fault that needs a long
context. And a layer whose output is zero hides its edits, so a kind that the last layer does not answer is edited in
all layers before the model is refused. `sinklens.load(..., check=False)` skips the check.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinklens.errors import SelfCheckError
from sinklens.hooks import names
from sinklens.hooks.normalizers import normalizer_of, softmax
from sinklens.hooks.tree import HookTree

TOKENS = 6
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
HIDDEN = -1e4  # added to the scores of a key: no attention, in every type
READ_ONLY = "attn.hook_sink_scores"
EMBED = names.EMBED[0].name
KINDS = [f"blocks.{{}}.{name}" for name, _ in names.block_specs() if name != READ_ONLY]
KINDS += [f"ln_final.{spec.name}" for spec in names.NORM]
"""The points behind the embedding that can be edited; ``{}`` stands for the layer."""


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
        seen, hooked = _watched_pass(tree, ids)
        scale = max(1.0, plain.abs().max().item())
        tolerance = TOLERANCE.get(tree.cfg.dtype, 1e-3)
        change = (hooked[:1] - plain).abs().max().item() / scale
        _require(change, tolerance, "watching every point changes the logits by")
        _check_points(tree, seen)
        for layer in range(tree.cfg.n_layers):
            pattern = seen[f"blocks.{layer}.attn.hook_pattern"][0]
            if normalizer_of(tree.hf) is softmax:
                off = (pattern.float().sum(-1) - 1).abs().max().item()
                _require(off, max(tolerance, 1e-3), f"rows of the pattern of layer {layer} miss 1 by")
            _check_direction(pattern, layer, causal)
        _check_embedding(tree, ids)
        _check_edits(tree, ids, seen, hooked)


def _watched_pass(tree: HookTree, ids: Int[Tensor, "1 pos"]) -> tuple[dict[str, list[Tensor]], Tensor]:
    """What passes each point, its first row; and the logits, of a row for each of `KINDS`."""
    seen: dict[str, list[Tensor]] = {name: [] for name in tree.point_names() if not name.startswith("denoise.")}
    hooks: list[Any] = [
        (lambda name: name in seen, lambda value, hook: seen[hook.name].append(value[:1])),
        (_entry(tree), lambda value, hook: value.expand(len(KINDS), -1, -1).clone()),
    ]
    return seen, _spreading(tree, ids, hooks)


def _spreading(tree: HookTree, ids: Int[Tensor, "1 pos"], hooks: list[Any]) -> Float[Tensor, "row pos vocab"]:
    """Logits of a pass that has more rows at its end than at its start."""
    with tree.hooks(fwd_hooks=hooks):
        return tree.hf(input_ids=ids, use_cache=False).logits


def _entry(tree: HookTree) -> str:
    """Where the last layer begins."""
    return f"blocks.{tree.cfg.n_layers - 1}.{names.RESID_PRE.name}"


def _check_points(tree: HookTree, seen: dict[str, list[Tensor]]) -> None:
    """Every point fired once, with its shape."""
    layers = tree.cfg.n_layers
    shown = sum(len(seen[f"blocks.{layer}.attn.hook_pattern"]) == 1 for layer in range(layers))
    if shown != layers:
        raise SelfCheckError(
            f"{shown} of {layers} layers showed a pattern; the others do not run sinklens's "
            f"attention (attn_implementation is {tree.hf.config._attn_implementation!r})."
        )
    for name, values in seen.items():
        if len(values) != 1:
            others = sum(len(values) != 1 for values in seen.values()) - 1
            raise SelfCheckError(
                f"{name} was reached {len(values)} times in one pass, and {others} other points not once either; every "
                f"point is reached exactly once. A module of this model does not run the forward that its class has: "
                f"give sinklens.load the model before other libraries change its modules."
            )
        if values[0].shape != (expected := _shape(tree, name)):
            raise SelfCheckError(
                f"{name} showed a value of shape {list(values[0].shape)} where {list(expected)} was expected; "
                f"the module at this point computes something else than sinklens takes it for."
            )


def _shape(tree: HookTree, name: str) -> tuple[int, ...]:
    """The shape of the value at a point in the pass of the check, by the table of points."""
    cfg, kind = tree.cfg, name.rsplit(".", 1)[-1]
    sizes = {
        "batch": 1, "pos": TOKENS, "query": TOKENS, "key": TOKENS, "head": cfg.n_heads, "d_head": cfg.d_head,
        "kv_head": cfg.n_key_value_heads, "d_model": cfg.d_model, "d_mlp": cfg.d_mlp, "query|1": 1, "1": 1,
    }  # fmt: skip
    axes = next(spec.axes for _, spec in names.table() if spec.name == kind)
    return tuple(sizes[axis] for axis in axes.split())


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


def _check_embedding(tree: HookTree, ids: Int[Tensor, "1 pos"]) -> None:
    """An edit of the embedding reaches the first layer, whose entry is among `KINDS`; the pass ends there."""
    put: list[Tensor] = []

    def edit(value: Tensor, hook: Any) -> Tensor:
        put.append(_other(value, hook.name))
        return put[0]

    def arrive(value: Tensor, hook: Any) -> None:
        raise _ArrivedError(torch.equal(value, put[0]))

    try:
        tree.run_with_hooks(ids, fwd_hooks=[(EMBED, edit), (f"blocks.0.{names.RESID_PRE.name}", arrive)])
    except _ArrivedError as arrived:
        if not arrived.args[0]:
            _refuse_silent([EMBED])


class _ArrivedError(Exception):
    """Ends a pass; says whether the edit was there."""


def _check_edits(
    tree: HookTree, ids: Int[Tensor, "1 pos"], seen: dict[str, list[Tensor]], hooked: Float[Tensor, "row pos vocab"]
) -> None:
    """An edit of each kind of point behind the embedding reaches the logits.

    Args:
        seen, hooked: of the watched pass. The pass with edits begins its last layer with the same stream and watches
            the same points in it, so what no edit reaches is the same bit for bit.
    """
    layers, entry = tree.cfg.n_layers, _entry(tree)
    if len(hooked) != len(KINDS):  # the rows of the watched pass are an edit, too
        _refuse_silent([KINDS[0].format("*")])
    rows = {kind.format(layers - 1): row for row, kind in enumerate(KINDS)}

    def edit(value: Tensor, hook: Any) -> Tensor:
        changed = (seen[entry][0].expand(len(KINDS), -1, -1) if hook.name == entry else value).clone()
        changed[rows[hook.name]] = _other(changed[rows[hook.name]], hook.name)
        return changed

    edited = _spreading(tree, ids, [(name, edit) for name in rows])
    silent = [kind for row, kind in enumerate(KINDS) if torch.equal(edited[row], hooked[row])]
    if not any(seen[f"blocks.{layer}.hook_mlp_out"][0].any() for layer in range(layers)):
        silent = [kind for kind in silent if ".ln2." not in kind and ".mlp." not in kind]  # zeros hide what is edited
    if silent:
        silent = _silent(tree, ids, {kind: [kind.format(layer) for layer in range(layers)] for kind in silent})
    if silent:
        _refuse_silent([kind.format("*") for kind in silent])


def _refuse_silent(points: Sequence[str]) -> None:
    raise SelfCheckError(
        f"edits of {', '.join(points)} leave the logits as they were: they do not reach them. Either the model runs "
        f"other code there than sinklens's, or this part of it adds nothing in any layer; "
        f"sinklens.load(..., check=False) loads it all the same."
    )


def _silent(tree: HookTree, ids: Int[Tensor, "1 pos"], places: dict[str, Sequence[str]]) -> list[str]:
    """Those of the keys of `places` whose points can be edited without any effect on the logits.

    Each key has a row of a batch of its own. The same pass is made with edits and without, under the same hooks, so
    that what no edit reaches is the same bit for bit. In both, every key has another value: where all values are the
    same, it makes no difference which of them attention takes.
    """
    rows = {name: row for row, kind in enumerate(places) for name in places[kind]}
    editing = False

    def edit(value: Tensor, hook: Any) -> Tensor | None:
        if not editing:
            return None
        changed, row = value.clone(), rows[hook.name]
        changed[row] = _other(changed[row], hook.name)
        return changed

    def stir(value: Tensor, hook: Any) -> Tensor:
        stirred = _other(value[:1], hook.name).expand_as(value).clone()
        if hook.name in rows:
            stirred[rows[hook.name]] = value[rows[hook.name]]
        return stirred

    values = [f"blocks.{layer}.attn.hook_v" for layer in range(tree.cfg.n_layers)]
    hooks: list[Any] = [*((name, stir) for name in values), *((name, edit) for name in rows)]
    batch = ids.expand(len(places), -1)
    before = tree.run_with_hooks(batch, fwd_hooks=hooks)
    editing = True
    after = tree.run_with_hooks(batch, fwd_hooks=hooks)
    return [kind for row, kind in enumerate(places) if torch.equal(before[row], after[row])]


def _other(value: Tensor, name: str) -> Tensor:
    """Something else in the place of `value`: the first key hidden, or numbers between 1/2 and 3/2."""
    if name.endswith("hook_attn_mask"):
        hidden = torch.zeros_like(value)
        hidden[..., 0] = HIDDEN
        return hidden
    count = torch.arange(value.numel(), device=value.device, dtype=torch.float32)
    return (1 + count.cos() / 2).view(value.shape).to(value.dtype)


def _require(value: float, limit: float, what: str) -> None:
    if not value <= limit:
        raise SelfCheckError(f"{what} {value:.3g}; at most {limit:.3g} is allowed. The hook points cannot be trusted.")
