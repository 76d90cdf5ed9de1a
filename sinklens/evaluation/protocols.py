"""Evaluation protocols: every setting that can change a score, under one name.

A *protocol* names the task and its settings (examples, extractor), whether the chat template is used, and the settings
of each kind of sampler; its hash covers all of these. Settings passed separately override the protocol's. A ledger
stores the settings that the sampler finally used, so a change without effect on a model does not make a new run.

Caveat: published scores differ in these settings more than in anything else. A protocol named after a model follows
what its authors or the study published, as far as they state it. `published` holds the scores, with sources; `unstated`
lists what the sources leave open, or state but this package cannot repeat. `departures` says how a run differs.

A *regime* replaces the blocks of the settings: all positions in one block (pure diffusion), or block by block. Scores
differ more between regimes than under most interventions (LLaDA-8B-Instruct's GSM8K: 0.694 and 0.786). Only the blocks
change: settings that belong to one regime, such as how end-of-text tokens are treated, stay as they are.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.errors import SettingError, nearest
from sinklens.evaluation.published import LISTED, Published, as_fields
from sinklens.families import SAMPLERS
from sinklens.families.registry import find_sampler
from sinklens.families.samplers import sampler_name, settings_for
from sinklens.tasks import NAMES, find_task
from sinklens.tasks.base import Task

if TYPE_CHECKING:
    from sinklens.model import Model


BOTH = ("diffusion", "blocks")
USUAL = 32  # the length of blocks, where the settings have a single one
_FORM = re.compile(r"diffusion|blocks(?::([1-9][0-9]*))?")


@dataclass(frozen=True)
class EvalProtocol:
    """A task together with every setting that can change its score.

    Attributes:
        name: the protocol's name.
        task: name of the task; see `sinklens.tasks.find_task`.
        settings: settings of each sampler ("llada", "dream", "autoregressive"); omitted ones come from the checkpoint
            or the sampler's defaults.
        sampler: the sampler that generates; None for that of each model's family.
        mode: how a model that changes its attention decodes, such as "autoregressive"; None for its family's way.
        shots, extractor: settings of the task, if it has them; None for the task's defaults.
        chat_template: apply the tokenizer's chat template to the prompt.
        note: the source of the settings, and which are our choice; not part of the hash.
        regime: replaces the blocks of the settings: "diffusion", "blocks" or "blocks:N"; see `in_regime`.
        published: scores measured with these settings; not part of the hash.
        unstated: what the sources leave open, or state but this package cannot repeat; not part of the hash.
    """

    name: str
    task: str
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shots: int | None = None
    extractor: str | None = None
    chat_template: bool = False
    note: str = ""
    sampler: str | None = None
    published: tuple[Published, ...] = ()
    unstated: tuple[str, ...] = ()
    regime: str = ""
    mode: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.regime, str) or not (self.regime == "" or _FORM.fullmatch(self.regime)):
            raise SettingError(f"a regime is diffusion, blocks or blocks:N, such as blocks:32; got {self.regime!r}.")
        if self.mode is not None and self.sampler is not None:
            raise SettingError(
                f"mode={self.mode!r} and sampler={self.sampler!r} both choose how to decode; name one of them."
            )

    @property
    def what(self) -> dict[str, Any]:
        """Everything that can change a score, as plain JSON values."""
        settings = {sampler: dict(given) for sampler, given in sorted(self.settings.items())}
        found = {
            "task": self.task,
            "settings": settings,
            "shots": self.shots,
            "extractor": self.extractor,
            "chat_template": self.chat_template,
        }
        found |= {"regime": self.regime} if self.regime else {}
        found |= {} if self.mode is None else {"mode": self.mode}
        return found if self.sampler is None else found | {"sampler": self.sampler}

    @property
    def hash(self) -> str:
        """A hash that distinguishes protocols with the same name."""
        return hashlib.sha256(json.dumps(self.what, sort_keys=True).encode()).hexdigest()[:16]

    def of(self, sampler: str) -> dict[str, Any]:
        """The settings for one kind of sampler."""
        return dict(self.settings.get(sampler, {}))

    def given(self, family_sampler: str) -> dict[str, Any]:
        """The settings of a run, for a model whose family's sampler is `family_sampler`."""
        return self.of(family_sampler) if self.sampler is None else {"sampler": self.sampler, **self.of(self.sampler)}

    def run_settings(self, model: "Model") -> dict[str, Any]:
        """The settings of runs of `model`, as `sinklens.generate` takes them, in the protocol's regime.

        Raises:
            SettingError: the model does not decode in that regime or mode.
        """
        family = model.family_record
        given = self.given(sampler_name(family, {"mode": self.mode}))
        return in_regime(model, given if self.mode is None else {"mode": self.mode, **given}, self.regime)

    def make_task(self, path: str | Path | None = None, examples: str | Path | None = None) -> Task:
        """Make the task with these settings.

        Args:
            path, examples: local files of a published task.

        Raises:
            TaskError: a setting is given that the task does not have.
        """
        return find_task(self.task, path=path, shots=self.shots, extractor=self.extractor, examples=examples)  # type: ignore[arg-type]

    def with_settings(self, given: Mapping[str, Any]) -> "EvalProtocol":
        """A copy with some settings replaced, for each sampler that has them.

        ``sampler`` chooses the sampler, ``mode`` the mode; the one replaces the other.

        Raises:
            SettingError: a setting that no sampler has, or an unknown sampler.
        """
        sampler, mode = self.sampler, self.mode
        if "sampler" in given or "mode" in given:
            sampler = find_sampler(given["sampler"]).name if "sampler" in given else None
            mode = given.get("mode")
        given = {name: value for name, value in given.items() if name not in ("sampler", "mode")}
        known = {name: set(sampler.setting_names()) for name, sampler in SAMPLERS.items()}
        everything = sorted(set().union(*known.values()))
        for name in given:
            if name not in everything:
                raise SettingError(
                    f"no sampler has a setting {name!r}; known: {', '.join(everything)}.{nearest(name, everything)}"
                )
        merged = {
            kind: self.of(kind) | {name: value for name, value in given.items() if name in names}
            for kind, names in known.items()
        }
        settings = {kind: settings for kind, settings in merged.items() if settings}
        return replace(self, settings=settings, sampler=sampler, mode=mode)


def in_regime(model: "Model", given: dict[str, Any], regime: str) -> dict[str, Any]:
    """The settings of a run under a regime; `given` if it is "".

    Args:
        given: settings, as `sinklens.generate` takes them.
        regime: "diffusion", one block as long as the answer; "blocks:N", blocks of N positions from left to right;
            "blocks", those of the settings, or of 32 if they have a single one.

    Raises:
        SettingError: an unknown regime, or a model whose sampler does not have both.
    """
    if not regime:
        return given
    plain = settings_for(model, given)
    sampler = find_sampler(plain.name)
    by_blocks = plain.name if "block_length" in sampler.setting_names() else sampler.blocks_by
    if model.family_record.attention != "bidirectional" or not by_blocks:
        raise SettingError(
            f"{model.name} decodes with the {plain.name} sampler in one regime only; leave --regimes out, or choose a "
            f"bidirectional model with a sampler such as llada or dream."
        )
    if regime == "diffusion":
        return given if plain.positions_per_block == plain.gen_length else given | {"block_length": plain.gen_length}
    size = _FORM.fullmatch(regime)
    assert size is not None, "checked above"
    usual = plain.positions_per_block if plain.positions_per_block < plain.gen_length else USUAL
    found = given | {"block_length": int(size[1] or usual)}
    return found if by_blocks == plain.name else found | {"sampler": by_blocks}


PROTOCOLS = {entry["name"]: EvalProtocol(**as_fields(entry)) for entry in LISTED["protocol"]}
PLAIN = "the task's prompt with the checkpoint's lengths and steps"


def find_protocol(name: str) -> EvalProtocol:
    """The protocol called `name`; the name of a task gives that task with the checkpoint's settings.

    Raises:
        SettingError: no protocol or task has this name; the message suggests the nearest.
    """
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    if name in NAMES:
        return EvalProtocol(name, name, note=PLAIN)
    known = [*PROTOCOLS, *NAMES]
    raise SettingError(f"no protocol is called {name!r}; known: {', '.join(known)}.{nearest(name, known)}")
