"""Evaluation protocols: every setting that can change a score, under one name.

A *protocol* names the task and its settings (examples, extractor), whether the chat template is used, and the settings
of each kind of sampler; its hash covers all of these. Settings passed separately override the protocol's. A ledger
stores the settings that the sampler finally used, so a change without effect on a model does not make a new run.

Caveat: published scores differ in these settings more than in anything else. A protocol named after a model follows
what its authors or the study published, as far as they state it; `note` lists what they leave open.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sinklens.errors import SettingError, nearest
from sinklens.sampling import SAMPLERS
from sinklens.sampling.registry import find_sampler
from sinklens.tasks import NAMES, Task, find_task


@dataclass(frozen=True)
class EvalProtocol:
    """A task together with every setting that can change its score.

    Attributes:
        name: the protocol's name.
        task: name of the task; see `sinklens.tasks.find_task`.
        settings: settings of each sampler ("llada", "dream", "autoregressive"); omitted ones come from the checkpoint
            or the sampler's defaults.
        sampler: the sampler that generates; None for that of each model's family.
        shots, extractor: settings of the task, if it has them; None for the task's defaults.
        chat_template: apply the tokenizer's chat template to the prompt.
        note: the source of the settings, and which are our choice; not part of the hash.
    """

    name: str
    task: str
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shots: int | None = None
    extractor: str | None = None
    chat_template: bool = False
    note: str = ""
    sampler: str | None = None

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

    def make_task(self, path: str | Path | None = None, examples: str | Path | None = None) -> Task:
        """Make the task with these settings.

        Args:
            path, examples: local files of a published task.

        Raises:
            TaskError: a setting is given that the task does not have.
        """
        return find_task(self.task, path=path, shots=self.shots, extractor=self.extractor, examples=examples)  # type: ignore[arg-type]

    def with_settings(self, given: Mapping[str, Any]) -> "EvalProtocol":
        """A copy with some settings replaced, for each sampler that has them; ``sampler`` chooses the sampler.

        Raises:
            SettingError: a setting that no sampler has, or an unknown sampler.
        """
        chosen = find_sampler(given["sampler"]).name if "sampler" in given else self.sampler
        given = {name: value for name, value in given.items() if name != "sampler"}
        known = {name: set(sampler.setting_names()) for name, sampler in SAMPLERS.items()}
        everything = sorted(set().union(*known.values()))
        for name in given:
            if name not in everything:
                raise SettingError(
                    f"no sampler has a setting {name!r}; known: {', '.join(everything)}.{nearest(name, everything)}"
                )
        merged = {
            sampler: self.of(sampler) | {name: value for name, value in given.items() if name in names}
            for sampler, names in known.items()
        }
        settings = {sampler: settings for sampler, settings in merged.items() if settings}
        return replace(self, settings=settings, sampler=chosen)


_STUDY = (
    "Rulli et al., 2510.15731, Sec. 4: instruct checkpoints, lm-evaluation-harness; {length} tokens, for LLaDA in "
    "blocks of 32. Steps are not stated and taken equal to the length; {more}"
)
_RND1 = (
    "Our protocol: RND1's repository has no evaluation code. {length} tokens, as many steps and temperature 0.01 are "
    "those of its README, drawn as its `generate` does by default; {more}, without a chat template, is our choice for "
    "a base model."
)
_OPEN_DCODER = (
    "Open-dLLM's eval/eval_completion/run_eval.sh: 128 tokens, 128 steps, temperature 0.8, top_p 0.95, alg p2, no "
    "examples, no chat template. Its add_bos_token has no counterpart here; one sample per problem is our choice."
)
_DREAM = (
    "Dream's published evaluation: {length} tokens and as many steps, temperature 0.1, top_p 0.9, alg entropy{more}"
)


def _study(length: int) -> dict[str, Mapping[str, Any]]:
    """The study's lengths with one token per step, for every kind of sampler."""
    return {
        "llada": {"gen_length": length, "steps": length, "block_length": 32},
        "dream": {"gen_length": length, "steps": length, "temperature": 0.1, "top_p": 0.9, "alg": "entropy"},
        "autoregressive": {"gen_length": length},
    }


_RND1_SETTINGS = {"rnd1": {"gen_length": 256, "steps": 256, "temperature": 0.01, "greedy": False}}
_OPEN_DCODER_SETTINGS = {
    "open-dcoder": {"gen_length": 128, "steps": 128, "temperature": 0.8, "top_p": 0.95, "alg": "p2"}
}
PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        EvalProtocol("llada-gsm8k", "gsm8k", _study(256), chat_template=True,
                 note=_STUDY.format(length=256, more="five examples, one user turn and the flexible number are "
                                                     "the harness's usual ones, our choice.")),
        EvalProtocol("llada-humaneval", "humaneval-instruct", _study(512), chat_template=True,
                 note=_STUDY.format(length=512, more="the harness's instruct prompt is our choice.")),
        EvalProtocol("dream-gsm8k", "gsm8k-cot", _study(256), shots=0, chat_template=True,
                 note=_DREAM.format(length=256, more="; gsm8k_cot without examples.")),
        EvalProtocol("dream-humaneval", "humaneval-instruct", _study(768), chat_template=True,
                 note=_DREAM.format(length=768, more=".")),
        EvalProtocol("rnd1-gsm8k", "gsm8k", _RND1_SETTINGS,
                 note=_RND1.format(length=256, more="the harness's gsm8k with five examples")),
        EvalProtocol("rnd1-humaneval", "humaneval", _RND1_SETTINGS,
                 note=_RND1.format(length=256, more="HumanEval's completion")),
        EvalProtocol("open-dcoder-humaneval", "humaneval", _OPEN_DCODER_SETTINGS, note=_OPEN_DCODER),
    )
}  # fmt: skip
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
