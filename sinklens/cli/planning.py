"""``sinklens evaluate --dry-run``: what the command would cost, by formula and, where there are weights, measured.

Pitfall: the two differ where the machine is not the stated card; the formula counts all samples, the measurement those
that the ledger lacks.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sinklens.errors import CheckpointError

if TYPE_CHECKING:
    from sinklens.evaluation.conditions import Condition
    from sinklens.evaluation.planning import Card, Plan
    from sinklens.evaluation.protocols import EvalProtocol

BATCHES = (1, 8, 16, 25, 32, 64)


def add_planning(work: Any) -> None:
    """Add ``--dry-run`` and its options."""
    work.add_argument(
        "--dry-run", action="store_true",
        help="run nothing; print passes, operations, time on a card and memory by batch, and, if the weights are "
        "there, the time here, measured on a few samples (default: no)",
    )  # fmt: skip
    work.add_argument(
        "--card", default="h100", help="[dry run] the card; an unknown name lists all (default: %(default)s)"
    )
    work.add_argument("--cards", type=int, default=1, metavar="N", help="[dry run] how many (default: %(default)s)")
    work.add_argument(
        "--utilization", type=float, default=0.4, metavar="SHARE",
        help="[dry run] share of the card's peak that is reached (default: %(default)s)",
    )  # fmt: skip
    work.add_argument("--price", type=float, help="[dry run] price of one card for an hour (default: none)")


def print_plan(
    options: argparse.Namespace, name: str, protocol: "EvalProtocol", conditions: "Sequence[Condition]",
    shared: dict[str, Any],
) -> None:  # fmt: skip
    """Print what an evaluation of one model would cost."""
    from sinklens.evaluation.conditions import under_caches
    from sinklens.evaluation.planning import find_card, plan
    from sinklens.evaluation.runner import estimate

    card, task = find_card(options.card), shared["task"]
    assert task is not None, "the command makes the task"
    number, parts = shared["shard"]
    samples = list(task.samples(shared["limit"]))[number::parts]
    every = under_caches(conditions, shared["cache"])
    found = plan(name, protocol, every, samples, shared["load"])
    regime = f", {protocol.regime}" if protocol.regime else ""
    print("\n".join([f"{name}{regime}", *plan_lines(found, card, options)]))
    try:
        cost = estimate(name, protocol, conditions, options.out, **shared)
    except CheckpointError as error:
        print(f"  Not measured here: {error}")
    else:
        print(f"  {estimate_text(cost)}")


def plan_lines(found: "Plan", card: "Card", options: argparse.Namespace) -> list[str]:
    """A plan in words."""
    seconds = found.seconds(card, options.utilization, options.cards)
    hours = seconds / 3600 * options.cards
    prompt = f"{found.prompt_tokens:.0f} tokens a prompt" + ("" if found.counted else " (by 4 characters a token)")
    cards = f"{options.cards} x {card.name}" if options.cards > 1 else card.name
    lines = [
        f"  {found.samples:,} samples x {found.runs} runs: {found.passes:,} passes of a row, {prompt}",
        f"  {found.flops:.3g} operations, {found.flops / found.passes:.3g} a pass",
        f"  {duration(seconds)} on {cards} at {options.utilization:.0%} of {card.peak / 1e12:,.0f} TFLOP/s (bfloat16), "
        f"a rate of {found.passes / seconds / options.cards:,.0f} passes of a row a second on each card"
        + (
            ""
            if options.price is None
            else f"; {hours:,.0f} card hours, {hours * options.price:,.0f} at {options.price:g}"
        ),
        f"  {found.run.parameters:,} parameters, {size_text(found.run.weights)} of weights",
    ]
    table = [f"{batch}: {size_text(found.run.with_batch(batch).device_bytes)}" for batch in BATCHES]
    lines.append(
        f"  GPU memory by batch: {', '.join(table)}; at most {found.run.largest_batch(card.memory)} rows on {card.name}"
    )
    host = [f"{batch}: {size_text(found.host_bytes + batch * found.host_row_bytes)}" for batch in BATCHES]
    lines.append(f"  host memory by batch, without the weights while they are loaded: {', '.join(host)}")
    if found.disk_row_bytes:
        lines.append(
            f"  temporary files (TMPDIR), for keys of the unmasked run: {size_text(found.disk_row_bytes)} a row"
        )
    return lines


def size_text(size: float | int) -> str:
    """A size in bytes in the largest unit of which it is at least one."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size:,.0f} bytes"


def estimate_text(cost: Any) -> str:
    """A measured estimate in words."""
    if not cost.units:
        return "Measured: all samples are already finished."
    return (
        f"Measured: {cost.units:,} samples to do, {cost.tokens:,} tokens in {cost.passes:,} forward passes of a row; "
        f"about {duration(cost.seconds)} in one process here (estimated from {cost.measured} samples)."
    )


def duration(seconds: float) -> str:
    """A time in words."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
