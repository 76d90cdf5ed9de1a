"""What one run takes, from config.json alone: memory by part, operations, bytes moved, and the cards that hold it.

Activations are not estimated by a formula. The model is built of fake tensors (`sinklens.utils.allocations`), and one
pass with everything that is watched runs on them, followed by the output head and the sampler's decisions; the peak of
the storages that exist at a time is the memory of a step. Other parts follow from sizes:

    keys and values   Σ_l 2 · kv_heads_l · d_head · positions · bytes of a number, if steps reuse them
    a recorded step   L · H · S · 4 bytes per row on the device until the step ends, twice while it is stacked
    a track           steps · (L · H · S · 4 + S · 6) bytes per row in main memory
    quantized weights bytes per weight of the linear layers without the head, by `cards.QUANTIZATIONS`

with S positions, L layers and H heads. A pass takes the longer of its operations at a share of the card's peak and its
bytes, weights once and activations, at the card's bandwidth. A row with q computed positions and k keys takes

    2 A q + 6 q k Σ_l H_l d_l + 2 d_model V u

operations: A are the parameters of the layers' matrices that a position uses (of experts the chosen ones), H and d the
heads and their width, V the vocabulary, and u the undecided positions, whose logits are needed. Of the 6, 4 are
attention and 2 the second product of queries and keys for the sums over columns.

Caveats: the allocator of a GPU keeps free blocks, and its libraries take about half a gigabyte: a plan uses at most
90 % of a card. A folder of the hub's cache may hold the config and no weights afterwards; loading the model completes
it. Several cards hold a model by layers, one after the other, which is no faster than one.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sinklens.errors import SettingError, nearest, require
from sinklens.evaluation.cards import QUANTIZATIONS, WATCHED, Card
from sinklens.families.samplers import settings_for
from sinklens.hooks import names
from sinklens.hooks.attention import column_sums
from sinklens.model import Model
from sinklens.sampling.sampler import Sampler

USABLE = 0.9  # share of a card that a plan fills
LOGITS = "denoise.hook_logits"
MOST_POSITIONS = 2**22  # of all rows; tensors of more can exceed what 64 bits count
BLOCKS = 2  # of scores along each axis: with the change from one to the next they take most, and there can be millions


@dataclass(frozen=True)
class RunPlan:
    """What a run takes. Sizes are in bytes.

    Attributes:
        model, settings: the model's name and the sampler's settings.
        batch_size, prompt_length: rows, and positions of the longest prompt.
        parameters: number of parameters.
        quantization: name of the quantization, or of that in which the checkpoint is stored.
        alternatives: `weights` by quantization.
        weights: the weights.
        step: the peak of a pass and the sampler's decisions, above weights and keys.
        step_row: of that, what each further row adds.
        watched: of `step`, what watching adds.
        keys: cached keys and values at the end of the run.
        first_keys: of these, the ones that the first pass makes.
        track: the recorded track in main memory; `keys` and `track` are those of the complete batch.
        canvases: the canvases of the steps, which stay on the device until the run ends.
        passes: passes of the batch, one after the other.
        flops, moved: operations, and bytes from and to the device's memory, of a pass.
    """

    model: str
    settings: "Sampler"
    batch_size: int
    prompt_length: int
    parameters: int
    quantization: str
    alternatives: Mapping[str, int]
    weights: int
    step: int
    step_row: int
    watched: int
    keys: int
    first_keys: int
    track: int
    canvases: int
    passes: int
    flops: float
    moved: float

    @property
    def device_bytes(self) -> int:
        """Peak on the device: of the first pass, which computes most positions, or with all keys at the end."""
        return self.weights + self.working

    @property
    def working(self) -> int:
        """Peak on the device above the weights."""
        return max(self.step + self.first_keys, self.keys) + self.canvases

    @property
    def host_bytes(self) -> int:
        """Peak in main memory for results: the track, and two copies of the canvases while they are stacked."""
        return self.track + 2 * self.canvases

    def seconds(self, card: Card, utilization: float) -> float:
        """Time of the run on `card`, at a share of its peak; raises like `Card.rate`."""
        return self.passes * max(self.flops / card.rate(utilization), self.moved / card.bandwidth)

    def with_batch(self, batch_size: int) -> "RunPlan":
        """The plan of a run with another number of rows."""
        share = batch_size / self.batch_size
        return replace(
            self, batch_size=batch_size, step=self.step + (batch_size - self.batch_size) * self.step_row,
            keys=round(self.keys * share), first_keys=round(self.first_keys * share), track=round(self.track * share),
            canvases=round(self.canvases * share), flops=self.flops * share,
        )  # fmt: skip

    def cards(self, memory: float | int, most: int = 64) -> int:
        """Cards of `memory` bytes that hold the run, with the layers divided among them; 0 if `most` do not."""
        shared = self.weights + max(self.first_keys, self.keys - self.step)
        return next((n for n in range(1, most + 1) if shared / n + self.step <= USABLE * memory), 0)

    def largest_batch(self, memory: float | int, most: int = 4096) -> int:
        """Rows that fit into one card of `memory` bytes; 0 if not even one does."""
        return bisect_right(range(1, most + 1), USABLE * memory, key=lambda rows: self.with_batch(rows).device_bytes)


def plan_run(
    source: str | Path,
    *,
    batch_size: int = 1,
    prompt_length: int = 128,
    watch: Sequence[str] = (),
    keep: bool = False,
    record_sinks: bool = True,
    cached: bool = False,
    quantization: str = "none",
    dtype: torch.dtype = torch.bfloat16,
    load: Mapping[str, Any] | None = None,
    **settings: Any,
) -> RunPlan:
    """Plan a run without the model's weights.

    Args:
        source: a shipped name, a folder with config.json, that file, or a name on the hub, of which only the small
            files are downloaded.
        batch_size: prompts that run together.
        prompt_length: positions of a prompt.
        watch: points whose values hooks or a trace block read: "patterns", "scores" (before the softmax), "streams", or
            a name such as "mlp.hook_post" or "blocks.3.attn.hook_z".
        keep: the values stay on the device until the step ends, as in `run_with_cache`.
        record_sinks: record sink scores, as a run does by default.
        cached: the run has a cache policy, which stores keys and values of all positions.
        quantization: "none", "bnb-int8" or "bnb-nf4"; of linear layers, not of stacked experts,
            embeddings and the head. A quantized checkpoint is planned as it is stored.
        dtype: element type of weights and activations.
        load: ``revision``, ``family`` and ``block_length`` of `sinklens.load`.
        **settings: as in `sinklens.generate`.

    Raises:
        SettingError: an unknown quantization or setting, a quantization of a checkpoint that is quantized already, or
            a batch or length below 1, or more than `MOST_POSITIONS` positions.
        HookNameError: no point has this name.
        CheckpointError: the checkpoint was not found, or its config is not supported.
    """
    require(
        quantization in QUANTIZATIONS,
        f"no quantization is called {quantization!r}; known: {', '.join(QUANTIZATIONS)}."
        f"{nearest(quantization, QUANTIZATIONS)}",
    )
    require(
        batch_size >= 1 and prompt_length >= 1,
        f"a plan needs a batch and a prompt of at least 1; got {batch_size} and {prompt_length}.",
    )
    with fake_model(source, load or {}, dtype) as model:
        chosen = settings_for(model, dict(settings))
        length, steps = prompt_length + chosen.gen_length, chosen.most_steps
        require(
            batch_size * length <= MOST_POSITIONS,
            f"a plan has at most {MOST_POSITIONS:,} positions; {batch_size:,} rows of {length:,} are more. Plan a "
            f"smaller batch, prompt or gen_length.",
        )
        points, several = watched_points(model, watch), max(2, batch_size)
        one, more = (_peak(model, chosen, prompt_length, rows, points, keep, record_sinks) for rows in (1, several))
        step = one if batch_size == 1 else more
        plain = _peak(model, chosen, prompt_length, batch_size, [], False, record_sinks) if points else step
        stored = weights_by_quantization(model, quantization)
        quantization = quantization if quantization in stored else next(iter(stored))
        rows, first, undecided = _sizes(chosen, prompt_length)
        keys = _keys(model, chosen, batch_size * rows, prompt_length, cached)
        queries, seen = queries_and_keys(chosen, float(prompt_length), model)
        flops = (
            batch_size * rows * flops_of(model, queries, seen, undecided / 2 if undecided > 1 else 1.0, record_sinks)
        )
        scores = model.cfg.n_layers * model.cfg.n_heads * length * 4 if record_sinks else 0
        return RunPlan(
            model=str(source), settings=chosen, batch_size=batch_size, prompt_length=prompt_length,
            parameters=sum(value.numel() for value in model.checkpoint.hf.parameters()),
            quantization=quantization, alternatives=stored, weights=stored[quantization], step=step,
            step_row=(more - one) // (several - 1), watched=step - plain,
            keys=keys, first_keys=keys * first // length,
            track=batch_size * steps * (scores + 6 * length) if record_sinks else 0,
            canvases=batch_size * (steps + 1) * length * 9, passes=steps, flops=flops,
            moved=_moved(model, stored[quantization], keys, batch_size * rows * queries, dtype),
        )  # fmt: skip


@contextmanager
def fake_model(source: str | Path, load: Mapping[str, Any], dtype: torch.dtype) -> "Iterator[Model]":
    """A block in which tensors are fake, and a model of them."""
    from sinklens.model.files import find_checkpoint
    from sinklens.model.loading import LoadRequest, outline
    from sinklens.utils.allocations import without_memory

    few = patch.object(column_sums, "range", lambda *bounds: range(*bounds)[:BLOCKS], create=True)
    given = {
        key: value
        for key, value in load.items()
        if key in ("revision", "family", "block_length", "tokenizer", "adapter")
    }
    path = Path(source)
    folder = path.parent if path.name == "config.json" else find_checkpoint(source, given.get("revision"), False)
    with without_memory(), torch.no_grad(), few:
        yield Model(outline(folder, LoadRequest(**given), device="cpu", dtype=dtype))


def weights_by_quantization(model: "Model", quantization: str) -> dict[str, int]:
    """Bytes of the weights under each of `QUANTIZATIONS`, or under its own if the checkpoint is stored quantized."""
    from sinklens.model.files import read_config
    from sinklens.model.quantization import published

    folder, hf = Path(model.name), model.checkpoint.hf
    total = sum(value.numel() * value.element_size() for value in hf.parameters())
    head = hf.get_output_embeddings()
    linear = [one.weight for one in hf.modules() if isinstance(one, nn.Linear | Conv1D) and one is not head]
    inside, size = sum(weight.numel() for weight in linear), model.cfg.dtype.itemsize
    found = {name: total + round(inside * ((width or size) - size)) for name, width in QUANTIZATIONS.items()}
    config = published(read_config(folder), model.checkpoint.family, str(folder))
    if config is None:
        return found
    if quantization != "none":
        raise SettingError(
            f"this checkpoint is quantized already, by {config['quant_method']}, so quantization={quantization!r} does "
            f"not apply; leave it out."
        )
    stored = "bnb-nf4" if config.get("load_in_4bit") else "bnb-int8"
    return {stored: found[stored]}


def watched_points(model: "Model", watch: Sequence[str]) -> list[str]:
    """The points that `watch` names, in every layer where a name has none.

    Raises:
        HookNameError: no point has this name.
    """
    known = [name for name in model.hook_names() if not name.startswith(names.ENCODER)]
    points = [WATCHED.get(text, text) for text in watch]
    found = [
        [name for name in known if name.endswith(f".{point}")]
        or names.select(point, model.hook_names(), model.cfg.n_layers)
        for point in points
    ]
    return list(dict.fromkeys(name for listed in found for name in listed))


def _sizes(settings: "Sampler", prompt: int) -> tuple[int, int, int]:
    """Rows of a pass for each prompt, two under guidance; positions of the first pass, which computes most; and
    positions of a row whose logits a step needs at most.
    """  # fmt: skip
    block, whole = min(settings.positions_per_block, settings.gen_length), prompt + settings.gen_length
    first = prompt if settings.left_to_right else prompt + block if settings.caches_keys else whole
    return 2 if settings.guided else 1, first, block


def _peak(
    model: "Model", settings: "Sampler", prompt: int, batch: int, points: list[str], keep: bool, record: bool
) -> int:  # fmt: skip
    """Bytes of the tensors that exist at a time in a step with ``batch`` prompts; weights are not counted."""
    from sinklens.utils.allocations import LiveBytes

    tree, layers, held, sums = model.tree, model.cfg.n_layers, [], []
    per_prompt, length, undecided = _sizes(settings, prompt)
    hooks: list[Any] = [
        (name, lambda value, hook: held.append(value) if keep else None) for name in points if name != LOGITS
    ]
    if record:  # of the last layer, when those of all others are held
        hooks.append((f"blocks.{layers - 1}.attn.hook_sink_scores", lambda value, hook: sums.append(value[:batch])))
    ids = torch.zeros(batch * per_prompt, length, dtype=torch.long)
    given: dict[str, Any] = {"time": torch.zeros(len(ids))} if tree.timed else {}
    with LiveBytes([*tree.hf.parameters(), *tree.hf.buffers()]) as live, tree.hooks(fwd_hooks=hooks):
        if record:
            sums += [torch.empty((batch, model.cfg.n_heads, length)) for _ in range(layers - 1)]
        settings.rehearse(_logits(model, settings, tree.hidden(ids, **given), undecided, LOGITS in points))
        if sums:
            torch.stack(sums, dim=1)
    return live.most


def _logits(model: "Model", settings: "Sampler", hidden: Tensor, undecided: int, wide: bool) -> Tensor:
    """The logits of the undecided positions in float32, as `State.logits_of` computes them; first of all if `wide`."""
    parts = hidden.chunk(2) if settings.guided else (hidden,)
    logits = [model.tree.head(part if wide else part[:, :undecided].flatten(0, 1).clone()) for part in parts]
    mixed = logits[1] + 2.0 * (logits[0] - logits[1]) if settings.guided else logits[0]
    found = (mixed[:, :undecided].flatten(0, 1).clone() if wide else mixed).float()
    found.amax(dim=-1).isnan()
    return found


def queries_and_keys(settings: "Sampler", prompt: float, model: "Model") -> tuple[float, float]:
    """Positions that a pass computes, and keys that they see, on average."""
    length = prompt + settings.gen_length
    if settings.caches_keys or model.causal:
        size = min(settings.positions_per_block, settings.gen_length)
        return float(size), prompt + (settings.gen_length + size) / 2
    if model.tree.attention_blocks is not None or (
        settings.positions_per_block < settings.gen_length and (model.family_record.attention != "bidirectional")
    ):
        return prompt + settings.gen_length / 2, prompt + settings.gen_length / 2
    return length, length


def flops_of(
    model: "Model", queries: float | int, keys: float | int, undecided: float | int, sums: bool = True
) -> float:  # fmt: skip
    """Operations of a pass of one row; with `sums` over columns, for sink scores. See the module's formula."""
    cfg, hf = model.cfg, model.checkpoint.hf
    ends = [id(end.weight) for end in (hf.get_input_embeddings(), hf.get_output_embeddings()) if end is not None]
    chosen = (cfg.experts_per_token or 0) / cfg.num_experts if cfg.num_experts else 1.0
    active = sum(
        value.numel() * (chosen if ".experts." in name else 1.0)
        for name, value in hf.named_parameters()
        if value.ndim > 1 and id(value) not in ends
    )
    attention = (6 if sums else 4) * queries * keys * cfg.n_layers * cfg.n_heads * cfg.d_head
    return 2 * active * queries + attention + 2 * cfg.d_model * cfg.d_vocab * undecided


def _keys(model: "Model", settings: "Sampler", rows: int, prompt: int, cached: bool) -> int:
    """Bytes of the cached keys and values of all positions."""
    if not (cached or settings.caches_keys or settings.reuses_keys):
        return 0
    config: Any = model.config.get_text_config()
    widths = [
        getattr(layer, "num_key_value_heads", model.cfg.n_heads)
        * (getattr(layer, "head_dim", None) or model.cfg.d_head)
        for layer in config.per_layer_config
    ]
    return 2 * rows * (prompt + settings.gen_length) * sum(widths) * model.cfg.dtype.itemsize


def _moved(
    model: "Model", weights: int, keys: int, tokens: float, dtype: torch.dtype
) -> float:  # fmt: skip
    """Bytes that a pass of `tokens` positions moves: weights and cached keys read once, activations written and read.

    Of experts, those that some position chooses, if all are equally likely.
    """
    cfg, experts = model.cfg, 0
    if cfg.num_experts and cfg.experts_per_token:
        stacked = [value for name, value in model.checkpoint.hf.named_parameters() if ".experts." in name]
        experts = sum(value.numel() * value.element_size() for value in stacked)
        weights -= round(experts * (1 - cfg.experts_per_token / cfg.num_experts) ** tokens)
    return weights + keys + tokens * cfg.n_layers * (8 * cfg.d_model + 3 * cfg.d_mlp) * 2 * dtype.itemsize
