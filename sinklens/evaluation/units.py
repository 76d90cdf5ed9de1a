"""Units of work: one sample of a task, put to one model under one condition, becomes one record.

Units are carried out in batches of samples that have one condition. A row's answer does not depend on its batch (see
`sinklens.generate`), so neither does a verdict, and batches can be made and divided among processes in any way. Equal
prompts, of which one batch would draw different random numbers for each, go into different batches; so they get equal
answers.

One way this misleads: the seconds of a record are those of its batch, divided by its rows. They tell throughput, not
latency.
"""

import hashlib
import json
import platform
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sinklens.errors import PromptError
from sinklens.evaluation.conditions import Condition
from sinklens.evaluation.ledger import Record
from sinklens.evaluation.protocols import EvalProtocol
from sinklens.interventions import Intervention
from sinklens.sampling import settings_for
from sinklens.sinks.motion import static_share
from sinklens.sinks.track import SinkTrack
from sinklens.tasks import Sample, Task
from sinklens.tasks.prompts import Ids, IdSample, Prompts, before_end
from sinklens.tracing import generate
from sinklens.versions import versions

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation


@dataclass(frozen=True)
class Batch:
    """Units that run together.

    Attributes:
        condition: of all of them.
        samples: one unit each.
    """

    condition: Condition
    samples: tuple[Sample, ...]


def batches(condition: Condition, samples: Sequence[Sample], size: int) -> Iterator[Batch]:
    """Samples in batches of similar length, equal prompts apart; an order that depends on the samples alone."""
    ordered = sorted(samples, key=lambda sample: (len(_asked(sample)), sample.id))
    seen: Counter[str | Ids] = Counter()
    rounds: list[list[Sample]] = []
    for sample in ordered:
        asked = _asked(sample)
        if seen[asked] == len(rounds):
            rounds.append([])
        rounds[seen[asked]].append(sample)
        seen[asked] += 1
    for part in rounds:
        for start in range(0, len(part), size):
            yield Batch(condition, tuple(part[start : start + size]))


def _asked(sample: Sample) -> str | Ids:
    """What the model is given: a text, or token ids."""
    ids = sample.ids if isinstance(sample, IdSample) else None
    return sample.prompt + sample.opening if ids is None else ids


def prompt_hash(sample: Sample) -> str:
    """Of what the model is given; tells two samples of one name apart."""
    asked = _asked(sample)
    return hashlib.sha256((asked if isinstance(asked, str) else json.dumps(asked)).encode()).hexdigest()


def reference_hash(sample: Sample) -> str:
    """Of what the answer is compared with."""
    ids = sample.expected if isinstance(sample, IdSample) else None
    return hashlib.sha256((sample.reference if ids is None else json.dumps(ids)).encode()).hexdigest()


def identity(model: "Model", condition: Condition, task: Task, protocol: EvalProtocol, seed: int) -> dict[str, Any]:
    """Everything that decides a verdict but the data, as plain JSON values: what a ledger's run is told apart by.

    Raises:
        PromptError: the task is text and the model has no tokenizer, or token ids are expected that the model cannot
            answer; nothing has been written yet.
    """
    settings = settings_for(model, protocol.of(model.family_record.sampler))
    given = [sample for sample in task.samples() if isinstance(sample, IdSample)] if isinstance(task, Prompts) else []
    if model.tokenizer is None and not (given and all(sample.ids and sample.expected for sample in given)):
        raise PromptError(
            f"{model.name} has no tokenizer, and the prompts of this task are text. Put the files of one "
            f"(tokenizer.json, tokenizer_config.json) into its folder, or give prompts and expected answers as token "
            f"ids (--prompts FILE)."
        )
    for sample in given:
        _check_length(model, sample, settings.gen_length)
    return {
        "model": Path(model.name).resolve().name if Path(model.name).is_dir() else model.name,  # wherever it lies
        "family": model.family,
        "sampler": model.family_record.sampler,
        "revision": model.checkpoint.revision or "",
        "weights": model.fingerprint,
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "condition": condition.described(),
        "protocol": {"name": protocol.name} | {key: value for key, value in protocol.what.items() if key != "settings"},
        "task": _told(task),
        "settings": asdict(settings),
        "seed": seed,
    }


def _check_length(model: "Model", sample: IdSample, gen_length: int) -> None:
    """Refuse expected ids that no answer of this length can be."""
    length = len(before_end(sample.expected or (), model.eos_token_ids))
    if sample.expected is None or length == gen_length or (length < gen_length and model.eos_token_ids):
        return
    has = f"at most {gen_length}" if model.eos_token_ids else f"no end token, so always {gen_length}"
    raise PromptError(
        f"{sample.id} expects {length} tokens, and an answer of {model.name} has {has} (gen_length); change "
        f"--gen-length, or the file."
    )


def carry_out(model: "Model", task: Task, protocol: EvalProtocol, batch: Batch, seed: int) -> list[Record]:
    """The records of a batch, in its order.

    Raises:
        PromptError: a prompt does not fit the model; names the samples of the batch.
    """
    started = time.perf_counter()

    def run_with(hooks: Sequence[Intervention]) -> "Generation":
        prompts = [token_ids(model, sample, protocol.chat_template) for sample in batch.samples]
        settings: dict[str, Any] = protocol.of(model.family_record.sampler)
        return generate(model, prompts, seed=seed, hooks=hooks, progress=False, **settings)

    def unmasked() -> SinkTrack:
        track = run_with(()).sinks
        assert track is not None, "sinks are recorded unless that is declined"
        return track

    try:
        run = run_with(batch.condition.hooks_for(unmasked))
    except PromptError as error:
        names = [sample.id for sample in batch.samples]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        which = "samples" if len(names) > 1 else "sample"
        raise PromptError(f"{which} {', '.join(names[:3])}{more}: {error}") from error
    sinks = sink_summary(run, [_steps(run, row) for row in range(len(batch.samples))])
    about = {
        "device": model.cfg.device.type,
        "device_name": _device_name(model),
        "versions": versions("sinklens", "torch", "transformers"),
        "seconds": (time.perf_counter() - started) / len(batch.samples),
        "batch": len(batch.samples),
    }
    return [
        _record(task, sample, run, row)
        | about
        | {"sinks": {name: float(values[row]) for name, values in sinks.items()}}
        for row, sample in enumerate(batch.samples)
    ]


def token_ids(model: "Model", sample: Sample, chat_template: bool) -> list[int]:
    """The ids of a prompt as one user turn or as it is, and behind it the beginning that its answer is given.

    Raises:
        PromptError: the model has no tokenizer, or no chat template where one is asked for.
    """
    asked = _asked(sample)
    if not isinstance(asked, str):
        if chat_template:
            raise PromptError(f"{sample.id} is token ids, which a chat template cannot be put around; leave it off.")
        return list(asked)
    if not chat_template:
        return model.encode(sample.prompt + sample.opening)[0][0].tolist()
    ids = model.encode(sample.prompt, chat_template=True)[0][0].tolist()
    assert model.tokenizer is not None, "encode has refused text without one"
    return ids + list(model.tokenizer(sample.opening, add_special_tokens=False).input_ids if sample.opening else [])


def _told(task: Task) -> dict[str, Any]:
    """A task's own settings; where its files lie is none of them."""
    if not is_dataclass(task):
        return {}
    told = {entry.name: getattr(task, entry.name) for entry in fields(task) if entry.name not in ("path", "examples")}
    plain = (str, int, float, type(None))
    return {name: value if isinstance(value, plain) else str(value) for name, value in told.items()}


def _record(task: Task, sample: Sample, run: "Generation", row: int) -> Record:
    answer, steps = run.answers[row], _steps(run, row)
    length = steps if run.model.family_record.causal else run.settings.gen_length  # a finished row waits for its batch
    where = slice(run.prompt_length, run.prompt_length + length)
    text = answer.text or ""
    return {
        "sample": sample.id,
        "kind": sample.kind,
        "chance": sample.chance,
        "prompt_sha256": prompt_hash(sample),
        "reference_sha256": reference_hash(sample),
        "tokens": run.tokens[row, where].tolist(),
        "unmask_step": run.unmask_step[row, where].tolist(),
        "text": text,
        "verdict": task.judge(sample, text, run.tokens[row, where].tolist()[: answer.tokens], run.model.eos_token_ids),
        "empty": answer.empty,
        "ended": answer.ended,
        "masks": answer.masks,
        "steps": steps,
    }


def _steps(run: "Generation", row: int) -> int:
    """Steps that a row took part in: of an autoregressive run, up to its end."""
    answer = run.answers[row]
    return answer.tokens + answer.ended if run.model.family_record.causal else run.steps_run


def sink_summary(run: "Generation", steps: Sequence[int]) -> dict[str, np.ndarray]:
    """A run's sinks in three numbers per row.

    Args:
        steps: per row, the first so many count.

    Returns:
        "per_head": sinks per head and step by the paper's definition (Eq. 3, ε = 3, unit "sum"); "main_score": mean
        over heads and steps of the largest score; "static_share": heads whose strongest key never moves, in [0, 1].
    """
    assert run.sinks is not None
    found: dict[str, list[float]] = {"per_head": [], "main_score": [], "static_share": []}
    for row, count in enumerate(steps):
        own = run.sinks.isel(batch=[row], step=slice(0, count))
        score = own.scores()
        exists = score.notnull().any("pos")
        found["per_head"].append(float(own.detect().sum() / exists.sum()))
        found["main_score"].append(float(score.max("pos").mean()))
        found["static_share"].append(float(static_share(own).mean()))
    return {name: np.array(values) for name, values in found.items()}


def _device_name(model: "Model") -> str:
    if model.cfg.device.type == "cuda":
        import torch

        return torch.cuda.get_device_name(model.cfg.device)
    return platform.processor() or platform.machine()
