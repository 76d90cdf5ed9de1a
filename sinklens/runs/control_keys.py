"""What the rules of a run found: how many control keys, of how many requested, and whether any place.

A control (``pick=`` of a rule for keys) takes keys that match those of the treatment. Where too few match, it takes
fewer, and where none does, it changes nothing and its cost says nothing. Every rule with a control therefore counts its
keys in a `ControlCount` while the run lasts. At the end `ControlLog.report` refuses a control that picked no key at
all and warns of one with too few, and the counts are part of the result (`ControlKeys`). It also warns of a rule that
looked for keys by their scores and found none in any step.

Limitation: the counts are of keys per step, layer and head. They do not say how well a key matches.
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinklens.errors import ControlWarning, InterventionWarning, require, warn_caller


@dataclass(frozen=True)
class ControlKeys:
    """The keys of a run's controls, by row: over all steps, layers, heads and interventions.

    Attributes:
        requested: number of keys that the controls control for.
        picked: number of control keys, which may be larger for "same_mass".
    """

    requested: Int[Tensor, " batch"]
    picked: Int[Tensor, " batch"]

    def __getitem__(self, rows: slice) -> "ControlKeys":
        """The counts of some rows."""
        return ControlKeys(self.requested[rows], self.picked[rows])


@dataclass
class ControlCount:
    """Counts the keys of one rule in one run.

    Attributes:
        label: the intervention and its control, for messages.
        rows: the rows of the run that the intervention changes.
        sums: by row, the number of keys requested and picked, and of heads and steps with too few control keys.
        step: the same, of the step that runs.
    """

    label: str
    rows: slice
    sums: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.long))
    step: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.long))

    def add(
        self,
        requested: Int[Tensor, "batch head"],
        picked: Int[Tensor, "batch head"],
        short: Bool[Tensor, "batch head"],
    ) -> None:
        """Count the keys of a step and layer. Nothing waits for the device until the run has ended.

        Args:
            requested, picked: number of keys.
            short: heads with too few control keys.
        """
        self.step = self.step + torch.stack([part.sum(dim=1) for part in (requested, picked, short)])


@dataclass
class ControlLog:
    """The counts of all controls of a run, and which of its rules found a place.

    Attributes:
        part: the rows of the run that this log is for; None for all.
        counts: the counts of controls.
        found: by rule, as a key and words for messages, whether it found a place. Runs of one call may share it.
    """

    part: slice | None = None
    counts: list[ControlCount] = field(default_factory=list)
    found: dict[tuple[int, str], bool] = field(default_factory=dict)

    def of_rows(self, rows: slice) -> "ControlLog":
        """A log for some rows, whose counts also enter this log."""
        return ControlLog(rows, self.counts, self.found)

    def begin(self, label: str) -> ControlCount:
        """The count of another rule."""
        self.counts.append(ControlCount(label, self.part or slice(None)))
        return self.counts[-1]

    def add(self, rule: tuple[int, str], found: bool) -> None:
        """Keep whether a rule found a place at a step."""
        self.found[rule] = found or self.found.get(rule, False)

    def end_step(self, active: Bool[Tensor, " batch"]) -> None:
        """Keep the counts of the step that ended, in the rows that it worked on; run alone, others had no such step."""
        for count in self.counts:
            count.sums = count.sums + count.step * active[count.rows].to(count.step.device)
            count.step = torch.zeros_like(count.step)

    def totals(self, batch: int) -> ControlKeys | None:
        """The sums over all rules by row; None if the run has no control."""
        if not self.counts:
            return None
        sums = torch.zeros(3, batch, dtype=torch.long)
        for count in self.counts:
            sums[:, count.rows] += (count.sums + count.step).cpu()
        return ControlKeys(*sums[:2])

    def report(self, refuse: bool = True) -> None:
        """Warn of controls with too few keys and of rules that found nothing, and refuse controls without any key.

        Args:
            refuse: False if a call has several runs: warn of controls without a key, too; the call reports rules.

        Raises:
            SettingError: keys to control for were found, and no control key at any step of any row.
        """
        for count in self.counts:
            requested, picked, short = (
                torch.atleast_2d((count.sums + count.step).cpu()).expand(3, -1).sum(dim=1).tolist()
            )
            empty = requested > 0 and picked == 0
            require(
                not empty or not refuse,
                f"{count.label} found {requested} keys to control for and no "
                f"control key at any step, so it would change nothing: no allowed key is weaker and matches. Take "
                f"fewer keys (a smaller top_k or k), allow more (only=, positions=), or choose another pick=.",
            )
            if empty or short:
                warn_caller(
                    f"{count.label} picks fewer keys than it controls for in some heads and steps; compare "
                    f"control_keys.picked with control_keys.requested of the run (in tables control_picked and "
                    f"control_requested) before you compare its cost.",
                    ControlWarning,
                )
        missed = list(dict.fromkeys(words for (_, words), found in self.found.items() if not found)) if refuse else []
        if missed:
            more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
            warn_caller(
                f"{', '.join(missed[:3])}{more} found nothing in any step to act on. Choose a lower epsilon, another "
                f"detector or top_k=, or allow more (only=, positions=, layers=, heads=); run.sinks has the scores. At "
                f"step 0 there are none yet, unless same_step=True or source= gives them.",
                InterventionWarning,
            )
