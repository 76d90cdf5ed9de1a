"""``sinklens plan``: what one run of a model takes, from its config.json.

Pitfall: a plan is about one run. What an evaluation with many samples takes, ``sinklens evaluate --dry-run`` prints.
"""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sinklens.cli.options import add_loading, add_settings, loading, settings_given
from sinklens.cli.planning import duration as longer
from sinklens.cli.planning import size_text

if TYPE_CHECKING:
    from sinklens.evaluation.run_memory import RunPlan

SIZES = (24, 48, 80, 141)  # GiB
CARDS = ("a100-40", "a100", "h100", "h200", "rtx4090", "l40s")


def add_plan(command: argparse.ArgumentParser) -> None:
    """Add the options of ``sinklens plan``."""
    from sinklens.evaluation.cards import QUANTIZATIONS, WATCHED

    command.add_argument("model", metavar="MODEL", help="shipped name, folder, config.json, or hub name; no weights")
    command.add_argument("--batch", type=int, default=1, metavar="N", help="prompts at a time (default: %(default)s)")
    command.add_argument(
        "--prompt-length", type=int, default=128, metavar="N", help="tokens of a prompt (default: %(default)s)"
    )
    command.add_argument(
        "--watch", nargs="+", default=[], metavar="POINT",
        help=f"points that hooks or a block read: {', '.join(WATCHED)}, or names (default: none)",
    )  # fmt: skip
    command.add_argument("--keep", action="store_true", help="watched values stay until the step ends (default: no)")
    command.add_argument("--no-sinks", action="store_true", help="sink scores are not recorded (default: they are)")
    command.add_argument("--cached", action="store_true", help="the run has a cache policy (default: no)")
    command.add_argument(
        "--quantization", choices=list(QUANTIZATIONS), default="none", help="of linear layers (default: %(default)s)"
    )
    command.add_argument(
        "--element-type", choices=("bfloat16", "float16", "float32"), default="bfloat16",
        help="type of weights and activations (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--cards", nargs="+", default=list(CARDS), metavar="NAME",
        help="cards to plan for; an unknown name lists all (default: A100, H100, H200, RTX 4090, L40S)",
    )  # fmt: skip
    command.add_argument(
        "--utilization", type=float, default=0.4, metavar="SHARE",
        help="share of a card's peak that is reached (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print the plan as JSON (default: as text)")
    add_settings(command)
    add_loading(command, "family", "block_length")
    command.set_defaults(command=run_plan)


def run_plan(options: argparse.Namespace) -> None:
    """`sinklens plan`."""
    import json

    import torch

    from sinklens.evaluation.cards import find_card
    from sinklens.evaluation.run_memory import plan_run

    cards = [find_card(name) for name in options.cards]
    settings = settings_given(options)
    given = loading(options)
    given.pop("block_length", None)  # of a block-causal model too, the setting names it
    found = plan_run(
        options.model, batch=options.batch, prompt_length=options.prompt_length, watch=options.watch,
        keep=options.keep, record_sinks=not options.no_sinks, cached=options.cached, load=given,
        quantization=options.quantization, dtype=getattr(torch, options.element_type), **settings,
    )  # fmt: skip
    if options.json:
        print(json.dumps(described(found), indent=1))
        return
    print("\n".join(plan_lines(found, cards, options.utilization, options.element_type)))


def described(found: "RunPlan") -> dict[str, Any]:
    """A plan as plain JSON values, with the sums that follow from it."""
    plain = {name: value for name, value in vars(found).items() if name not in ("settings", "values")}
    settings = {name: value for name, value in vars(found.settings).items() if value is not None}
    sums = {"device_bytes": found.device_bytes, "host_bytes": found.host_bytes}
    return {**plain, "sampler": found.settings.name, "settings": settings, "values": dict(found.values), **sums}


def plan_lines(found: "RunPlan", cards: list[Any], utilization: float, dtype: str) -> list[str]:
    """A plan in words."""
    settings = found.settings
    lines = [
        f"{found.model}: {found.parameters:,} parameters; batch {found.batch}, {found.prompt_length} + "
        f"{settings.gen_length} positions, at most {settings.most_steps} steps ({settings.name})",
        f"  on the device: {size_text(found.device_bytes)}",
        f"    weights ({dtype if found.quantization == 'none' else found.quantization}): {size_text(found.weights)}",
        f"    a step: {size_text(found.step)}, of which {size_text(found.watched)} for watched points",
    ]
    if found.unpacked:
        lines.append(f"    the largest quantized matrix, unpacked: {size_text(found.unpacked)}")
    if found.keys:
        lines.append(f"    keys and values: {size_text(found.keys)} at the end of the run")
    lines += _watched_lines(found)
    lines.append(
        f"  in main memory: {size_text(found.host_bytes)} for the track and the canvases, twice while they are joined; "
        f"Record(to='run.zarr') keeps the track on disk"
    )
    for card in cards:
        fits = found.device_bytes <= 0.9 * card.memory
        seconds = found.seconds(card, utilization)
        lines.append(
            f"  {card.name}: {duration(seconds)} at {utilization:.0%} of {card.peak / 1e12:,.0f} TFLOP/s and "
            f"{card.bandwidth / 1e12:.2f} TB/s" + ("" if fits else "; does not fit into one")
        )
    return lines + _fitting_lines(found)


def _watched_lines(found: "RunPlan") -> list[str]:
    """The watched points by kind, largest first."""
    kinds: dict[str, list[int]] = {}
    for name, size in found.values.items():
        kinds.setdefault(name.split(".", 2)[-1] if name.startswith("blocks.") else name, []).append(size)
    ordered = sorted(kinds.items(), key=lambda kind: -sum(kind[1]))
    return [
        f"    {kind}: {size_text(max(all_of))} each, {size_text(sum(all_of))} in all layers" for kind, all_of in ordered
    ]


def _fitting_lines(found: "RunPlan") -> list[str]:
    """Which memory holds the run, by quantization."""
    lines = ["  cards that hold this run, and the largest batch on one card:"]
    for size in SIZES:
        cells = []
        for name, other in variants(found).items():
            number = other.cards(size * 2**30)
            held = f"{number} card{'s' * (number > 1)}" if number else "none"
            cells.append(f"{name}: {held}, batch {other.largest_batch(size * 2**30)}")
        lines.append(f"    {size} GiB: {'; '.join(cells)}")
    return lines


def variants(found: "RunPlan") -> dict[str, "RunPlan"]:
    """The plan under each quantization, by its name."""
    return {
        name: replace(found, quantization=name, weights=weights, unpacked=unpacked)
        for name, (weights, unpacked) in found.alternatives.items()
    }


def duration(seconds: float) -> str:
    """A time in words, down to milliseconds."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} milliseconds"
    return longer(seconds) if seconds >= 10 else f"{seconds:.2f} seconds"
