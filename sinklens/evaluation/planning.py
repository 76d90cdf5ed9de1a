"""What an evaluation costs, from config.json alone: passes, operations, time on a card, and memory by batch.

The plan of one run (run_memory.py) is multiplied by samples and runs. No weights are needed, only a folder with
``config.json`` and, for the length of prompts, a tokenizer.

Caveats: the utilization is yours to state. Small models and small batches reach far less than large ones, and a cache
policy, an early end of rows or a threshold takes fewer passes than are counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from sinklens.evaluation.cards import CARDS, Card, find_card
from sinklens.evaluation.conditions import Condition
from sinklens.evaluation.protocols import EvalProtocol
from sinklens.evaluation.run_memory import RunPlan, fake_model, flops_of, plan_run
from sinklens.model.templates import render
from sinklens.sinks.steps import AT_ONCE
from sinklens.tasks.base import Sample
from sinklens.tasks.prompts import model_input

CHARACTERS = 4  # of a token, for prompts of models without a tokenizer
SAMPLED = 200  # prompts that are read for their length
TEMPORARY = 8  # arrays of the size of the scores that are at hand, at most, while sinks are summed up
__all__ = ["CARDS", "Card", "Plan", "find_card", "plan"]


@dataclass(frozen=True)
class Plan:
    """The cost of all samples of an evaluation.

    Attributes:
        samples, runs: samples, and runs of each: one for each condition, and one more where a condition takes keys of
            the unmasked run.
        prompt_tokens: mean length of a prompt; `counted` says whether a tokenizer counted it.
        passes: passes of one row.
        flops: floating-point operations.
        run: the plan of a run of one row.
        host_bytes, host_row_bytes: bytes in main memory, without the weights, and for each row.
        disk_row_bytes: bytes of a temporary folder for each row, where conditions take keys of the unmasked run.
    """

    samples: int
    runs: int
    prompt_tokens: float
    counted: bool
    passes: int
    flops: float
    run: RunPlan
    host_bytes: int
    host_row_bytes: int
    disk_row_bytes: int

    def seconds(self, card: Card, utilization: float, cards: int = 1) -> float:
        """Time at a share of the peak of a number of cards; raises like `Card.rate`."""
        return self.flops / card.rate(utilization, cards)


def plan(
    source: str | Path,
    protocol: EvalProtocol,
    conditions: Sequence[Condition],
    samples: Sequence[Sample],
    load: Mapping[str, Any] | None = None,
) -> Plan:
    """The cost of an evaluation of `samples` in bfloat16.

    Args:
        source, load: as in `plan_run`.
    """
    with fake_model(source, load or {}, torch.bfloat16) as model:
        settings = protocol.run_settings(model)
        some = samples[:: max(1, len(samples) // SAMPLED)]
        counted = model.tokenizer is not None or not any(isinstance(model_input(sample), str) for sample in some)
        prompt = fmean(_length(model.tokenizer, sample, protocol.chat_template) for sample in some)
        reading = flops_of(model, round(prompt), 0, 0, False)
    run = plan_run(source, prompt_length=round(prompt), load=load, **settings)
    every = len(samples) * sum(1 + condition.of_unmasked for condition in conditions)
    rows, once = 2 if run.settings.guided else 1, run.settings.left_to_right or run.settings.caches_keys
    return Plan(
        samples=len(samples), runs=every // max(1, len(samples)), prompt_tokens=prompt, counted=counted,
        passes=every * run.passes * rows, flops=every * (run.passes * run.flops + once * rows * reading), run=run,
        host_bytes=TEMPORARY * AT_ONCE, host_row_bytes=TEMPORARY * run.track // run.passes + run.canvases,
        disk_row_bytes=run.track if any(one.of_unmasked for one in conditions) else 0,
    )  # fmt: skip


def _length(tokenizer: Any, sample: Sample, chat_template: bool | str) -> float | int:
    """Tokens of a prompt; a model of fake tensors cannot encode one."""
    given = model_input(sample)
    if tokenizer is None or not isinstance(given, str):
        return len(given) / (CHARACTERS if isinstance(given, str) else 1)
    if chat_template is not True or not tokenizer.chat_template:
        return len(tokenizer(given).input_ids)
    text = render(tokenizer, [{"role": "user", "content": sample.prompt}], None, " of the tokenizer")
    return len(tokenizer(f"{text}{sample.opening}", add_special_tokens=False).input_ids)
