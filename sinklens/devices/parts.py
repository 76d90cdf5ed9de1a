"""The parts of the check, in the order in which they run, and their settings."""

import importlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sinklens.devices.findings import Claim

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Setting:
    """Where a part runs.

    Attributes:
        device: the device under test; the CPU if there is no accelerator.
        until: deadline of the part on the clock of `time.monotonic`.
        conformance: folder of reference data, or None.
    """

    device: "torch.device"
    until: float
    conformance: Path | None = None

    @property
    def small(self) -> bool:
        """Whether to use the small sizes for a CPU."""
        return self.device.type == "cpu"

    def left(self) -> float:
        """Seconds left until the deadline."""
        return self.until - time.monotonic()


class Part(NamedTuple):
    """One part of the check.

    Attributes:
        name: name for ``--only``, and of the module of this package with its `claims`.
        about: short description.
        share: relative share of the check's time.
        correctness: whether a failure makes the check fail.
    """

    name: str
    about: str
    share: float
    correctness: bool = True

    def claims(self, setting: Setting) -> Iterator[Claim]:
        """The claims of the part; imports its module."""
        module = importlib.import_module(f"sinklens.devices.{self.name}")
        yield from module.claims(setting)


PARTS = (
    Part("environment", "the device, its memory, and package versions", 0.06),
    Part("conformance", "logits and patterns against the CPU and reference data", 0.12),
    Part("runs", "complete runs against the CPU, and the same run twice", 0.14),
    Part("hooking", "hooks, traces, edits, replay, masks, guidance, caches", 0.1),
    Part("kernels", "Triton kernels and PyTorch's operators against the formula", 0.2),
    Part("peak", "memory above a plain pass, and running out of it", 0.08),
    Part("spreading", "layers on several devices or offloaded, and Ray", 0.08),
    Part("speed", "ratios, figures, roofline, profile", 0.45, correctness=False),
)
