"""Predict the cost of one run (``sinklens plan``) or of an evaluation (``sinklens evaluate --dry-run``).

Pitfall: the plan of an evaluation counts all samples, even those that the ledger already has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter

from sinklens.cli.options import Integer, Names, OfFamily
from sinklens.cli.settings import Settings
from sinklens.utils.escaping import say

if TYPE_CHECKING:
    from sinklens.evaluation.conditions import Condition
    from sinklens.evaluation.planning import Card
    from sinklens.evaluation.protocols import EvalProtocol
    from sinklens.evaluation.run_memory import RunPlan

BATCHES = (1, 8, 16, 25, 32, 64)
SIZES = (24, 48, 80, 141)  # GiB
CARDS = ("a100-40", "a100", "h100", "h200", "rtx4090", "l40s")


@Parameter(name="*", group="Dry run")
@dataclass(frozen=True)
class DryRun:
    """The graphics cards that a dry run plans for.

    Attributes:
        card: the card; an unknown name lists all
        cards: how many
        utilization: share of the card's peak that is reached
    """

    card: str = "h100"
    cards: Integer = 1
    utilization: float = 0.4


def plan(
    model: str,
    /,
    *,
    batch_size: Integer = 1,
    prompt_length: Integer = 128,
    watch: Names = (),
    keep: bool = False,
    no_sinks: bool = False,
    cached: bool = False,
    quantization: Literal["none", "bnb-int8", "bnb-nf4"] = "none",
    element_type: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    cards: Names = CARDS,
    utilization: float = 0.4,
    settings: Settings | None = None,
    loading: OfFamily | None = None,
) -> None:
    """Predict time and memory of one run; `sinklens evaluate --dry-run` plans an evaluation.

    Args:
        model: shipped name, folder, config.json, or hub name; no weights
        batch_size: prompts at a time
        prompt_length: tokens of a prompt
        watch: points that hooks or a block read: patterns, scores, streams, or names (default: none)
        keep: watched values stay until the step ends
        no_sinks: sink scores are not recorded
        cached: the run has a cache policy
        quantization: of linear layers
        element_type: type of weights and activations
        cards: cards to plan for; an unknown name lists all (default: A100, H100, H200, RTX 4090, L40S)
        utilization: share of a card's peak that is reached
    """
    import torch

    from sinklens.evaluation.cards import find_card
    from sinklens.evaluation.run_memory import plan_run

    named = [find_card(name) for name in cards]
    found = plan_run(
        model, batch_size=batch_size, prompt_length=prompt_length, watch=watch, keep=keep, record_sinks=not no_sinks,
        cached=cached, load=loading or {}, quantization=quantization, dtype=getattr(torch, element_type),
        **settings or {},
    )  # fmt: skip
    say(*plan_lines(found, named, utilization, element_type))


def plan_lines(found: "RunPlan", cards: Sequence["Card"], utilization: float, dtype: str) -> list[str]:
    """A plan in words."""
    settings = found.settings
    lines = [
        f"{found.model}: {found.parameters:,} parameters; batch {found.batch_size}, {found.prompt_length} + "
        f"{settings.gen_length} positions, at most {settings.most_steps} steps ({settings.name})",
        f"  on the device: {size_text(found.device_bytes)}",
        f"    weights ({dtype if found.quantization == 'none' else found.quantization}): {size_text(found.weights)}",
        f"    a step: {size_text(found.step)}, of which {size_text(found.watched)} for watched points",
    ]
    keys = [f"    keys and values: {size_text(found.keys)} at the end of the run"] * bool(found.keys)
    host = (
        f"  in main memory: {size_text(found.host_bytes)} for the track and two copies of the canvases; "
        f"Record(out='run.zarr') keeps the track on disk"
    )
    times = [
        f"  {card.name}: {duration(found.seconds(card, utilization))} at {utilization:.0%} of "
        f"{card.peak / 1e12:,.0f} TFLOP/s and {card.bandwidth / 1e12:.2f} TB/s"
        + "; does not fit into one"
        * (found.device_bytes > 0.9 * card.memory)
        for card in cards
    ]
    variants = [replace(found, quantization=name, weights=weights) for name, weights in found.alternatives.items()]
    sizes = [f"    {size} GiB: {'; '.join(_fitting(one, size * 2**30) for one in variants)}" for size in SIZES]
    return [*lines, *keys, host, *times, "  cards that hold this run, and the largest batch on one card:", *sizes]


def _fitting(one: "RunPlan", memory: int) -> str:
    number = one.cards(memory)
    cards = f"{number} card{'s' * (number > 1)}" if number else "none"
    return f"{one.quantization}: {cards}, batch {one.largest_batch(memory)}"


def print_plan(
    options: DryRun, name: str, protocol: "EvalProtocol", conditions: "Sequence[Condition]", shared: dict[str, Any]
) -> None:  # fmt: skip
    """Print what an evaluation of one model would cost."""
    from sinklens.evaluation.conditions import under_caches
    from sinklens.evaluation.planning import find_card
    from sinklens.evaluation.planning import plan as planned

    card = find_card(options.card)
    number, parts = shared["shard"]
    samples = list(shared["task"].samples(shared["limit"]))[number::parts]
    found = planned(name, protocol, under_caches(conditions, shared["cache"]), samples, shared["load"])
    seconds = found.seconds(card, options.utilization, options.cards)
    prompt = f"{found.prompt_tokens:.0f} tokens a prompt" + ("" if found.counted else " (by 4 characters a token)")
    cards = f"{options.cards} x {card.name}" if options.cards > 1 else card.name
    table = [f"{batch}: {size_text(found.run.with_batch(batch).device_bytes)}" for batch in BATCHES]
    host = [f"{batch}: {size_text(found.host_bytes + batch * found.host_row_bytes)}" for batch in BATCHES]
    lines = [
        f"  {found.samples:,} samples x {found.runs} runs: {found.passes:,} passes of a row, {prompt}",
        f"  {found.flops:.3g} operations, {found.flops / found.passes:.3g} a pass",
        f"  {duration(seconds)} on {cards} at {options.utilization:.0%} of {card.peak / 1e12:,.0f} TFLOP/s (bfloat16), "
        f"a rate of {found.passes / seconds / options.cards:,.0f} passes of a row a second on each card",
        f"  {found.run.parameters:,} parameters, {size_text(found.run.weights)} of weights",
        f"  GPU memory by batch: {', '.join(table)}; at most "
        f"{found.run.largest_batch(card.memory)} rows on {card.name}",
        f"  host memory by batch, without the weights while they are loaded: {', '.join(host)}",
    ]
    disk = f"  temporary files (TMPDIR), for keys of the unmasked run: {size_text(found.disk_row_bytes)} a row"
    say(name, *(lines + [disk] * bool(found.disk_row_bytes)))


def size_text(size: float | int) -> str:
    """A size in the largest unit that does not exceed it."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size:,.0f} bytes"


def duration(seconds: float) -> str:
    """A time in words, from milliseconds to days."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} milliseconds"
    return f"{seconds:.0f} seconds" if seconds >= 10 else f"{seconds:.2f} seconds"
