"""Published scores with the settings they were measured with, for tasks that lm-evaluation-harness runs.

A `HarnessProtocol` is a task of the harness with every setting that its source states; `command` is the call that
repeats it. The protocols of sinklens's own tasks (protocols.py) hold `Published` scores too.

Caveat: no setting is guessed. `unstated` lists what the source leaves open, and what it states but this package cannot
repeat; a score that differs may differ for these reasons.

Sources, as of October 2025: ML-GSAI/LLaDA (EVAL.md, eval_llada_lm_eval.sh, opencompass/examples) and Nie et al.,
2502.09992, Tables 1 and 2; DreamLM/Dream (eval, eval_instruct) and Ye et al., 2508.15487; JetAstra/SDAR (README);
inclusionAI/LLaDA2.0-mini (model card); Yang et al., 2505.15809 (MMaDA) and Gen-Verse/MMaDA (evaluation/eval.md);
google/diffusiongemma-26B-A4B-it (model card of June 2026).
"""

import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sinklens.utils.estimates import Estimate, proportion


@dataclass(frozen=True)
class Published:
    """A score that somebody else reported.

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
        """The score with its limits, as of a number of right answers, rounded; None without a score or that number."""
        if self.score is None or self.samples is None:
            return None
        return proportion(round(self.score * self.samples), self.samples)

    def of(self, model: str) -> bool:
        """Whether `model`, a hub name or a folder, is this checkpoint."""
        return is_checkpoint(model, self.model)


def is_checkpoint(model: str, name: str) -> bool:
    """Whether `model`, a hub name or a folder, is the checkpoint called `name`: the last parts are equal."""
    return model.rstrip("/").split("/")[-1] == name.split("/")[-1]


@dataclass(frozen=True)
class HarnessProtocol:
    """A task of lm-evaluation-harness with the settings of a published score.

    Attributes:
        name: the protocol's name.
        tasks: the harness's name of the task; "" if the score was measured with another harness alone.
        settings: arguments of `SinklensLM`: sampler settings, or those of likelihoods.
        published: the scores.
        shots: examples in the prompt; None for the task's default.
        chat_template: apply the tokenizer's chat template.
        unstated: what the sources leave open, or state but this package cannot repeat.
    """

    name: str
    tasks: str
    settings: Mapping[str, Any]
    published: tuple[Published, ...]
    shots: int | None = None
    chat_template: bool = False
    unstated: tuple[str, ...] = field(default=())

    @property
    def likelihood(self) -> bool:
        """Whether the task scores given answers."""
        return "mc_num" in self.settings

    def command(self) -> str:
        """The call that repeats the score; "" without a task of the harness."""
        if not self.tasks:
            return ""
        given = {"pretrained": self.published[0].model, **self.settings}
        call = ["python", "-m", "sinklens.evaluation.harness", "--model", "sinklens", "--tasks", self.tasks]
        call += [] if self.shots is None else ["--num_fewshot", str(self.shots)]
        call += ["--apply_chat_template"] * self.chat_template
        call += ["--model_args", ",".join(f"{name}={value}" for name, value in given.items())]
        return shlex.join(call)


STUDY = "Rulli et al., 2510.15731, Table 1"
"""The source of the study's scores. It calls its checkpoints "instruct" without naming them; the protocols name the
published instruct checkpoint of each model."""
LISTED = tomllib.loads(Path(__file__).with_name("protocols.toml").read_text(encoding="utf-8"))


def as_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a protocol, from an entry of protocols.toml."""
    scores = tuple(Published(**{"score": None} | one) for one in entry.get("published", ()))
    return {**entry, "published": scores, "unstated": tuple(entry.get("unstated", ()))}


HARNESS_PROTOCOLS = {entry["name"]: HarnessProtocol(**as_fields(entry)) for entry in LISTED["harness"]}
