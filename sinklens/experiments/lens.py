"""The logit lens and the tuned lens: the tokens each layer predicts at each position and step, masked ones included.

The residual stream that leaves a layer is read as if it were the last one: final norm, unembedding, softmax
(nostalgebraist, "interpreting GPT: the logit lens", 2020). The last layer's reading is the model's own prediction.
Where the noise level shifts and scales what the head reads, so does the lens: with the step's noise level, at every
layer.

Everything at position i is about the token *at* i, as at ``denoise.hook_logits``. LLaDA's stream at i predicts it; a
model whose stream at i predicts the token at i + 1 (Dream, autoregressive ones) is read at i − 1. The first token of a
row has no stream before it: for Dream its own stream is read, as Dream's sampler does; for an autoregressive model
nothing is read.

`logit_lens` reads a run afterwards, with a pass of the unchanged model over each step's canvas; `LogitLens` collects
streams during a run and so sees the edits of its hooks. Under guidance both read the conditional rows.

The final norm and unembedding were trained on the last layer only, and early layers may represent tokens in other
directions. A *tuned lens* (Belrose et al., 2303.08112), passed as ``lens=``, first moves a stream to where the last
layer would be,

    h ↦ h + h A + b,

with A and b per layer (lens_fits.py). A diffusion model predicts under very different amounts of text, so there is one
pair (A, b) for each *bucket* of the masked share, the share of the answer's positions that are undecided at the step.
An autoregressive model has no such share, and one bucket. The last layer's map is the identity.

Limitation: if a reading does not name a token, the stream may still encode it. A tuned lens may compute what the model
computes only later. It says what a stream lets one predict, not what the model has concluded there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sinklens.errors import CheckpointError, SettingError, require
from sinklens.experiments.step_ids import exact_step
from sinklens.hooks.modulation import final_modulation
from sinklens.hooks.points import Point
from sinklens.runs.intervention import Pairs, Reader, RunContext, layer_of, place_mask, within
from sinklens.utils.arguments import checked
from sinklens.utils.atomic import atomic_write

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation

CONDITION = "hook_cond"
CHUNK = 2**25  # logits held at once: 128 MB


@dataclass(frozen=True, eq=False)
class TunedLens:
    """Affine maps of the streams that leave the layers, as `train_tuned_lens` makes them.

    Attributes:
        model: name of the model.
        maps: A.
        offsets: b.
    """

    model: str
    maps: Float[Tensor, "bucket layer d_model d_model"]
    offsets: Float[Tensor, "bucket layer d_model"]

    @property
    def buckets(self) -> int:
        """Number of buckets; bucket i holds masked shares above i / buckets, up to (i + 1) / buckets."""
        return self.maps.shape[0]

    def translate(
        self, stream: Float[Tensor, "*place d_model"], layer: int, share: float
    ) -> Float[Tensor, "*place d_model"]:
        """The streams that leave `layer` at steps with masked share `share`, moved to the last layer's."""
        at = int(bucket_of(share, self.buckets))
        moved = stream.float() @ self.maps[at, layer].to(stream.device) + self.offsets[at, layer].to(stream.device)
        return (stream + moved).to(stream.dtype)

    def check(self, model: "Model") -> None:
        """Check that this lens fits `model`.

        Raises:
            SettingError: it has other layers or another stream.
        """
        sizes = [model.cfg.n_layers, model.cfg.d_model]
        require(
            list(self.maps.shape[1:3]) == sizes,
            f"the lens is of {self.model} with [layers, d_model] {list(self.maps.shape[1:3])}, and {model.name} "
            f"has {sizes}; train one with train_tuned_lens(model, prompts).",
        )

    def save(self, path: str | Path) -> None:
        """Write the lens as safetensors."""
        tensors = {"maps": self.maps.contiguous(), "offsets": self.offsets.contiguous()}
        with atomic_write(path) as part:
            save_file(tensors, part, {"model": self.model})

    @classmethod
    def load(cls, path: str | Path) -> "TunedLens":
        """Read what `save` wrote.

        Raises:
            CheckpointError: there is no such file, or it holds something else.
        """
        try:
            with safe_open(path, framework="pt") as opened:
                return cls((opened.metadata() or {})["model"], opened.get_tensor("maps"), opened.get_tensor("offsets"))
        except (OSError, KeyError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} holds no tuned lens: {error}. Pass a file that TunedLens.save wrote."
            ) from error


def bucket_of(share: float | np.ndarray, buckets: int) -> Int[np.ndarray, "*shape"]:
    """The bucket of each masked share."""
    return np.asarray(np.clip(np.ceil(np.asarray(share) * buckets - 1e-9).astype(int) - 1, 0, buckets - 1))


def masked_share(run: "Generation") -> Float[np.ndarray, "batch step"]:
    """Share of the answer's positions that are undecided at each step; those undecided at step 0 are the answer."""
    undecided = (run.undecided & run.real[:, None]).sum(dim=2).double().numpy()
    return undecided[:, :-1] / np.maximum(undecided[:, :1], 1)


@checked
def logit_lens(
    model: "Model",
    run: "Generation",
    *,
    steps: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    row: int = 0,
    top_k: int = 5,
    lens: TunedLens | None = None,
) -> xr.Dataset:
    """Read every step of a run through the logit lens, p = softmax(W_U · norm(resid_post)), one pass per step.

    The passes use `model` without the hooks of the run; to include them, list a `LogitLens` in ``hooks=``.

    Args:
        model: the model that ran, or another of the same kind and vocabulary.
        run: a `Generation`, or a trace after its block.
        steps: steps of the run; negative values count from the end. None means all, here and below.
        layers: layers whose outgoing streams are read.
        positions: positions to read, not counting padding; negative values count from the end. The unembedding is
            applied only there.
        row: row of the batch.
        top_k: number of tokens kept, most probable first.
        lens: a tuned lens, whose maps are applied to the streams first.

    Returns:
        A Dataset over ``step``, ``layer``, ``pos`` and ``rank``, with ``token`` [step, layer, pos, rank], its
        ``probability``, and its ``text`` where the model has a tokenizer; ``entropy`` [step, layer, pos] in nats;
        ``final_probability`` and ``final_rank`` [step, layer, pos] of the token at the position after the run (rank 0
        is the most probable), ``final_token`` [pos]; and ``token_id`` and ``masked`` [step, pos] of the step's canvas.
        Where nothing can be read (the first token of an autoregressive run, and positions that it has not reached)
        ids and ranks are -1 and the rest NaN. The coordinate ``column`` is the canvas position.

    Raises:
        SettingError: a step, layer, position or row that does not exist, `top_k` below 1 or above the vocabulary size,
            or a run of another kind of model.
    """
    _check_top_k(model, top_k)
    require(
        (model.cfg.d_vocab, model.family_record) == (run.model.cfg.d_vocab, run.model.family_record),
        f"the run is of {run.model.name}, and {model.name} has another family or vocabulary; pass the model that "
        f"made the run.",
    )
    row = within("row", [row], len(run.canvas))[0]
    chosen = within("layer", layers, model.cfg.n_layers)
    points = [f"blocks.{layer}.hook_resid_post" for layer in chosen]

    def streams(step: int, sources: Tensor) -> _Streams:
        ids, real, time = exact_step(run, step)
        wanted = [*points, *conditions(model)]
        seen = model.tree.peek(ids[[row]], real[[row]], wanted, None if time is None else time[[row]])
        found = {
            layer: seen[point][0, sources.to(seen[point].device)] for layer, point in zip(chosen, points, strict=True)
        }
        return _Streams(found, seen[CONDITION][0] if CONDITION in wanted else None)

    return _dataset(model, run, row, within("step", steps, run.steps_run), chosen, positions, top_k, streams, lens)


@dataclass(kw_only=True, eq=False)
class LogitLens(Reader):
    """Collects a run's residual streams for the lens and changes nothing.

    ``lens = LogitLens(layers=[3]); run = generate(..., hooks=[MaskSinks(), lens]); lens.read(run)``. List it last to
    see the edits of other hooks; edits after the last layer's stream (``ln_final``, ``hook_logits``) are not included.
    A second run replaces the kept streams: steps × layers × positions × d_model numbers per row in the model's type, in
    main memory; limit them with `steps`, `layers` and `positions`.

    In an autoregressive run with a cache, the streams of earlier tokens are those of the step that computed them.

    Attributes:
        top_k: number of tokens that `read` keeps, most probable first.
        kept: by (step, layer), the streams [place, d_model] that predict the chosen positions, row after row.
        conditions: by step, what the modulations of each row are made from (``hook_cond``), where a network has them.
    """

    needs_run: ClassVar[str] = "LogitLens reads a run; use it in sinklens.trace or sinklens.generate."
    refused: ClassVar[tuple[str, ...]] = ("heads",)

    top_k: int = 5
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    conditions: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        _check_top_k(model, self.top_k)
        layers, in_step = self.chosen_layers(model), self.step_test(run)
        wanted = streams_before(model, run.real, place_mask(self.positions, run.real))
        text: dict[int, Tensor] = {}  # by layer: the streams of all tokens, since a cached pass computes only new ones
        self.kept.clear()
        self.conditions.clear()

        def condition(value: Float[Tensor, "batch d_cond"], hook: Point) -> None:
            if in_step(hook.step or 0):
                self.conditions[hook.step or 0] = value.cpu()

        def keep(value: Float[Tensor, "batch pos d_model"], hook: Point) -> None:
            layer, step, now = layer_of(hook), hook.step or 0, hook.forward_pass
            first = now.first(value.shape[1])
            if run.causal:
                value = torch.cat([text[layer][:, :first], value], dim=1) if first else value.clone()
                text[layer] = value
            elif first or now.computed is not None:
                part = "steps under a cache policy compute" if now.computed is not None else f"step {step} computes"
                leave = "without cache=" if now.computed is not None else "with use_cache=False"
                raise SettingError(
                    f"LogitLens reads complete passes, and {part} only a part of the canvas; run {leave}."
                )
            if in_step(step):
                self.kept[step, layer] = value[wanted[:, : value.shape[1]].to(value.device)].cpu()

        streams: Pairs = [(f"blocks.{layer}.hook_resid_post", keep) for layer in layers]
        return [*((name, condition) for name in conditions(model)), *streams]

    def read(self, run: "Generation", row: int = 0, lens: TunedLens | None = None) -> xr.Dataset:
        """Returns what `logit_lens` returns, for the streams collected in `run`, in whose hooks this lens was listed.

        Args:
            run: the run.
            row: row of the batch.
            lens: a tuned lens, whose maps are applied to the streams first.

        Raises:
            SettingError: nothing was kept, a row that does not exist, or streams of another run.
        """
        steps = sorted({step for step, _ in self.kept if step < run.steps_run})
        require(steps, "the lens holds no step; list it in hooks= of the run, with steps that the run reaches.")
        layers, row = sorted({layer for _, layer in self.kept}), within("row", [row], len(run.canvas))[0]
        wanted = streams_before(run.model, run.real, place_mask(self.positions, run.real))

        def streams(step: int, sources: Tensor) -> _Streams:
            here = wanted[:, : run.prompt_length + step if run.model.causal else wanted.shape[1]]
            require(
                self.kept[step, layers[0]].shape == (int(here.sum()), run.model.cfg.d_model),
                "the lens holds streams of another run; read it before the next run begins.",
            )
            index = here.flatten().cumsum(0).view(here.shape)[row, sources] - 1
            condition = self.conditions[step][row] if step in self.conditions else None
            return _Streams({layer: self.kept[step, layer][index] for layer in layers}, condition)

        return _dataset(run.model, run, row, steps, layers, self.positions, self.top_k, streams, lens)


class _Streams(NamedTuple):
    """The streams [place, d_model] of a step by layer, and what the modulations of the row are made from."""

    by_layer: dict[int, Tensor]
    condition: Float[Tensor, " d_cond"] | None


def _check_top_k(model: "Model", top_k: int) -> None:
    require(
        1 <= top_k <= model.cfg.d_vocab,
        f"top_k must be between 1 and {model.cfg.d_vocab}, the vocabulary size; got {top_k}.",
    )


def _before(model: "Model") -> int:
    """How many positions before a token the stream is that predicts it."""
    return int(model.family_record.shift or model.causal)


def streams_before(
    model: "Model", real: Bool[Tensor, "batch pos"], places: Bool[Tensor, "batch pos"]
) -> Bool[Tensor, "batch pos"]:
    """True at the streams that predict the tokens at `places`; for a row's first token, at the token itself."""
    if not _before(model):
        return places & real
    first = torch.nn.functional.one_hot(real.long().argmax(dim=1), real.shape[1]).bool()
    return (torch.nn.functional.pad(places[:, 1:], (0, 1)) & real) | (places & first)


def _dataset(
    model: "Model",
    run: "Generation",
    row: int,
    steps: list[int],
    layers: list[int],
    positions: Sequence[int] | None,
    top_k: int,
    streams: Callable[[int, Tensor], _Streams],
    lens: TunedLens | None,
) -> xr.Dataset:
    """The readings of `streams`, which returns the streams of a step at some columns."""
    if lens is not None:
        lens.check(model)
    places = place_mask(positions, run.real[[row]])[0] & run.real[row]
    ids, columns, share = run.canvas[row].cpu(), places.nonzero()[:, 0].cpu(), masked_share(run)[row]
    start = int(run.real[row].long().argmax())
    shape = (len(steps), len(layers), len(columns))
    empty = {"token": -1, "probability": np.nan, "entropy": np.nan, "final_probability": np.nan, "final_rank": -1}
    ranked = {name: (*shape, top_k) if name in ("token", "probability") else shape for name in empty}
    found = {name: np.full(ranked[name], fill, np.float32 if fill != -1 else np.int64) for name, fill in empty.items()}
    for at_step, step in enumerate(steps):
        here = (columns > start) & (columns <= run.prompt_length + step) if model.causal else columns >= 0
        by_layer, condition = streams(step, (columns[here] - _before(model)).clamp(min=start))
        for at_layer, (layer, stream) in enumerate(by_layer.items()):
            moved = stream if lens is None else lens.translate(stream, layer, float(share[step]))
            for name, value in _read(model, moved, condition, ids[-1, columns[here]], top_k).items():
                found[name][at_step, at_layer, here.numpy()] = value.cpu().numpy()
    axes, tokens = ("step", "layer", "pos", "rank"), ids[steps][:, columns].numpy()
    data: dict[str, Any] = {name: (axes[: array.ndim], array) for name, array in found.items()}
    data |= {"final_token": ("pos", ids[-1, columns].numpy()), "token_id": (("step", "pos"), tokens)}
    data |= {"masked": (("step", "pos"), run.undecided[row].cpu()[steps][:, columns].numpy())}
    if model.tokenizer is not None:
        texts = {token: str(model.tokenizer.decode([token])) for token in np.unique(found["token"]) if token >= 0}
        data["text"] = (axes, np.vectorize(lambda token: texts.get(token, ""), otypes=[object])(found["token"]))
    coords = {"step": steps, "layer": layers, "pos": (columns - start).numpy()}
    coords |= {"rank": range(top_k), "column": ("pos", columns.numpy())}
    return xr.Dataset(data, coords, {"model": model.name, "row": row, "prompt_length": run.prompt_length})


def conditions(model: "Model") -> list[str]:
    """The point of what the modulations are made from, if the network has them."""
    return [CONDITION] if model.tree.architecture.modulation else []


def log_probabilities(
    model: "Model",
    stream: Float[Tensor, "place d_model"],
    condition: Float[Tensor, "*place d_cond"] | None = None,
) -> Float[Tensor, "place vocab"]:
    """log softmax(W_U · norm(stream)), without calling hooks.

    Args:
        condition: what the final shift and scale are made from, of all streams or of each; None without them.
    """
    model.tree.watch.peeked = {}  # hooks on the norm's points are not called
    try:
        hidden = model.tree.ln_final(stream)
        if condition is not None:
            shift, scale = final_modulation(model.tree, condition.to(hidden))
            hidden = hidden * (1 + scale) + shift
        return model.tree.head(hidden).float().log_softmax(dim=-1)
    finally:
        model.tree.watch.peeked = None


@torch.no_grad()
def _read(
    model: "Model",
    stream: Float[Tensor, "pos d_model"],
    condition: Float[Tensor, " d_cond"] | None,
    final: Int[Tensor, " pos"],
    top_k: int,
) -> dict[str, Tensor]:
    """The lens at every position of `stream`, whose final tokens are `final` (-1 where the run left no token)."""
    parts = []
    size = max(1, CHUNK // model.cfg.d_vocab)
    for start in range(0, max(1, len(stream)), size):
        part, token = (value[start : start + size].to(model.cfg.device) for value in (stream, final))
        logs = log_probabilities(model, part, condition)
        final_log, top, exists = logs.gather(1, token.clamp(min=0)[:, None]), logs.topk(top_k, dim=-1), token >= 0
        parts.append(
            {
                "token": top.indices,
                "probability": top.values.exp(),
                "entropy": torch.special.entr(logs.exp()).sum(dim=-1),
                "final_probability": final_log[:, 0].exp().where(exists, torch.nan),
                "final_rank": (logs > final_log).sum(dim=-1).where(exists, -1),
            }
        )
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
