"""The parts of the check, in the order in which they run, and what each is given."""

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
        device: under test; the CPU where there is no accelerator.
        until: by `time.monotonic`; the part should end before.
        conformance: folder of reference data, if there is one.
    """

    device: "torch.device"
    until: float
    conformance: Path | None = None

    @property
    def small(self) -> bool:
        """Whether sizes are those of a CPU."""
        return self.device.type == "cpu"

    def left(self) -> float:
        """Seconds that are left."""
        return self.until - time.monotonic()


class Part(NamedTuple):
    """One part of the check.

    Attributes:
        name: what ``--only`` takes; the module of this package that holds its `claims`.
        about: in a few words.
        share: of the time that the check may take.
        correctness: whether a failure makes the check fail.
    """

    name: str
    about: str
    share: float
    correctness: bool = True

    def claims(self, setting: Setting) -> Iterator[Claim]:
        """The claims of the part; its module is imported here."""
        module = importlib.import_module(f"sinklens.devices.{self.name}")
        yield from module.claims(setting)


PARTS = (
    Part("environment", "what is here", 0.06),
    Part("conformance", "logits and patterns against the CPU and reference data", 0.12),
    Part("runs", "complete runs against the CPU, and the same run twice", 0.14),
    Part("hooking", "hooks, traces, edits, replay, masks, guidance, caches", 0.1),
    Part("kernels", "Triton kernels and PyTorch's operators against the formula", 0.2),
    Part("peak", "memory above a plain pass, and running out of it", 0.08),
    Part("spreading", "layers on several devices or offloaded, and Ray", 0.08),
    Part("speed", "ratios, figures, roofline, profile", 0.45, correctness=False),
)
