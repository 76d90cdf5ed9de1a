"""The lines of a results table: one for each condition, with its accuracy, its comparisons and how it was made.

`tables.read_lines` makes them from a ledger; `frame` gives them as plain numbers.

Pitfall: `Line.against_random` is empty for a condition without a control; `no_random` says why.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sinklens.evaluation.statistics import Accuracy, Paired

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped,unused-ignore]


@dataclass(frozen=True)
class Line:
    """A line of the results table: one condition, and how it compares with the others of its group.

    Attributes:
        task, protocol, model: names; `model` includes what distinguishes groups that would share a name.
        condition, masked, pick: as in `Condition`.
        cache: the cache policy of the runs; "" for exact ones.
        accuracy: over all samples with a verdict.
        against_unmasked: paired with the unmasked run; None for the unmasked run, or if there is no such run.
        against_random: paired with its control: the same number of random keys, masked in the same manner, or the
            condition whose `Condition.control_of` names this one (the first of several). None without one.
        chance: expected accuracy of a guess, in [0, 1].
        malformed: share of answers that are not of the required form (`Task.malformed`); NaN if the task requires none,
            or for records of version 0.1.
        formed: accuracy over the other answers; None where `malformed` is NaN.
        empty, masks, unended: shares of answers that are empty, contain masks, or have no end token.
        per_second: samples per second of model time.
        control: name of that control; "" without one.
        no_unmasked, no_random: why `against_unmasked` or `against_random` is None: "no unmasked run", "no control",
            "not scored" or "no shared samples". "" if it is not None, or where it does not apply: to the unmasked run,
            to controls, and to runs that change nothing but the cache policy.
        speed: seconds of the exact unmasked run over seconds of this one, on the samples that both have; NaN for the
            unmasked run, or if there is no such run.
        sinks: sinks per head and step, by the paper's definition.
        devices: device types.
        paper: accuracy in the study's Table 1 for the same model and protocol, else None.
        unscored: samples whose generated program has not been run. They are excluded from all other numbers, unless
            no program has been run: then `accuracy` has no samples, and the shares are over the unscored ones.
        checkpoint, revision, dtype, seed: of the runs; `checkpoint` is the model's name without additions.
        regime: how answers are decoded; see `regime_of`.
        versions: of sinklens, torch and transformers, each with its name.
        machines: names of the devices.
        departs: how the run differs from its protocol; see `departures`.
        keys_requested, keys_picked: mean over the samples of the keys that a control was to pick and did pick, summed
            over heads and steps; NaN for runs without a control.
    """

    task: str
    protocol: str
    model: str
    condition: str
    masked: int | None
    pick: str
    accuracy: Accuracy
    against_unmasked: Paired | None
    against_random: Paired | None
    chance: float
    malformed: float
    formed: Accuracy | None
    empty: float
    masks: float
    unended: float
    per_second: float
    sinks: float
    devices: tuple[str, ...]
    paper: float | None
    unscored: int = 0
    cache: str = ""
    speed: float = math.nan
    control: str = ""
    no_unmasked: str = ""
    no_random: str = ""
    checkpoint: str = ""
    revision: str = ""
    dtype: str = ""
    seed: int = 0
    regime: str = ""
    versions: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    departs: tuple[str, ...] = ()
    keys_requested: float = math.nan
    keys_picked: float = math.nan


def regime_of(sampler: str, settings: Mapping[str, Any]) -> str:
    """How a sampler decodes: "left to right", "diffusion" (all positions at once), "blocks of 32" or "canvases of 256".

    Autoregressive samplers decode from left to right. Samplers with blocks as long as the answer, or without blocks,
    may decide any position at any step.
    """
    length = settings.get("gen_length")
    for name, noun in (("block_length", "blocks"), ("canvas_length", "canvases")):
        size = settings.get(name)
        if size is not None and size != length:
            return f"{noun} of {size}"
    return "left to right" if sampler == "autoregressive" else "diffusion"


def frame(lines: Sequence[Line]) -> "DataFrame":
    """All lines as a table of plain numbers; `p` columns are Holm-corrected."""
    import pandas as pd

    rows = []
    for line in lines:
        low, high = line.accuracy.interval
        row = {
            "task": line.task, "protocol": line.protocol, "model": line.model, "condition": line.condition,
            "masked": line.masked, "pick": line.pick, "cache": line.cache,
            "right": line.accuracy.right, "total": line.accuracy.total,
            "estimate": line.accuracy.share, "low": low, "high": high, "chance": line.chance,
        }  # fmt: skip
        for kind in ("against_unmasked", "against_random"):
            pair = getattr(line, kind)
            for name in ("difference", "low", "high", "lost", "gained", "p", "total"):
                row[f"{kind}_{name}"] = math.nan if pair is None else getattr(pair, name)
        rows.append(row | {
            "malformed": line.malformed, "right_of_formed": math.nan if line.formed is None else line.formed.share,
            "empty": line.empty, "masks": line.masks, "unended": line.unended, "per_second": line.per_second,
            "speed": line.speed, "sinks": line.sinks, "devices": " ".join(line.devices), "paper": line.paper,
            "unscored": line.unscored, "control": line.control, "no_unmasked": line.no_unmasked,
            "no_random": line.no_random, "checkpoint": line.checkpoint, "revision": line.revision,
            "dtype": line.dtype, "seed": line.seed, "regime": line.regime, "versions": "; ".join(line.versions),
            "machines": "; ".join(line.machines), "departs": "; ".join(line.departs),
            "keys_requested": line.keys_requested, "keys_picked": line.keys_picked,
        })  # fmt: skip
    return pd.DataFrame(rows)
