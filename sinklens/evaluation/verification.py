"""Verify a checkpoint: is it what it should be, does sinklens show what it computes, does the study hold for it?

`verify` runs a list of checks. The first ones are about the checkpoint: fingerprint, number of parameters, self-check,
a fixed prompt, accuracy beside the published score. The others are statements of the study (Rulli et al., 2510.15731):
sinks exist, they move over the steps, and masking K of them costs little. Each check states what was expected, what was
found with its interval, and whether they fit. A report is written as JSON and as a Markdown table.

Caveat: with 50 problems an accuracy is known to about 0.13, so a check that passes excludes only large errors. A
statement with an interval that includes both outcomes is open, neither right nor wrong.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sinklens.errors import SelfCheckError, SettingError
from sinklens.evaluation.known_checkpoints import Known, known, protocol_for, scores_of
from sinklens.evaluation.published import Published
from sinklens.evaluation.statistics import Accuracy, Gap, Paired, unpaired_gap
from sinklens.sinks.detectors import EpsilonOverMean
from sinklens.sinks.motion import jumps
from sinklens.sinks.track import SinkTrack

if TYPE_CHECKING:
    from sinklens.model import Model
    from sinklens.runs.result import Generation
    from sinklens.tasks.base import Task

Outcome = Literal["passed", "failed", "open", "recorded"]
PROMPT = "Question: Tom has 5 apples. He buys 7 more. How many apples does Tom have now?\nAnswer:"
MASKED = (1, 5, 10)
LITTLE = 0.05  # accuracy that masking may cost; the study's warning sign for autoregressive-like dependence
MOST_SINKS = 0.04  # the study's ε = 3 leaves at least 96 % of the tokens that are not sinks
STILL = 0.05  # share of pairs of steps at which a static head's sink may change
DESCRIBED = 8  # problems whose sinks are described


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: what is checked.
        outcome: "passed"; "failed"; "open" if the interval allows both; "recorded" if nothing is expected.
        expected: what was expected, and its source.
        found: what was found, in words.
        value, low, high: the number and its 95 % interval; None if there is none. Of masking, the cost: accuracy
            without masking minus accuracy with it, positive if accuracy is lost.
        statement: whether it is a statement of the study, not a property that the checkpoint must have.
    """

    name: str
    outcome: Outcome
    expected: str
    found: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    statement: bool = False


@dataclass(frozen=True)
class Verification:
    """The report on a checkpoint.

    Attributes:
        model, revision, family, dtype, device: of the model.
        versions: of sinklens, torch and transformers.
        protocol: the protocol of the accuracies; `problems` is their number.
        checks: the checks, in order.
        departs: how the runs differ from the protocol.
    """

    model: str
    revision: str | None
    family: str
    dtype: str
    device: str
    versions: Mapping[str, str]
    protocol: str
    problems: int
    checks: tuple[Check, ...]
    departs: tuple[str, ...] = field(default=())

    @property
    def failed(self) -> list[str]:
        """Names of the checks of the checkpoint that failed."""
        return [check.name for check in self.checks if check.outcome == "failed" and not check.statement]

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self) | {"versions": dict(self.versions)}, indent=1, ensure_ascii=False)

    def to_markdown(self) -> str:
        """The report as a Markdown table under a heading."""
        about = f"{self.family}, {self.dtype}, {self.device}; {', '.join(f'{k} {v}' for k, v in self.versions.items())}"
        revision = f" at {self.revision}" if self.revision else ""
        head = "| check | outcome | expected | found (a cost is positive if accuracy is lost) |"
        lines = [f"### {self.model}{revision}", "", about, "", head, "|---|---|---|---|"]
        for check in self.checks:
            cells = (f"*{check.name}*" if check.statement else check.name, check.outcome, check.expected, check.found)
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
        notes = [f"Protocol {self.protocol}, {self.problems} problems. Statements of the study are in italics."]
        notes += [f"The runs depart from the protocol: {'; '.join(self.departs)}."] if self.departs else []
        return "\n".join([*lines, "", *notes, ""])


def verify(
    model: "Model",
    out: str | Path,
    *,
    problems: int = 50,
    data: str | Path | None = None,
    fingerprint: str = "",
    protocol: str = "",
    score: float | int | None = None,
    batch: int = 10,
    settings: Mapping[str, Any] | None = None,
) -> Verification:
    """Run all checks on a model.

    Args:
        model: the model, loaded with ``check=False``, so that a failing self-check is reported.
        out: folder of the runs' records; an interrupted call resumes there.
        problems: number of problems; the first of the test set.
        data: local file or folder of GSM8K; the hub by default. Shipped models use their own word problems, unless
            `protocol` names another task.
        fingerprint: the expected `Model.fingerprint`; by default that of a shipped model.
        protocol: name of the protocol, or of a task; by default a protocol that has a published score of the model.
        score: the accuracy that was published for these settings on all problems of the data, in [0, 1]; by default
            that of the protocol.
        batch: problems per run.
        settings: sampler settings that replace the protocol's; a run that departs is not compared with the score.

    Raises:
        SettingError: an argument is wrong, or `data` is given for word problems, which are not read from a file.
        SinklensError: the problems cannot be read, or `out` holds results of another kind.
    """
    about = known(model.name)
    name = protocol or protocol_for(model.name)
    scores = scores_of(model.name, name)
    if score is not None and not 0 <= score <= 1:
        raise SettingError(f"score is a share of right answers in [0, 1]; got {score}.")
    task = _task(name, data)
    checks = [
        fingerprint_check(model, fingerprint or (about.fingerprint if about else "")),
        parameters_check(model, about),
    ]
    checks.append(checked := self_check(model))
    if checked.outcome == "failed":
        return _report(model, name, 0, checks, ())
    checks.append(prompt_check(model))
    lines, runs = _measured(model, Path(out), name, problems, task, batch, settings or {})
    unmasked = next(line for line in lines if line.masked in (None, 0) and line.condition == "unmasked")
    plain = next((score for score in scores if score.masked == 0), None)
    if score is None:
        checks.append(accuracy_check(unmasked.accuracy, plain, unmasked.departs))
    else:  # it is of these settings, whatever the protocol says
        given = Published(model.name, score, "as given", len(task.samples()))
        checks.append(accuracy_check(unmasked.accuracy, given, ()))
    causal = model.checkpoint.family.causal
    checks += [existence_check([run.sinks for run in runs]), motion_check([run.sinks for run in runs], causal)]
    for line in lines:
        if line.masked and line.against_unmasked is not None:
            masked = next((score for score in scores if score.masked == line.masked), None)
            checks.append(masking_check(line.masked, line.against_unmasked, causal, plain, masked))
    return _report(model, name, unmasked.accuracy.total, checks, unmasked.departs)


def _report(
    model: "Model", protocol: str, problems: int, checks: Sequence[Check], departs: Sequence[str]
) -> Verification:  # fmt: skip
    from sinklens.utils.versions import versions

    return Verification(
        model.name, model.checkpoint.revision, model.family, str(model.cfg.dtype), str(model.cfg.device),
        versions("sinklens", "torch", "transformers"), protocol, problems, tuple(checks), tuple(departs),
    )  # fmt: skip


def _task(protocol: str, data: str | Path | None) -> "Task":
    """The problems of a protocol, read from `data` if they are published ones.

    Raises:
        SettingError: they are not.
    """
    from sinklens.evaluation.protocols import find_protocol
    from sinklens.tasks.registry import reads_files

    chosen = find_protocol(protocol)
    if data is not None and not reads_files(chosen.task):
        raise SettingError(
            f"the problems of {chosen.task} ship with sinklens and are not read from {data}. To measure on GSM8K, name "
            f"its protocol or task, e.g. protocol='gsm8k-cot-zeroshot'; or leave data= out."
        )
    return chosen.make_task(data)


def _measured(
    model: "Model", out: Path, protocol: str, problems: int, task: "Task", batch: int, settings: Mapping[str, Any],
) -> tuple[list[Any], "list[Generation]"]:  # fmt: skip
    """The lines of the evaluation, unmasked and masked, and runs of some of the problems with their sinks."""
    from sinklens.evaluation.conditions import masking
    from sinklens.evaluation.protocols import find_protocol
    from sinklens.evaluation.runner import evaluate
    from sinklens.evaluation.tables import read_lines
    from sinklens.runs import generate
    from sinklens.tasks.prompts import model_input

    chosen = find_protocol(protocol).with_settings(settings)
    evaluate(model, chosen, masking(MASKED), out, task=task, limit=problems, batch=batch)
    found = [line for line in read_lines(out) if line.protocol == chosen.name]
    runs = []
    for sample in list(task.samples(problems))[:DESCRIBED]:
        given: dict[str, Any] = {} if not chosen.chat_template else {"chat_template": True}
        runs.append(generate(model, model_input(sample), progress=False, **given, **chosen.run_settings(model)))
    return found, runs


def fingerprint_check(model: "Model", expected: str) -> Check:
    """Whether the weights, config and tokenizer are the expected ones."""
    found = model.fingerprint
    outcome: Outcome = "recorded" if not expected else "passed" if found == expected else "failed"
    return Check("fingerprint", outcome, expected or "none published", found)


def parameters_check(model: "Model", about: Known | None) -> Check:
    """Whether the number of parameters is the published one, to the digits that its source states."""
    number = sum(value.numel() for value in model.checkpoint.hf.parameters())
    if about is None:
        return Check("parameters", "recorded", "none published", f"{number:,}", float(number))
    fits = abs(number - about.parameters) <= about.rounding
    stated = f"{about.parameters:,}" if not about.rounding else f"{about.parameters / 1e9:.2f} · 10⁹"
    return Check(
        "parameters", "passed" if fits else "failed", f"{stated} ({about.source})", f"{number:,}", float(number)
    )  # fmt: skip


def self_check(model: "Model") -> Check:
    """Whether the hook points show what the model computes."""
    from sinklens.model.selfcheck import check

    try:
        check(model.tree, model.checkpoint.family.causal)
    except SelfCheckError as error:
        return Check("self-check", "failed", "hook points show what the model computes", str(error))
    return Check("self-check", "passed", "hook points show what the model computes", "they do")


def prompt_check(model: "Model") -> Check:
    """Whether two runs of a fixed prompt are the same, decide every position, and record attention that sums up."""
    from sinklens.runs import generate

    prompt = PROMPT if model.tokenizer is not None else [list(range(1, 9))]
    first, second = (generate(model, prompt, seed=0, progress=False) for _ in range(2))
    wrong = []
    if not np.array_equal(first.canvas.numpy(), second.canvas.numpy()):
        wrong.append("two runs with one seed differ")
    if first.answers[0].masks:
        wrong.append(f"{first.answers[0].masks} positions are never decided")
    if (error := sum_error(first)) > 0.01:
        wrong.append(f"sink scores miss the number of queries by {error:.1%}")
    answer = first.answers[0].text
    expected = "two runs are equal, no position stays masked, sink scores sum to the number of queries"
    text = f"{len(first.answers[0].text or '')} characters: {json.dumps((answer or '')[:60], ensure_ascii=False)}"
    return Check("fixed prompt", "failed" if wrong else "passed", expected, "; ".join(wrong) or text)


def sum_error(run: "Generation") -> float:
    """The largest relative difference between the sum of a head's scores and the number of queries that it sums over.

    0 where a step computes only a part of the queries, whose number the track does not hold.
    """
    track = run.sinks
    assert track is not None, "sinks are recorded"
    tree = run.model.tree
    if tree.attention_blocks is not None or tree.architecture.encoder or tree.changes_attention:
        return 0.0
    total = track.scores().sum("pos").to_numpy()
    exists = track.scores().notnull().sum("pos").to_numpy()
    return float(np.nanmax(np.abs(total / np.maximum(exists, 1) - 1)))


def accuracy_check(found: Accuracy, published: Published | None, departs: Sequence[str]) -> Check:
    """Whether the accuracy agrees with the published score, by Newcombe's interval of their difference."""
    low, high = found.interval
    numbers: dict[str, Any] = {"value": found.share, "low": low, "high": high}
    if published is None or published.accuracy is None:
        return Check("accuracy", "recorded", "no published score", str(found), **numbers)
    stated = f"{published.score:.3f} ({published.source})"
    if departs:
        return Check("accuracy", "recorded", f"{stated}; not compared, since the run departs", str(found), **numbers)
    gap = unpaired_gap(published.accuracy, found)
    outcome: Outcome = "failed" if gap.low > 0 or gap.high < 0 else "passed"
    return Check("accuracy", outcome, stated, f"{found}; difference {_interval(gap)}", **numbers)


def existence_check(tracks: Sequence[SinkTrack | None]) -> Check:
    """Whether sinks exist: some positions are sinks by Eq. 3 with ε = 3 in column sums, and few are."""
    shares = []
    for track in tracks:
        assert track is not None, "sinks are recorded"
        exists = track.scores().notnull()
        shares.append(float(track.detect(EpsilonOverMean()).sum() / exists.sum()))
    mean, low, high = mean_interval(shares)
    none, many = high <= 0 or not any(shares), low > MOST_SINKS
    outcome: Outcome = "failed" if none or many else "passed" if low > 0 and high <= MOST_SINKS else "open"
    expected = f"above 0 and at most {MOST_SINKS:.0%} of the positions are sinks (Eq. 3, ε = 3)"
    return Check("sinks exist", outcome, expected, f"{mean:.2%} [{low:.2%}, {high:.2%}]", mean, low, high, True)


def motion_check(tracks: Sequence[SinkTrack | None], causal: bool) -> Check:
    """Whether sinks move: how often the strongest key of a head with a sink changes from one step to the next."""
    shares = []
    for track in tracks:
        assert track is not None, "sinks are recorded"
        moved = jumps(track, track.detect(EpsilonOverMean()))
        pairs = float(moved["pairs"].sum())
        if pairs:
            shares.append(float(moved["changes"].sum()) / pairs)
    expected = (
        f"changes in at most {STILL:.0%} of the steps: an autoregressive model's sinks stay"
        if causal
        else f"changes in more than {STILL:.0%} of the steps: a diffusion model's sinks move"
    ) + " (Figs. 4, 7)"
    if not shares:
        return Check("sinks move", "open", expected, "no head has a sink in two steps in a row", statement=True)
    mean, low, high = mean_interval(shares)
    fits, fails = (high <= STILL, low > STILL) if causal else (low > STILL, high <= STILL)
    outcome: Outcome = "passed" if fits else "failed" if fails else "open"
    return Check("sinks move", outcome, expected, f"{mean:.1%} [{low:.1%}, {high:.1%}]", mean, low, high, True)


def masking_check(
    masked: int, pair: Paired, causal: bool, plain: Published | None, published: Published | None
) -> Check:  # fmt: skip
    """Whether masking K sinks costs what the study says: the published difference, or little.

    The cost is accuracy without masking minus accuracy with it, positive if accuracy is lost. With published accuracies
    of the model, its paired interval has to overlap the interval of their difference. Else the interval of a diffusion
    model must not lie above `LITTLE`, and that of an autoregressive one not below it; the study has no number for 10
    sinks that holds for all models, so nothing is expected of them.
    """
    cost, low, high = 0.0 - pair.difference, 0.0 - pair.high, 0.0 - pair.low
    numbers = {"value": cost, "low": low, "high": high}
    found = f"cost {cost:+.3f} [{low:+.3f}, {high:+.3f}] of {pair.total}, paired"
    name = f"masking {masked} sink{'s' * (masked > 1)}"
    if plain is not None and published is not None and plain.accuracy and published.accuracy:
        gap = unpaired_gap(published.accuracy, plain.accuracy)  # without masking minus with it
        overlap = low <= gap.high and gap.low <= high
        expected = f"cost {_interval(gap)} ({published.source})"
        return Check(name, "passed" if overlap else "failed", expected, found, statement=True, **numbers)
    if masked > 5:
        return Check(name, "recorded", "depends on the model (Table 1)", found, statement=True, **numbers)
    if causal:
        outcome: Outcome = "passed" if low > LITTLE else "failed" if high < LITTLE else "open"
        return Check(
            name, outcome, f"cost above {LITTLE:.2f}: an autoregressive model collapses", found,
            statement=True, **numbers,
        )  # fmt: skip
    outcome = "passed" if high < LITTLE else "failed" if low > LITTLE else "open"
    return Check(name, outcome, f"cost at most {LITTLE:.2f}", found, statement=True, **numbers)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % t interval over prompts; unbounded with fewer than two."""
    from scipy.stats import t

    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return mean, mean - half, mean + half


def _interval(gap: Gap) -> str:
    return f"{gap.difference:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"


__all__ = ["Check", "Verification", "verify"]
