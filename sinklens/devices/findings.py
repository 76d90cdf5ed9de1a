"""Claims, their outcomes, and the closing table.

A claim is a sentence and a function that checks it. The function returns a detail, or a `Measurement`. It raises
`NotChecked` if this machine cannot check the claim; any other error means that the claim failed.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Status = Literal["passed", "failed", "not checked", "measured", "noted"]


class NotChecked(Exception):
    """This machine cannot check the claim; the text says why."""


class Measurement(NamedTuple):
    """A figure that is reported but neither passes nor fails.

    Attributes:
        value: the figure.
        aim: upper limit to aim for; None if there is no aim.
        detail: how it was measured.
    """

    value: float
    aim: float | None
    detail: str


class Claim(NamedTuple):
    """A sentence and the function that checks it."""

    what: str
    check: Callable[[], "str | Measurement | None"]


@dataclass(frozen=True)
class Finding:
    """The outcome of a claim.

    Attributes:
        part: the part of the check.
        what: the claim.
        status: the outcome; "noted" for facts about the machine.
        detail: the figure, or why the claim failed or was not checked.
        value, aim: as in `Measurement`; None for other outcomes.
        seconds: time that the check took.
    """

    part: str
    what: str
    status: Status
    detail: str = ""
    value: float | None = None
    aim: float | None = None
    seconds: float = 0.0


def carry_out(part: str, claims: Iterable[Claim], until: float) -> Iterator[Finding]:
    """Check every claim; a failure does not prevent the next claim from being checked.

    Args:
        until: deadline on the clock of `time.monotonic`; later claims are not checked.
    """
    for claim in claims:
        started = time.monotonic()
        if started > until:
            yield Finding(part, claim.what, "not checked", "the time for this part was over")
            continue
        status, detail, value, aim = _outcome(claim)
        yield Finding(part, claim.what, status, detail, value, aim, round(time.monotonic() - started, 3))


def _outcome(claim: Claim) -> tuple[Status, str, float | None, float | None]:
    try:
        found = claim.check()
    except NotChecked as reason:
        return "not checked", str(reason), None, None
    except Exception as error:  # noqa: BLE001 — any error means that this claim failed, and the text says why
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return "failed", f"{kind}{' '.join(str(error).split())[:600]}", None, None
    if isinstance(found, Measurement):
        return "measured", found.detail, found.value, found.aim
    return "passed", found or "", None, None


def near(found: Tensor, wanted: Tensor, limit: float) -> str:
    """Describe the largest difference, relative to the largest absolute value of `wanted` (at least 1).

    Raises:
        AssertionError: the difference is above `limit`, or the shapes differ.
    """
    assert found.shape == wanted.shape, f"shape {list(found.shape)} instead of {list(wanted.shape)}"
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    same = (found == wanted) | (found.isnan() & wanted.isnan())  # infinities too
    off = torch.where(same, 0.0, (found - wanted).abs())
    largest = float(off.max() / wanted[wanted.isfinite()].abs().max().clamp(min=1.0)) if off.numel() else 0.0
    assert largest <= limit, f"differs by {largest:.2g}; at most {limit:.2g} is allowed"
    return f"differs by {largest:.2g} at most (allowed: {limit:.2g})"


def closing(findings: Iterable[Finding], seconds: dict[str, float], words: dict[str, str]) -> list[str]:
    """The lines of the closing table.

    Args:
        seconds: time that each part took.
        words: what each part checks.
    """
    listed = list(findings)
    width = max(map(len, seconds), default=4) + 2
    lines = [f"{'part':{width}}{'passed':>7}{'failed':>8}{'not checked':>13}{'measured':>10}{'time':>8}   about"]
    for part, took in seconds.items():
        statuses = [finding.status for finding in listed if finding.part == part]
        counts = [statuses.count(status) for status in ("passed", "failed", "not checked", "measured")]
        lines.append(
            f"{part:{width}}{counts[0]:7}{counts[1]:8}{counts[2]:13}{counts[3]:10}{took:6.0f} s   {words[part]}"
        )
    for title, status in (("Failed", "failed"), ("Not checked, and why", "not checked"), ("Measured", "measured")):
        chosen = [finding for finding in listed if finding.status == status]
        if chosen:
            lines += ["", f"{title}:", *(f"  {_summary(finding)}" for finding in chosen)]
    return lines


def _summary(finding: Finding) -> str:
    """A finding in one line."""
    if finding.value is None:
        return f"{finding.part}: {finding.what}: {finding.detail}"
    aim = (
        ""
        if finding.aim is None
        else f" (aim: at most {finding.aim:g}, {'met' if finding.value <= finding.aim else 'missed'})"
    )
    return f"{finding.what}: {finding.value:.3f}{aim}; {finding.detail}"
