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
from collections.abc import Mapping
from dataclasses import dataclass, field
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
        return model.rstrip("/").split("/")[-1] == self.model.split("/")[-1]


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
# Accuracy with 0, 1, 5 and 10 sinks masked. The study calls the checkpoints "instruct" without naming them; these are
# the published instruct checkpoints of each model.
_OF_STUDY = {
    "llada-gsm8k": {
        "GSAI-ML/LLaDA-8B-Instruct": (0.76, 0.75, 0.73, 0.55),
        "Gen-Verse/MMaDA-8B-MixCoT": (0.54, 0.53, 0.54, 0.37),
        "meta-llama/Llama-3.1-8B-Instruct": (0.85, 0.02, 0.02, 0.01),
    },
    "dream-gsm8k": {"Dream-org/Dream-v0-Instruct-7B": (0.82, 0.79, 0.78, 0.75)},
    "llada-humaneval": {
        "GSAI-ML/LLaDA-8B-Instruct": (0.37, 0.37, 0.39, 0.35),
        "Gen-Verse/MMaDA-8B-MixCoT": (0.16, 0.16, 0.18, 0.09),
        "meta-llama/Llama-3.1-8B-Instruct": (0.66, 0.00, 0.00, 0.00),
    },
    "dream-humaneval": {"Dream-org/Dream-v0-Instruct-7B": (0.60, 0.64, 0.61, 0.57)},
}


def of_study(protocol: str) -> tuple[Published, ...]:
    """The study's scores under a protocol, for each model and number of masked sinks."""
    samples = 1319 if protocol.endswith("gsm8k") else 164
    return tuple(
        Published(model, score, STUDY, samples, masked)
        for model, scores in _OF_STUDY[protocol].items()
        for masked, score in zip((0, 1, 5, 10), scores, strict=True)
    )


LLADA_BASE, LLADA_INSTRUCT = "GSAI-ML/LLaDA-8B-Base", "GSAI-ML/LLaDA-8B-Instruct"
LLADA_15, LLADA2_MINI = "GSAI-ML/LLaDA-1.5", "inclusionAI/LLaDA2.0-mini"
DREAM_BASE, DREAM_INSTRUCT = "Dream-org/Dream-v0-Base-7B", "Dream-org/Dream-v0-Instruct-7B"
MMADA, SDAR, DIFFUSION_GEMMA = "Gen-Verse/MMaDA-8B", "JetLM/SDAR-8B-Chat", "google/diffusiongemma-26B-A4B-it"
EVAL_MD = "ML-GSAI/LLaDA, EVAL.md"
DREAM_PAPER = "Ye et al., 2508.15487; settings of DreamLM/Dream"
LLADA2_CARD = "model card of LLaDA2.0-mini"
OPEN_COMPASS = "measured with OpenCompass, whose prompt and reading of the answer have no counterpart here"
BOS = "add_bos_token=true has no counterpart: the tokenizer decides"

_TEST_SETS = {"arc_challenge": 1172, "arc_easy": 2376, "hellaswag": 10042, "winogrande": 1267, "piqa": 1838,
              "gpqa_main_n_shot": 448, "mmlu": 14042, "cmmlu": 11582, "ceval-valid": 1346, "race": 1045}  # fmt: skip
"""Samples that the harness scores; truthfulqa_mc2 gives a share for each sample, not a verdict."""


def _llada_base() -> list[HarnessProtocol]:
    """Likelihoods of LLaDA Base: Table 1 without guidance, EVAL.md with it."""
    found = []
    for task, shots, plain, cfg, guided in (
        ("arc_challenge", 0, 0.459, 0.5, 0.479), ("hellaswag", 0, 0.705, 0.5, 0.725),
        ("truthfulqa_mc2", 0, 0.461, 2.0, 0.464), ("winogrande", 5, 0.748, 0.0, 0.748),
        ("piqa", 0, 0.736, 0.5, 0.744), ("gpqa_main_n_shot", 5, 0.252, 0.5, 0.261),
        ("mmlu", 5, 0.659, 0.0, None), ("cmmlu", 5, 0.699, 0.0, None), ("ceval-valid", 5, 0.705, 0.0, None),
    ):  # fmt: skip
        one_token = guided is None  # the answer is a letter, so there is one mask
        draws = {"mc_num": 1, "mc_batch": 1} if one_token else {"mc_num": 128, "mc_batch": 8}
        score = Published(LLADA_BASE, plain, f"{EVAL_MD}; Nie et al., 2502.09992, Table 1", _TEST_SETS.get(task))
        command = () if cfg == 0 else ("mc_num and mc_batch without guidance; these are of the command with it",)
        open_ = (*command, "which of the harness's metrics (acc or acc_norm)")
        found.append(HarnessProtocol(f"llada-base-{task}", task, draws, (score,), shots, unstated=open_))
        if cfg:
            score = Published(LLADA_BASE, guided, f"{EVAL_MD}, with guidance", _TEST_SETS.get(task))
            settings = draws | {"cfg_scale": cfg}
            found.append(
                HarnessProtocol(f"llada-base-{task}-cfg", task, settings, (score,), shots, unstated=open_[-1:])
            )
    return found


def _llada_base_generated() -> list[HarnessProtocol]:
    settings = {"gen_length": 1024, "steps": 1024, "block_length": 1024}
    shots = "shots: the script leaves the harness's default; the paper's table states {}"
    return [
        HarnessProtocol(f"llada-base-{task}", task, settings, (Published(LLADA_BASE, score, EVAL_MD, samples),),
                        unstated=(shots.format(paper),))
        for task, score, samples, paper in (
            ("bbh", 0.497, 6511, 3), ("minerva_math", 0.314, 5000, 4), ("mbpp", 0.400, 500, 4),
        )
    ]  # fmt: skip


def _dream_base() -> list[HarnessProtocol]:
    settings = {"mc_num": 128, "mc_masking": "rate"}
    likelihoods = [
        HarnessProtocol(
            f"dream-base-{task}", task, settings, (Published(DREAM_BASE, score, DREAM_PAPER, _TEST_SETS[task]),),
            shots, unstated=("mc_num: the default of the repository's eval.py", BOS),
        )
        for task, shots, score in (
            ("mmlu", 5, 0.695), ("arc_easy", 0, 0.839), ("arc_challenge", 0, 0.599), ("hellaswag", 0, 0.733),
            ("piqa", 0, 0.758), ("gpqa_main_n_shot", 5, 0.366), ("winogrande", 5, 0.748), ("race", 0, 0.447),
        )
    ]  # fmt: skip
    generated = [
        HarnessProtocol(
            f"dream-base-{task}", task,
            {"gen_length": length, "steps": length, "temperature": temperature, "top_p": 0.95},
            (Published(DREAM_BASE, score, DREAM_PAPER, samples),), shots, unstated=("alg", BOS),
        )
        for task, length, shots, temperature, score, samples in (
            ("gsm8k_cot", 256, 8, 0.0, 0.772, 1319), ("mbpp", 512, 3, 0.2, 0.562, 500),
            ("minerva_math", 512, 4, 0.0, 0.396, 5000), ("bbh", 512, 3, 0.0, 0.579, 6511),
        )
    ]  # fmt: skip
    return likelihoods + generated


def _dream_instruct() -> list[HarnessProtocol]:
    return [
        HarnessProtocol(
            f"dream-{task}", task,
            {"gen_length": length, "steps": length, "temperature": 0.1, "top_p": 0.9, "alg": "entropy"},
            (Published(DREAM_INSTRUCT, score, DREAM_PAPER, samples),), shots, chat_template=True,
        )
        for task, length, shots, score, samples in (
            ("minerva_math", 512, 0, 0.392, 5000), ("mbpp_instruct", 1024, 0, 0.588, 500),
            ("ifeval", 1280, 0, 0.625, 541), ("mmlu_generative", 128, 4, 0.670, 14042),
            ("mmlu_pro", 128, 4, 0.433, 12032),
        )
    ]  # fmt: skip


def _open_compass() -> list[HarnessProtocol]:
    """Scores of LLaDA Instruct and 1.5 on tasks that only OpenCompass runs with these settings: EVAL.md's tables."""
    rows: tuple[tuple[str, str, tuple[tuple[str, float, int, int, dict[str, bool]], ...]], ...] = (
        (LLADA_INSTRUCT, "llada-instruct", (
            ("mmlu", 0.655, 3, 3, {}), ("mmlu-pro", 0.370, 256, 256, {}), ("hellaswag", 0.746, 3, 3, {}),
            ("arc-c", 0.885, 512, 512, {}), ("math", 0.319, 512, 512, {"confidence_eos_eot_inf": True}),
            ("math-blocks", 0.422, 512, 64, {}), ("gpqa", 0.333, 64, 64, {"confidence_eos_eot_inf": True}),
            ("mbpp", 0.410, 256, 256, {"confidence_eos_eot_inf": True}),
        )),
        (LLADA_15, "llada-1.5", (
            ("math", 0.426, 1024, 128, {"confidence_eos_eot_inf": True}), ("gpqa", 0.369, 256, 16, {}),
            ("mbpp", 0.428, 512, 32, {"confidence_eos_eot_inf": True}),
            ("ifeval", 0.662, 256, 16, {"confidence_eos_eot_inf": True}),
        )),
    )  # fmt: skip
    return [
        HarnessProtocol(
            f"{short}-{task}", "", {"gen_length": length, "steps": length, "block_length": block} | flags,
            (Published(model, score, f"{EVAL_MD}, internal toolkit"),), chat_template=True, unstated=(OPEN_COMPASS,),
        )
        for model, short, tasks in rows for task, score, length, block, flags in tasks
    ]  # fmt: skip


def _unstated() -> list[HarnessProtocol]:
    """Scores without the settings they were measured with."""
    card = "model card of DiffusionGemma, as quoted on launch"
    left = ("shots", "lengths", "prompt", "thinking mode", "settings of the sampler")
    return [
        HarnessProtocol("diffusion-gemma-mmlu_pro", "mmlu_pro", {}, (Published(DIFFUSION_GEMMA, 0.776, card, 12032),),
                        chat_template=True, unstated=left),
        HarnessProtocol("diffusion-gemma-gpqa-diamond", "", {}, (Published(DIFFUSION_GEMMA, 0.732, card, 198),),
                        chat_template=True, unstated=left),
        HarnessProtocol("llada2-mbpp", "", {"block_length": 32, "denoising_steps": 32, "temperature": 0.0},
                        (Published(LLADA2_MINI, 0.8150, LLADA2_CARD),), chat_template=True,
                        unstated=("shots", "length", "prompt", "these settings are those the card recommends")),
    ]  # fmt: skip


HARNESS_PROTOCOLS = {
    one.name: one
    for one in (
        *_llada_base(), *_llada_base_generated(), *_dream_base(), *_dream_instruct(), *_open_compass(), *_unstated(),
    )
}  # fmt: skip
