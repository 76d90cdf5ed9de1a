"""What an evaluation costs, by formula: passes, floating-point operations, time on a card, and memory by batch.

Nothing is run and no weights are needed, only a folder with ``config.json`` and, for the length of prompts, a
tokenizer. A pass of one row with q computed positions and k keys takes

    2 A q + 6 q k Σ_l H_l d_l + 2 d_model V u

operations: A are the parameters of the layers' matrices that a position uses (of experts the chosen ones), H and d the
heads and their width, V the vocabulary, and u the undecided positions, whose logits are needed. Of the 6, 4 are
attention and 2 the second product of queries and keys for the sums over columns.

Caveats: the utilization is yours to state. Small models and small batches reach far less than large ones, and a cache
policy, an early end of rows or a threshold takes fewer passes than are counted. `estimate` measures instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sinklens.errors import SettingError
from sinklens.evaluation.cards import CARDS, Card, find_card
from sinklens.evaluation.conditions import Condition
from sinklens.evaluation.protocols import EvalProtocol
from sinklens.families import settings_for
from sinklens.sinks.steps import AT_ONCE
from sinklens.tasks import Sample
from sinklens.tasks.prompts import model_input

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.sampling.sampler import Sampler

CHARACTERS = 4  # of a token, for prompts of models without a tokenizer
TEMPORARY = 8  # arrays of the size of the scores that are at hand, at most, while sinks are summed up
SAMPLED = 200  # prompts that are read for their length
__all__ = ["CARDS", "Card", "Plan", "find_card", "meta_model", "plan"]


@dataclass(frozen=True)
class Plan:
    """The cost of all samples of an evaluation.

    Attributes:
        samples, runs: samples, and runs of each: one for each condition, and one more where a condition takes keys of
            the unmasked run.
        prompt_tokens: mean length of a prompt; `counted` says whether a tokenizer counted it.
        passes: passes of one row.
        flops: floating-point operations.
        parameters, weights: number of parameters, and their bytes.
        row_bytes: bytes on the GPU for each row of a batch, at its first step.
        host_bytes, host_row_bytes: bytes in main memory, without the weights, and for each row.
        disk_row_bytes: bytes of a temporary folder for each row, where conditions take keys of the unmasked run.
    """

    samples: int
    runs: int
    prompt_tokens: float
    counted: bool
    passes: int
    flops: float
    parameters: int
    weights: int
    row_bytes: int
    host_bytes: int
    host_row_bytes: int
    disk_row_bytes: int

    def seconds(self, card: Card, utilization: float, cards: int = 1) -> float:
        """Time at a share of the peak of a number of cards.

        Raises:
            SettingError: the share is not above 0 and at most 1, or there is no card.
        """
        if not 0 < utilization <= 1 or cards < 1:
            raise SettingError(
                f"utilization is above 0 and at most 1, with 1 card or more; got {utilization} and {cards}."
            )
        return self.flops / (card.peak * utilization * cards)

    def gpu_bytes(self, batch: int) -> int:
        """Bytes on the GPU with `batch` rows."""
        return self.weights + batch * self.row_bytes

    def largest_batch(self, card: Card, most: int = 512) -> int:
        """The largest batch that fits into 90 % of a card; 0 if not even one row does."""
        return max(0, min(most, int((0.9 * card.memory - self.weights) // self.row_bytes)))


def plan(model: "Model", protocol: EvalProtocol, conditions: Sequence[Condition], samples: Sequence[Sample]) -> Plan:
    """The cost of an evaluation of `samples`.

    Args:
        model: a model, which may be on the meta device (`sinklens.model.loading.outline`).
    """
    settings = settings_for(model, protocol.run_settings(model))
    prompt, counted = _prompt_tokens(model, samples, protocol.chat_template)
    length = round(prompt) + settings.gen_length
    runs = sum(1 + condition.of_unmasked for condition in conditions)
    rows = 2 if settings.guided else 1
    steps, sizes = settings.most_steps, sizes_of(model)
    passes = len(samples) * runs * steps * rows
    queries, keys = queries_and_keys(settings, prompt, model)
    undecided = 1.0 if settings.left_to_right else min(queries, settings.gen_length) / 2
    each = sizes.flops(queries, keys, undecided)
    first = 2 * sizes.active * prompt if queries < prompt else 0.0  # the prompt, read once
    scores = sizes.heads * length * 4
    return Plan(
        samples=len(samples), runs=runs, prompt_tokens=prompt, counted=counted, passes=passes,
        flops=passes * each + len(samples) * runs * rows * first, parameters=sizes.parameters, weights=sizes.weights,
        row_bytes=round(rows * _row_bytes(model, settings, queries)) + scores,
        host_bytes=TEMPORARY * AT_ONCE, host_row_bytes=TEMPORARY * scores + steps * length * 10,
        disk_row_bytes=steps * scores if any(one.of_unmasked for one in conditions) else 0,
    )  # fmt: skip


def _prompt_tokens(model: "Model", samples: Sequence[Sample], chat_template: bool) -> tuple[float, bool]:
    """Mean length of the prompts in tokens, of evenly spaced ones, and whether a tokenizer counted it."""
    some = samples[:: max(1, len(samples) // SAMPLED)]
    if model.tokenizer is None and any(isinstance(model_input(sample), str) for sample in some):
        return sum(len(model_input(sample)) / CHARACTERS for sample in some) / len(some), False
    return sum(_length(model, sample, chat_template) for sample in some) / len(some), True


def _length(model: "Model", sample: Sample, chat_template: bool) -> int:
    """Tokens of a prompt; a model on the meta device cannot encode one."""
    given = model_input(sample)
    if not isinstance(given, str):
        return len(given)
    tokenizer = model.tokenizer
    assert tokenizer is not None, "prompts are text, which was counted otherwise"
    if not chat_template:
        return len(tokenizer(sample.prompt + sample.opening).input_ids)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": sample.prompt}], tokenize=False, add_generation_prompt=True
    )
    return len(tokenizer(f"{text}{sample.opening}", add_special_tokens=False).input_ids)


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


@dataclass(frozen=True)
class ModelSizes:
    """What the formulas need of a model: see the module's docstring.

    Attributes:
        parameters, weights: number of parameters, and their bytes.
        active: parameters of the layers' matrices that a position uses.
        head: parameters of the output head.
        width: Σ_l H_l d_l, heads times their width over all layers.
        heads: heads of all layers.
    """

    parameters: int
    weights: int
    active: float
    head: int
    width: int
    heads: int

    def flops(self, queries: float, keys: float, undecided: float, sums: bool = True) -> float:
        """Operations of a pass of one row; with `sums` over columns, for sink scores."""
        attention = (6 if sums else 4) * queries * keys * self.width
        return 2 * self.active * queries + attention + 2 * self.head * undecided


def sizes_of(model: "Model") -> ModelSizes:
    """What the formulas need of `model`, which may be without weights."""
    cfg, hf = model.cfg, model.checkpoint.hf
    named = dict(hf.named_parameters())
    ends = [end.weight for end in (hf.get_input_embeddings(), hf.get_output_embeddings()) if end is not None]
    outside = {id(value) for value in ends}
    chosen = (cfg.experts_per_token or 0) / cfg.num_experts if cfg.num_experts else 1.0
    active = sum(
        value.numel() * (chosen if ".experts." in name else 1.0)
        for name, value in named.items()
        if value.ndim > 1 and id(value) not in outside
    )
    return ModelSizes(
        parameters=sum(value.numel() for value in named.values()),
        weights=sum(value.numel() * _element(model) for value in named.values()),
        active=active,
        head=cfg.d_model * cfg.d_vocab,
        width=cfg.n_layers * cfg.n_heads * cfg.d_head,
        heads=cfg.n_layers * cfg.n_heads,
    )


def _element(model: "Model") -> int:
    """Bytes of a number; models on the meta device will be loaded in bfloat16."""
    return 2 if model.cfg.device.type == "meta" else model.cfg.dtype.itemsize


def _row_bytes(model: "Model", settings: "Sampler", queries: float) -> float:
    """Bytes of a pass for each row: the widest layer, and the logits of all undecided positions with their float32."""
    cfg, element = model.cfg, _element(model)
    layer = queries * (6 * cfg.d_model + 3 * cfg.d_mlp) * element
    undecided = 1 if settings.left_to_right else min(queries, settings.gen_length)
    return layer + undecided * cfg.d_vocab * (element + 8)


def meta_model(name: Any, load: Mapping[str, Any]) -> "Model":
    """A model without weights, for `plan`."""
    from sinklens.model.loading import LoadRequest, outline
    from sinklens.model.model import Model

    given = {key: value for key, value in load.items() if key in ("revision", "family", "block_length", "tokenizer")}
    return Model(outline(name, LoadRequest(**given)))
