"""Evaluation protocols: every setting that can change a score, under one name, with the published scores.

A *protocol* names the task and its settings (examples, extractor), whether the chat template is used, and the settings
of each kind of sampler; its hash covers all of these. Settings passed separately override the protocol's. A ledger
stores the settings that the sampler finally used, so a change without effect on a model does not make a new run, and
`departures` finds from the ledger alone how a run differs from the protocol it names. A `HarnessProtocol` is a task of
lm-evaluation-harness.

Caveat: published scores differ in these settings more than in anything else. A protocol named after a model follows
what its authors or the study published, as far as they state it. No setting is guessed: `unstated` lists what the
sources leave open, or state but this package cannot repeat.

Sources, as of October 2025: ML-GSAI/LLaDA (EVAL.md, eval_llada_lm_eval.sh, opencompass/examples) and Nie et al.,
2502.09992, Tables 1 and 2; DreamLM/Dream (eval, eval_instruct) and Ye et al., 2508.15487; JetAstra/SDAR (README);
inclusionAI/LLaDA2.0-mini (model card); Yang et al., 2505.15809 (MMaDA) and Gen-Verse/MMaDA (evaluation/eval.md);
google/diffusiongemma-26B-A4B-it (model card of June 2026).
"""

import hashlib
import json
import shlex
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklens.errors import PromptWarning, SettingError, nearest, require, warn_caller
from sinklens.families import SAMPLERS
from sinklens.families.registry import find_sampler
from sinklens.families.samplers import changed, make_settings, sampler_name
from sinklens.tasks import NAMES, find_task
from sinklens.tasks.base import Task
from sinklens.utils.estimates import Estimate, proportion

if TYPE_CHECKING:
    from sinklens.model import Model

STUDY = "Rulli et al., 2510.15731, Table 1"
"""The source of the study's scores. It calls its checkpoints "instruct" without naming them; the protocols name the
published instruct checkpoint of each model."""
LENGTHS = ("gen_length", "steps")
OF_TASK = ("task", "shots", "extractor", "chat_template", "sampler")


@dataclass(frozen=True)
class Published:
    """A score reported elsewhere.

    Attributes:
        model: the checkpoint, as on the hub.
        score: share of right answers in [0, 1]; None if the source does not state it as a number.
        source: where it is stated.
        samples: size of the test set; None if it is not a number of independent samples.
        masked: sinks masked per head.
    """

    model: str
    score: float | None
    source: str
    samples: int | None = None
    masked: int = 0

    @property
    def accuracy(self) -> Estimate | None:
        """The score with its limits, as of a rounded number of right answers; None without a score or `samples`."""
        if self.score is None or self.samples is None:
            return None
        return proportion(round(self.score * self.samples), self.samples)


def is_checkpoint(model: str, name: str) -> bool:
    """Whether `model`, a hub name or a folder, is the checkpoint called `name`: the last parts are equal."""
    return model.rstrip("/").split("/")[-1] == name.split("/")[-1]


@dataclass(frozen=True)
class Protocol:
    """A task with the settings of published scores.

    Attributes:
        name: the protocol's name.
        task: name of the task.
        settings: settings of the sampler.
        shots: examples in the prompt; None for the task's default.
        chat_template: apply the tokenizer's chat template.
        published: scores measured with these settings; not part of the hash.
        unstated: what the sources leave open, or state but this package cannot repeat; not part of the hash.
    """

    name: str
    task: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    shots: int | None = None
    chat_template: bool | str = False
    published: tuple[Published, ...] = ()
    unstated: tuple[str, ...] = ()


class HarnessProtocol(Protocol):
    """A task of lm-evaluation-harness with the settings of a published score.

    `task` is the harness's name, "" if the score was measured with another harness alone; `settings` are arguments of
    `SinklensLM`: sampler settings, or those of likelihoods.
    """

    def command(self) -> str:
        """The call that repeats the score; "" without a task of the harness."""
        if not self.task:
            return ""
        given = {"pretrained": self.published[0].model, **self.settings}
        call = ["sinklens", "lm-eval", "--model", "sinklens", "--tasks", self.task]
        call += [] if self.shots is None else ["--num_fewshot", str(self.shots)]
        call += ["--apply_chat_template"] * bool(self.chat_template)
        call += ["--model_args", ",".join(f"{name}={value}" for name, value in given.items())]
        return shlex.join(call)


@dataclass(frozen=True)
class EvalProtocol(Protocol):
    """A task together with every setting that can change its score.

    `task` is a name of `sinklens.tasks.find_task`. `settings` are those of each sampler ("llada", "dream",
    "autoregressive"); omitted ones come from the checkpoint or the sampler's defaults. `chat_template` is "plain" if it
    was to be applied and the tokenizer has none, so that the text stays as it is.

    Attributes:
        extractor: the setting `extractor` of a task that has one; None for its default.
        sampler: the sampler that generates; None for that of each model's family.
        mode: how a model that changes its attention decodes, such as "autoregressive"; None for its family's way.
        note: the source of the settings, and which are our choice; not part of the hash.
    """

    extractor: str | None = None
    sampler: str | None = None
    mode: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        require(
            self.mode is None or self.sampler is None,
            f"mode={self.mode!r} and sampler={self.sampler!r} both choose how to decode; name one of them.",
        )

    @property
    def what(self) -> dict[str, Any]:
        """Everything that can change a score, as plain JSON values."""
        found = {
            "task": self.task, "settings": {sampler: dict(given) for sampler, given in sorted(self.settings.items())},
            "shots": self.shots, "extractor": self.extractor, "chat_template": self.chat_template,
        }  # fmt: skip
        optional = {"mode": self.mode, "sampler": self.sampler}
        return found | {name: value for name, value in optional.items() if value is not None}

    @property
    def hash(self) -> str:
        """A hash that distinguishes protocols with the same name."""
        return hashlib.sha256(json.dumps(self.what, sort_keys=True).encode()).hexdigest()[:16]

    def of(self, sampler: str) -> dict[str, Any]:
        """The settings for one kind of sampler.

        A kind that the protocol does not name takes the lengths on which the named ones agree.
        """
        if sampler in self.settings:
            return dict(self.settings[sampler])
        stated = {name: {one[name] for one in self.settings.values() if name in one} for name in LENGTHS}
        takes = SAMPLERS[sampler].settings() if sampler in SAMPLERS else ()
        return {name: next(iter(found)) for name, found in stated.items() if len(found) == 1 and name in takes}

    def run_settings(self, model: "Model") -> dict[str, Any]:
        """The settings of runs of `model`, as `sinklens.generate` takes them.

        Raises:
            SettingError: the model does not decode in the protocol's mode.
        """
        chosen = {"mode": self.mode, "sampler": self.sampler}
        given = self.of(self.sampler or sampler_name(model.family_record, {"mode": self.mode}))
        return {name: value for name, value in chosen.items() if value is not None} | given

    def fitted(self, model: "Model") -> "EvalProtocol":
        """For a tokenizer without a chat template, a listed protocol that asks for one becomes "plain"."""
        listed = self.name in PROTOCOLS and PROTOCOLS[self.name].chat_template is True
        if not (listed and self.chat_template is True) or model.tokenizer is None or model.tokenizer.chat_template:
            return self
        warn_caller(
            f"the tokenizer of {model.name} has no chat template, so the prompts of {self.name} stay plain text. The "
            f"ledger records this, and the scores are not those of the protocol.",
            PromptWarning,
        )
        return replace(self, chat_template="plain")

    def make_task(self, path: str | Path | None = None) -> Task:
        """Make the task with these settings.

        Args:
            path: local file or folder of a published task.

        Raises:
            TaskError: a setting is given that the task does not have.
        """
        return find_task(self.task, path=path, shots=self.shots, extractor=self.extractor)  # type: ignore[arg-type]

    def with_settings(self, given: Mapping[str, Any]) -> "EvalProtocol":
        """A copy with some settings replaced, for each sampler that has them.

        ``sampler`` chooses the sampler, ``mode`` the mode; each replaces the other. Passing ``gen_length`` resets
        ``steps`` and ``block_length``.

        Raises:
            SettingError: a setting that no sampler has, or an unknown sampler.
        """
        sampler, mode = self.sampler, self.mode
        if "sampler" in given or "mode" in given:
            sampler = find_sampler(given["sampler"]).name if "sampler" in given else None
            mode = given.get("mode")
        plain = {name: value for name, value in given.items() if name not in ("sampler", "mode")}
        known = {kind: set(one.settings()) for kind, one in SAMPLERS.items()}
        everything = sorted(set().union(*known.values()))
        for name in plain.keys() - everything:
            raise SettingError(
                f"no sampler has a setting {name!r}; known: {', '.join(everything)}.{nearest(name, everything)}"
            )
        settings = dict[str, Any]()
        for kind, names in known.items():
            own = {name: value for name, value in plain.items() if name in names}
            if own or kind in self.settings:
                settings[kind] = changed(self.of(kind), own)
        return replace(self, settings=settings, sampler=sampler, mode=mode)


def as_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a protocol, from an entry of protocols.toml."""
    scores = tuple(Published(**{"score": None} | one) for one in entry.get("published", ()))
    return {**entry, "published": scores, "unstated": tuple(entry.get("unstated", ()))}


LISTED = tomllib.loads(Path(__file__).with_name("protocols.toml").read_text(encoding="utf-8"))
PROTOCOLS = {entry["name"]: EvalProtocol(**as_fields(entry)) for entry in LISTED["protocol"]}
HARNESS_PROTOCOLS = {entry["name"]: HarnessProtocol(**as_fields(entry)) for entry in LISTED["harness"]}
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


def departures(what: Mapping[str, Any]) -> list[str]:
    """The settings of a run in a ledger that are not those of the protocol it names, e.g. "steps 128, not 1024".

    Empty also for a task without a protocol, or a protocol that this version does not know. Lengths that a source
    leaves open are not departures.
    """
    protocol = PROTOCOLS.get(str(what["protocol"]["name"]))
    if protocol is None:
        return []
    sampler, settings = str(what["sampler"]), what["settings"]
    wanted = stated = protocol.of(sampler)
    if protocol.settings and sampler not in protocol.settings:
        return [f"the {sampler} sampler, for which {protocol.name} states nothing"]
    lengths = {name: settings[name] for name in LENGTHS if name in settings}
    with suppress(SettingError):  # a sampler that is not installed here, or settings that need the checkpoint's
        wanted = vars(make_settings(sampler, lengths | stated, {})) if stated else {}
    wanted = {name: protocol.what.get(name) for name in OF_TASK} | wanted
    found = {name: what["protocol"].get(name) for name in OF_TASK} | settings
    return [
        f"{name} {found[name]}, not {wanted[name]}" for name in found if name in wanted and found[name] != wanted[name]
    ]
