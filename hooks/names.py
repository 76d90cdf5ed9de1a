"""The names of the hook points, their shapes, and how a name is looked up.

Names and shapes are TransformerLens's wherever it has them. A point has three spellings: its canonical name
(``blocks.0.attn.hook_q``), TransformerLens 4's name of the same place (``blocks.0.attn.q.hook_out``), and either with a
negative layer (``blocks.-1.hook_resid_post``). A predicate is applied to the first two. An unknown name raises an error
that lists the nearest names.

A few points are off until a setter of the model turns them on (`SWITCHED`), as in TransformerLens: most copy the stream
once per head. Until then ``model.hook_names()`` omits them, and naming one raises an error that names the setter.

Some points exist only where a layer has the part that they show: a mixture of experts instead of a dense MLP, a norm of
queries and keys. `Parts` says which parts a layer has, and `table` lists the points of such layers.

Axes use the project's glossary: ``batch step layer head query key pos d_model d_head d_mlp vocab``. ``kv_head`` counts
key/value heads, of which there are fewer than ``head`` in grouped-query attention; ``expert`` counts the experts of a
layer, ``k`` those that a token is sent to.

Caveat: reading a value changes no bit of a run, except that ``hook_logits`` passes more rows through the head. Where a
hook changes a value, or gradients are recorded, the points of the norms, ``hook_result`` and ``hook_expert_out``
recompute the result of their module, and ``hook_attn_scores`` and ``hook_pattern`` use another attention kernel; these
round differently. An edit through ``.data`` or NumPy goes unseen there: PyTorch does not count it as a write.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

from sinklens.errors import HookNameError, SettingError, nearest, require

HookName = str | Callable[[str], bool]


class PointSpec(NamedTuple):
    """A hook point in the table of points: its name, axes and meaning.

    Attributes:
        name: the name within its part of the tree, without a layer prefix.
        axes: the axes of its value, in glossary names.
        meaning: one line for `sinklens hooks`.
    """

    name: str
    axes: str
    meaning: str


EMBED = (PointSpec("hook_embed", "batch pos d_model", "token embeddings"),)
NORM = (
    PointSpec("hook_scale", "batch pos 1", "root mean square each position is divided by"),
    PointSpec("hook_normalized", "batch pos d_model", "normalized stream, before the learned weight"),
)
ATTENTION = (
    PointSpec("hook_q", "batch pos head d_head", "queries, before the rotation"),
    PointSpec("hook_k", "batch pos kv_head d_head", "keys, before the rotation"),
    PointSpec("hook_v", "batch pos kv_head d_head", "values"),
    PointSpec("hook_fresh", "batch key", "True where this pass computes the key, False where it is cached; read-only"),
    PointSpec("hook_rot_q", "batch pos head d_head", "rotated queries"),
    PointSpec("hook_rot_k", "batch key kv_head d_head", "rotated keys, cached ones included"),
    PointSpec("hook_attn_mask", "batch head query|1 key", "added to the scores; zeros unless set; stays fused"),
    PointSpec("hook_attn_scores", "batch head query key", "scores after masking; watching makes the map explicit"),
    PointSpec(
        "hook_pattern",
        "batch head query key",
        "attention weights; rows of padding are 0; watching makes the map explicit",
    ),
    PointSpec("hook_sink_scores", "batch head key", "column sums of the pattern, mean 1; read-only"),
    PointSpec("hook_z", "batch pos head d_head", "head outputs before the output projection"),
    PointSpec("hook_result", "batch pos head d_model", "head outputs after it; their sum is hook_attn_out"),
)
READ_ONLY = ("hook_fresh", "hook_sink_scores")
"""Points of attention that report what was done; an edit of their value is an error."""
QK_NORM = {
    "hook_q": PointSpec("hook_q_normed", "batch pos head d_head", "normalized queries, before the rotation"),
    "hook_k": PointSpec("hook_k_normed", "batch pos kv_head d_head", "normalized keys, before the rotation"),
}
"""The points of models that normalize queries and keys, by the point whose value is normalized."""
MLP = (
    PointSpec("hook_pre", "batch pos d_mlp", "gate, before the activation function"),
    PointSpec("hook_pre_linear", "batch pos d_mlp", "the linear branch"),
    PointSpec("hook_post", "batch pos d_mlp", "activated gate times linear branch"),
)
EXPERTS = (
    PointSpec("hook_router_logits", "batch pos expert", "the router's logits; editing them reroutes tokens"),
    PointSpec(
        "hook_expert_indices", "batch pos k", "the chosen experts; those that an edit puts in get their own weights"
    ),
    PointSpec("hook_expert_weights", "batch pos k", "weights of the chosen experts; 0 ablates one"),
    PointSpec("hook_expert_out", "batch pos k d_model", "output of each chosen expert, before its weight"),
)
SHARED = PointSpec("hook_shared_out", "batch pos d_model", "output of the shared expert")
PER_HEAD = "copy of the stream that each head's {} read, before the norm"
SPLIT_INPUTS = tuple(
    PointSpec(f"hook_{letter}_input", f"batch pos {head} d_model", PER_HEAD.format(what))
    for letter, head, what in (("q", "head", "queries"), ("k", "kv_head", "keys"), ("v", "kv_head", "values"))
)
ATTN_IN = PointSpec("hook_attn_in", "batch pos head d_model", PER_HEAD.format("queries, keys and values"))
MLP_IN = PointSpec("hook_mlp_in", "batch pos d_model", "residual stream that the MLP reads, before the norm")
POSITIONS = PointSpec("hook_pos_embed", "batch pos d_model", "learned embeddings of the positions")
TIME = (
    PointSpec("hook_time", "batch", "noise level of each row, as the network reads it; 0 in an untimed network"),
    PointSpec("hook_cond", "batch d_cond", "vector that all modulations are made from"),
)
"""The points of a network that is conditioned on the noise level, before its blocks."""
MODULATION = tuple(
    PointSpec(f"hook_{part}_{what}", "batch d_model", f"{what} of what {of}; the same for all positions of a row")
    for part, name in (("attn", "attention"), ("mlp", "the MLP"))
    for what, of in (("shift", f"{name} reads"), ("scale", f"{name} reads"), ("gate", f"{name} writes"))
)
FINAL_MODULATION = tuple(
    PointSpec(f"hook_final_{what}", "batch d_model", f"{what} of what the language-model head reads")
    for what in ("shift", "scale")
)
MODULATED = PointSpec("hook_modulated", "batch pos d_model", "the norm's output times 1 + scale, plus shift")
CANVAS = PointSpec("hook_canvas", "batch pos", "token ids entering the step; editing remasks or forces tokens")
DENOISE = (
    CANVAS,
    PointSpec("hook_logits", "batch pos vocab", "logits of the token at each position; watching computes all of them"),
    PointSpec("hook_candidates", "batch pos", "proposed token ids"),
    PointSpec("hook_confidence", "batch pos", "confidence of each candidate; -inf where nothing is proposed"),
    PointSpec("hook_commit", "batch pos", "True where the proposal is committed in this step"),
)
EDIT = PointSpec("hook_edit", "batch pos", "True where a decided token is replaced by the proposal in this step")
"""A point of samplers that replace decided tokens; block-causal models have it."""
VERIFY = (
    PointSpec("hook_verify", "batch pos", "most likely token after each position of a draft, read from left to right"),
    PointSpec("hook_accepted_length", "batch", "how many of these tokens are taken: the agreed ones and one more"),
)
DRAFT = PointSpec("hook_draft", "batch pos", "token ids of the drafted block after this step, its first token included")
SWITCHING = (*DENOISE[:-1], *VERIFY, DENOISE[-1], DRAFT)
"""The sampler's points of a model that changes its attention, and so can draft a block and verify it."""
NOISE = (
    CANVAS,
    PointSpec("hook_self_conditioning", "batch pos d_model", "embedding of the last step's prediction; zeros at first"),
    PointSpec("hook_logits", "batch pos vocab", "logits of the token at each position of the canvas"),
    PointSpec("hook_candidates", "batch pos", "drawn token ids"),
    PointSpec("hook_entropy", "batch pos", "entropy of each position's distribution, in nats; the lowest are accepted"),
    PointSpec("hook_accepted", "batch pos", "True where the drawn token is accepted"),
    PointSpec("hook_renoise", "batch pos", "random token ids, which replace the tokens that are not accepted"),
)
"""The sampler's points of a model whose canvas is random tokens; all but the first have the canvas's positions."""
UNIFORM = PointSpec("hook_uniform", "batch pos vocab|1", "uniform random numbers, which the tokens are drawn with")
"""The sampler's point of families whose samplers always draw (`Family.drawn`): its numbers repeat a run."""
ENCODER = "encoder."
"""Prefix of the points of an encoder, which has the points of the blocks for the text before the canvas."""

# Points that are off until model.set_<switch>(True), by their name below a block.
SWITCHED: dict[str, tuple[str, PointSpec]] = {
    **{f"attn.{spec.name}": ("use_split_qkv_input", spec) for spec in SPLIT_INPUTS},
    f"attn.{ATTN_IN.name}": ("use_attn_in", ATTN_IN),
    MLP_IN.name: ("use_hook_mlp_in", MLP_IN),
}

# TransformerLens 4's spelling -> canonical name, below a block.
_BLOCK_ALIASES = {
    "hook_in": "hook_resid_pre",
    "hook_out": "hook_resid_post",
    "ln1.hook_in": "hook_resid_pre",
    "ln2.hook_in": "hook_resid_mid",
    "attn.q.hook_out": "attn.hook_q",
    "attn.k.hook_out": "attn.hook_k",
    "attn.v.hook_out": "attn.hook_v",
    "attn.o.hook_in": "attn.hook_z",
    "attn.o.hook_out": "hook_attn_out",
    "attn.hook_out": "hook_attn_out",
    "mlp.gate.hook_out": "mlp.hook_pre",
    "mlp.in.hook_out": "mlp.hook_pre_linear",
    "mlp.out.hook_in": "mlp.hook_post",
    "mlp.out.hook_out": "hook_mlp_out",
    "mlp.hook_out": "hook_mlp_out",
}
# The same for points that only some layers have.
_OPTIONAL_ALIASES = {
    "attn.q_norm.hook_out": "attn.hook_q_normed",
    "attn.k_norm.hook_out": "attn.hook_k_normed",
    "mlp.gate.hook_out": "mlp.hook_router_logits",
    "mlp.shared_experts.hook_out": "mlp.hook_shared_out",
    "ln1_post.hook_out": "hook_attn_out",
    "ln2_post.hook_out": "hook_mlp_out",
}
_SWITCHED_ALIASES = {name.removeprefix("attn."): name for name in SWITCHED if name.startswith("attn.")}
# TransformerLens 4's points outside the blocks that have no point here, and what shows the same value.
_ELSEWHERE = {
    "embed.hook_in": "the token ids of the pass, whose embeddings are at hook_embed; those of a step of a run are at "
    "denoise.hook_canvas",
    "ln_final.hook_out": "ln_final.hook_normalized times model.ln_final.w, or model.lm_head.input in a trace block",
    "unembed.hook_in": "ln_final.hook_normalized times model.ln_final.w, or model.lm_head.input in a trace block",
    "unembed.hook_out": "the logits that the pass returns; those of a step of a run are at denoise.hook_logits",
}


class Parts(NamedTuple):
    """The parts of a layer, or of several layers, that decide which points it has.

    Attributes:
        qk_norm: queries and keys are normalized before the rotation.
        qk_norm_last: they are normalized after all projections, not each right after its own.
        dense: the MLP is dense.
        experts: the MLP is a mixture of experts.
        shared: the output of a shared expert, or of a dense MLP beside the experts, is added to the mixture.
        post_norms: what attention and the MLP add to the stream is normalized.
        gated: a dense MLP multiplies its activations by a second branch.
        modulated: shifts, scales and gates made from the noise level act on attention and the MLP.
        positions: the embeddings of positions are learned and added to those of the tokens.
    """

    qk_norm: bool = False
    qk_norm_last: bool = False
    dense: bool = True
    experts: bool = False
    shared: bool = False
    post_norms: bool = False
    gated: bool = True
    modulated: bool = False
    positions: bool = False


PLAIN = Parts()
EVERY = Parts(qk_norm=True, dense=True, experts=True, shared=True, post_norms=True, modulated=True, positions=True)


def merged(layers: Sequence[Parts]) -> Parts:
    """The parts that at least one of the layers has."""
    return Parts(*(any(having) for having in zip(*layers, strict=True)))


def aliases(n_layers: int) -> dict[str, str]:
    """Every accepted TransformerLens 4 spelling of the points of `table`, mapped to the name of its point."""
    last = f"blocks.{n_layers - 1}.hook_resid_post"
    return {"embed.hook_out": "hook_embed", "ln_final.hook_in": last} | _in_blocks(_BLOCK_ALIASES, n_layers)


def _in_blocks(below: dict[str, str], n_layers: int) -> dict[str, str]:
    return {f"blocks.{layer}.{old}": f"blocks.{layer}.{new}" for layer in range(n_layers) for old, new in below.items()}


@cache
def _spellings(n_layers: int, encoder: bool) -> dict[str, list[str]]:
    """Spelling -> points: of `aliases`, of points that are off, of some layers, and of an encoder."""
    found = [
        ("pos_embed.hook_out", POSITIONS.name),
        *aliases(n_layers).items(),
        *_in_blocks(_SWITCHED_ALIASES, n_layers).items(),
        *_in_blocks(_OPTIONAL_ALIASES, n_layers).items(),
    ]
    if encoder:
        found += [(f"{ENCODER}{spelling}", f"{ENCODER}{point}") for spelling, point in found]
    points: dict[str, list[str]] = {}
    for spelling, point in found:
        points.setdefault(spelling, []).append(point)
    return points


def _spellings_of(known: Sequence[str], n_layers: int) -> dict[str, list[str]]:
    return _spellings(n_layers, any(name.startswith(ENCODER) for name in known))


def resolve(name: str, known: Sequence[str], n_layers: int) -> str:
    """The point that `name` means.

    Args:
        name: a point's name, a TransformerLens 4 spelling of it, or either with a negative layer.
        known: all names of the tree.
        n_layers: layers of the model.

    Raises:
        HookNameError: no such point; the message names the existing layers, or the nearest names.
        SettingError: the point is off; the message names the setter.
    """
    require(
        isinstance(name, str),
        f"a hook point is named by a text, such as 'blocks.0.hook_resid_pre'; got {name!r}.",
        HookNameError,
    )
    if match := re.match(rf"((?:{re.escape(ENCODER)})?)blocks\.(-?\d+)\.(.+)$", name):
        layer, rest = int(match.group(2)), match.group(3)
        require(
            -n_layers <= layer < n_layers,
            f"{name!r}: layer {layer} does not exist; this model has {n_layers} layers, "
            f"0 to {n_layers - 1} (or -{n_layers} to -1 from the end).",
            HookNameError,
        )
        name = f"{match.group(1)}blocks.{layer % n_layers}.{rest}"
    if name in known:
        return name
    spelled = _spellings_of(known, n_layers)
    meant = [name, *spelled.get(name, ())]
    for canonical in meant:
        if canonical in known:
            return canonical
    for canonical in meant:
        if switch := switch_of(canonical):
            raise SettingError(f"{name!r} is off because {switch} is False; call model.set_{switch}(True) first.")
        group, _, point = canonical.rpartition(".")
        there = [other.removeprefix(f"{group}.") for other in known if other.rpartition(".")[0] == group]
        require(
            not there
            or not any(canonical.endswith(f".{row}") for row, _ in block_specs(EVERY)),  # other layers have it
            f"{name!r}: {group} has no {point} in this model; its points are {', '.join(there)}.",
            HookNameError,
        )
    if name in _ELSEWHERE:
        raise HookNameError(f"there is no point {name!r} here; the same value is {_ELSEWHERE[name]}.")
    raise HookNameError(
        f"no hook point is called {name!r}.{nearest(name, [*known, *spelled])} "
        f"`model.hook_names()` or `sinklens hooks MODEL` lists them all."
    )


@cache
def switch_of(name: str) -> str | None:
    """The flag of ``model.cfg`` that turns on the point called `name`; None if it is always on."""
    below = re.sub(rf"^(?:{re.escape(ENCODER)})?blocks\.\d+\.", "", name)
    return SWITCHED[below][0] if below in SWITCHED and below != name else None


def select(name: HookName, known: Sequence[str], n_layers: int) -> list[str]:
    """The points that a name or a predicate on names selects, in forward order.

    A predicate selects every point whose name, or a TransformerLens 4 spelling of it, satisfies the predicate.

    Raises:
        HookNameError: an unknown name, or a predicate that no name satisfies.
    """
    if not callable(name):
        return [resolve(name, known, n_layers)]
    spellings: dict[str, list[str]] = {point: [point] for point in known}
    for spelling, points in _spellings_of(known, n_layers).items():
        for point in points:
            spellings.get(point, []).append(spelling)
    chosen = [point for point in known if any(name(spelling) for spelling in spellings[point])]
    require(
        chosen,
        f"the predicate {name!r} matches none of the {len(known)} hook points; "
        f"their names look like {known[1]!r}. `model.hook_names()` lists them.",
        HookNameError,
    )
    return chosen


def axes_of(name: str) -> list[str]:
    """The axes of a point's value, in glossary names.

    >>> axes_of("blocks.0.attn.hook_pattern")
    ['batch', 'head', 'query', 'key']
    """
    return _axes()[name.rsplit(".", 1)[-1]].split()


@cache
def _axes() -> dict[str, str]:
    """The axes of every point, by the last part of its name."""
    off = [spec for _, spec in SWITCHED.values()]
    specs = [UNIFORM, *NOISE, DRAFT, *VERIFY, EDIT, *off, *(spec for _, spec in table(EVERY))]  # the last one counts
    return {spec.name: spec.axes for spec in specs}


def has_positions(name: str) -> bool:
    """Whether a point's value has a position axis; a value of a complete row, such as its noise level, has none."""
    return not {"pos", "query", "key"}.isdisjoint(axes_of(name.removesuffix("_grad")))


def position_axis(name: str) -> int:
    """The position axis of a point's value, counted from the end; with queries and keys, the query axis.

    >>> position_axis("blocks.0.attn.hook_pattern"), position_axis("blocks.0.attn.hook_sink_scores")
    (-2, -1)
    """
    axes = axes_of(name.removesuffix("_grad"))
    require(has_positions(name), f"{name} has one value for each row, so it has no positions; leave positions out.")
    return next(axes.index(axis) for axis in ("pos", "query", "key") if axis in axes) - len(axes)


def covers_all_columns(name: str) -> bool:
    """Whether the value of a point has all columns where a pass computes a window: stale keys and values, and scores.

    >>> covers_all_columns("blocks.0.attn.hook_k"), covers_all_columns("blocks.0.hook_resid_pre")
    (True, False)
    """
    axes = axes_of(name)
    return name.endswith((".hook_k", ".hook_v")) or ("key" in axes and "query" not in axes)


def attention_specs(parts: Parts = PLAIN) -> list[PointSpec]:
    """The rows of an attention layer, in the order the forward pass reaches them."""
    if not parts.qk_norm:
        return list(ATTENTION)
    if parts.qk_norm_last:
        return [*ATTENTION[:3], *QK_NORM.values(), *ATTENTION[3:]]
    rows = [(spec, QK_NORM.get(spec.name)) for spec in ATTENTION]
    return [row for pair in rows for row in pair if row is not None]


def mlp_specs(parts: Parts = PLAIN) -> list[PointSpec]:
    """The rows of an MLP, in the order the forward pass reaches them."""
    experts = [*EXPERTS, SHARED] if parts.shared else list(EXPERTS)
    dense = MLP if parts.gated else tuple(spec for spec in MLP if spec.name != "hook_pre_linear")
    return [*(dense if parts.dense else ()), *(experts if parts.experts else ())]


def norm_specs(parts: Parts = PLAIN) -> tuple[PointSpec, ...]:
    """The rows of a norm that a sublayer or the head reads."""
    return (*NORM, MODULATED) if parts.modulated else NORM


def block_specs(parts: Parts = PLAIN) -> list[tuple[str, PointSpec]]:
    """Each dotted name below a block with its row, in the order the forward pass reaches them."""
    stream = "batch pos d_model"
    return _named([
        ("", [PointSpec("hook_resid_pre", stream, "residual stream entering the block")], True),
        ("adaln.", MODULATION, parts.modulated),
        ("ln1.", norm_specs(parts), True),
        ("attn.", attention_specs(parts), True),
        ("ln1_post.", NORM, parts.post_norms),
        ("", [PointSpec("hook_attn_ungated", stream, "attention output, before its gate")], parts.modulated),
        ("", [PointSpec("hook_attn_out", stream, "what attention adds to the stream")], True),
        ("", [PointSpec("hook_resid_mid", stream, "residual stream between attention and MLP")], True),
        ("ln2.", norm_specs(parts), True),
        ("mlp.", mlp_specs(parts), True),
        ("ln2_post.", NORM, parts.post_norms),
        ("", [PointSpec("hook_mlp_ungated", stream, "MLP output, before its gate")], parts.modulated),
        ("", [PointSpec("hook_mlp_out", stream, "what the MLP adds to the stream")], True),
        ("", [PointSpec("hook_resid_post", stream, "residual stream leaving the block")], True),
    ])  # fmt: skip


def _named(groups: Sequence[tuple[str, Iterable[PointSpec], bool]]) -> list[tuple[str, PointSpec]]:
    """The rows of the groups that are there, each by the group's prefix and its own name."""
    return [(f"{prefix}{spec.name}", spec) for prefix, specs, there in groups if there for spec in specs]


def table(parts: Parts = PLAIN) -> list[tuple[str, PointSpec]]:
    """The table with ``{l}`` for the layer, in forward order, without points that are off; for `sinklens hooks`.

    Args:
        parts: what the layers have; with both `dense` and `experts`, each layer has the points of one of them.
    """
    return [
        *_named([
            ("denoise.", DENOISE[:1], True),
            ("", EMBED, True),
            ("", [POSITIONS], parts.positions),
            ("", TIME, parts.modulated),
        ]),
        *((f"blocks.{{l}}.{name}", spec) for name, spec in block_specs(parts)),
        *_named([
            ("ln_final.", NORM, True),
            ("", FINAL_MODULATION, parts.modulated),
            ("ln_final.", [MODULATED], parts.modulated),
            ("denoise.", DENOISE[1:], True),
        ]),
    ]  # fmt: skip
