"""Units of work: one sample of a task, answered by one model under one condition, becomes one record.

Units run in batches of samples under one condition. A row's answer does not depend on its batch (see
`sinklens.generate`), so neither does a verdict, and units can be grouped into batches and divided among processes
arbitrarily. Equal prompts go into different batches, because one batch would draw different random numbers for each;
so they get equal answers.

Caveat: the seconds of a record are those of its batch divided by the number of rows. They measure throughput, not
latency.
"""

import platform
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from sinklens.errors import PromptError, require
from sinklens.evaluation.conditions import Condition
from sinklens.evaluation.ledger import LedgerRecord
from sinklens.evaluation.protocols import EvalProtocol
from sinklens.evaluation.sink_sums import SinkSums
from sinklens.families.samplers import settings_for
from sinklens.interventions import Intervention
from sinklens.model import Model, load
from sinklens.runs import generate
from sinklens.runs.identity import fingerprint
from sinklens.runs.policies import check_policy
from sinklens.runs.result import Generation
from sinklens.sinks.record import Record
from sinklens.tasks.base import Sample, Task
from sinklens.tasks.prompts import IdSample, Prompts, before_end, model_input, prompt_hash, reference_hash
from sinklens.utils.versions import versions

Unit = TypeVar("Unit")


@dataclass(frozen=True)
class Batch:
    """Units that run together.

    Attributes:
        condition: the condition of all units.
        samples: the samples, one unit each.
    """

    condition: Condition
    samples: tuple[Sample, ...]


def batches(condition: Condition, samples: Sequence[Sample], size: int) -> Iterator[Batch]:
    """Group samples of similar length, keeping equal prompts apart; the order depends only on the samples."""
    ordered = sorted(samples, key=lambda sample: (len(model_input(sample)), sample.id))
    return (Batch(condition, tuple(part)) for part in equals_apart(ordered, model_input, size))


def equals_apart(units: Iterable[Unit], key: Callable[[Unit], Hashable], size: int) -> Iterator[list[Unit]]:
    """`units` in batches of at most `size`, with those of equal `key` in separate batches.

    Within one batch, copies of a prompt would get different random numbers; in separate batches they get the same.
    """
    seen: Counter[Hashable] = Counter()
    rounds: dict[int, list[Unit]] = {}
    for unit in units:
        given = key(unit)
        rounds.setdefault(seen[given], []).append(unit)
        seen[given] += 1
    for part in rounds.values():
        yield from (part[start : start + size] for start in range(0, len(part), size))


@dataclass(frozen=True)
class Job:
    """What runs units; it can be sent to another process if `source` is a name or a folder.

    Attributes:
        source: the model, as `sinklens.load` takes it.
        load: keyword arguments of `sinklens.load`.
        task, protocol, seed, allow_longer: as in `evaluate`.
    """

    source: Any
    load: dict[str, Any]
    task: Task
    protocol: EvalProtocol
    seed: int = 0
    allow_longer: bool = False

    @cached_property
    def model(self) -> "Model":
        """The model, loaded when it is first needed."""
        return load(self.source, **self.load)

    def identities(self, conditions: Sequence[Condition]) -> list[dict[str, Any]]:
        """The identity of each condition's run in a ledger: all that determines a verdict except the data, as JSON.

        Raises:
            SettingError: a cache policy does not fit the model or the protocol's settings.
            PromptError: the task is text and the model has no tokenizer, or the expected token ids have a length that
                the model cannot generate; nothing has been written yet.
        """
        model, task, protocol = self.model, self.task, self.protocol.fitted(self.model)
        settings = settings_for(model, protocol.run_settings(model))
        for condition in conditions:
            if condition.cache is not None:
                check_policy(model, settings, condition.cache)
        given = [one for one in task.samples() if isinstance(one, IdSample)] if isinstance(task, Prompts) else []
        require(
            model.tokenizer is not None or (given and all(sample.ids and sample.expected for sample in given)),
            f"{model.name} has no tokenizer, and the prompts of this task are text. Put a tokenizer's files "
            f"(tokenizer.json, tokenizer_config.json) into its folder, or give prompts and expected answers as "
            f"token ids (--prompts FILE).",
            PromptError,
        )
        for sample in given:
            _check_length(model, sample, settings.gen_length)
        folder = Path(model.name)
        asked = {name: value for name, value in protocol.what.items() if name != "settings"}
        shared = {
            "model": folder.resolve().name if folder.is_dir() else model.name,  # independent of the location
            "family": model.family,
            "sampler": settings.name,
            "revision": model.checkpoint.revision or "",
            "weights": model.fingerprint,
            "dtype": str(model.cfg.dtype).removeprefix("torch."),
            "protocol": {"name": protocol.name} | asked,  # its settings are in the settings
            "task": _task_settings(task),
            "settings": asdict(settings),
            "seed": self.seed,
        }
        return [shared | {"condition": condition.described()} for condition in conditions]

    def carry_out(self, batch: Batch) -> list[LedgerRecord]:
        """Run a batch and return its records, in its order.

        Raises:
            PromptError: a prompt does not fit the model; the message names the samples of the batch.
        """
        started, model, protocol = time.perf_counter(), self.model, self.protocol

        def run_with(hooks: Sequence[Intervention], record: Record) -> "Generation":
            prompts = [token_ids(model, sample, protocol.fitted(model).chat_template) for sample in batch.samples]
            return generate(
                model, prompts, seed=self.seed, hooks=hooks, record_sinks=record, progress=False,
                cache=batch.condition.cache, allow_longer=self.allow_longer, **protocol.run_settings(model),
            )  # fmt: skip

        def unmasked(folder: str) -> Any:
            return run_with((), Record(out=Path(folder) / "unmasked.zarr")).sinks

        sums = SinkSums()
        try:
            with TemporaryDirectory(prefix="sinklens-") as folder:
                run = run_with(batch.condition.hooks_for(partial(unmasked, folder)), Record(reduce=sums))
        except PromptError as error:
            names = [sample.id for sample in batch.samples]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            which = "samples" if len(names) > 1 else "sample"
            raise PromptError(f"{which} {', '.join(names[:3])}{more}: {error}") from error
        sinks = sums.per_head()
        device, processor = model.cfg.device, platform.processor() or platform.machine()
        about = {
            "device": device.type,
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor,
            "versions": versions("sinklens", "torch", "transformers"),
            "seconds": (time.perf_counter() - started) / len(batch.samples),
            "batch": len(batch.samples),
        }
        return [
            _record(self.task, sample, run, row) | about | {"sinks": {"per_head": float(sinks[row])}}
            for row, sample in enumerate(batch.samples)
        ]


def _check_length(model: "Model", sample: IdSample, gen_length: int) -> None:
    """Refuse expected ids whose length no answer can have."""
    length = len(before_end(sample.expected or (), model.eos_token_ids))
    if sample.expected is None or length == gen_length or (length < gen_length and model.eos_token_ids):
        return
    possible = f"at most {gen_length}" if model.eos_token_ids else f"always {gen_length}, without an end token,"
    raise PromptError(
        f"{sample.id} expects {length} tokens, but answers of {model.name} have {possible} (gen_length); change "
        f"--gen-length or the file."
    )


def token_ids(model: "Model", sample: Sample, chat_template: bool | str) -> list[int]:
    """The ids of a prompt, as one user turn (True) or as plain text, followed by the given opening of its answer.

    Raises:
        PromptError: the model has no tokenizer, or no chat template although one is requested.
    """
    if not isinstance(given := model_input(sample), str):
        require(
            chat_template is not True,
            f"{sample.id} consists of token ids, to which a chat template cannot be applied; drop it.",
            PromptError,
        )
        return list(given)
    if chat_template is not True:
        return model.encode(sample.prompt + sample.opening)[0][0].tolist()
    tokenizer: Any = model.tokenizer
    opening = list(tokenizer(sample.opening, add_special_tokens=False).input_ids) if sample.opening else []
    return model.encode(sample.prompt, chat_template=True)[0][0].tolist() + opening


def _task_settings(task: Task) -> dict[str, Any]:
    """A task's settings, without the location of its files."""
    if not is_dataclass(task):
        return {}
    found = {entry.name: getattr(task, entry.name) for entry in fields(task) if entry.name != "path"}
    return {
        name: value if isinstance(value, str | int | float | None) else fingerprint(value)
        for name, value in found.items()
    }


def _record(task: Task, sample: Sample, run: "Generation", row: int) -> LedgerRecord:
    answer = run.answers[row]
    own = torch.nn.functional.pad(run.active[row].cumsum(dim=0), (1, 0))  # steps without those that it waited in
    steps = answer.tokens + answer.ended if run.causal else int(own[-1])
    length = steps if run.causal else run.settings.gen_length  # a finished row waits for its batch
    where = slice(run.prompt_length, run.prompt_length + length)
    text, tokens, keys = answer.text or "", run.tokens[row, where].tolist(), run.control_keys
    picked = {} if keys is None else {
        "control_requested": int(keys.requested[row]), "control_picked": int(keys.picked[row]),
    }  # fmt: skip
    return {
        "sample": sample.id,
        "kind": sample.kind,
        "prompt_sha256": prompt_hash(sample),
        "reference_sha256": reference_hash(sample),
        "tokens": tokens,
        "unmask_step": [step if step < 0 else int(own[step]) for step in run.unmask_step[row, where].tolist()],
        "text": text,
        "verdict": task.judge(sample, text, tokens[: answer.tokens], run.model.eos_token_ids),
        "malformed": task.malformed(sample, text),
        "empty": answer.empty,
        "ended": answer.ended,
        "masks": answer.masks,
        "steps": steps,
    } | picked
