"""Verify a checkpoint: is it what it should be, does sinklens show what it computes, does the study hold for it?

`verify` runs a list of checks. Each states what was expected, what was found with its interval, and whether the two
agree. A report is written as JSON and as a Markdown table. These checks are about the checkpoint:

- *fingerprint*: weights, config and tokenizer are those expected (``--fingerprint``, or those of a shipped model);
  otherwise it is recorded.
- *self-check*: hook points show what the model computes.
- *loss*, *undone damage* and *layers*: no sign of damage (`sinklens.evaluation.soundness`).
- *fixed prompt*: two runs are equal, and no position stays masked.
- *accuracy*: Newcombe's interval of the difference from the published score, or from ``--score``, includes 0, on the
  first 50 problems of GSM8K under a protocol that has a published score; for shipped models, on their own word
  problems.

The others are statements of the study (Rulli et al., 2510.15731), in italics in a report. If one fails, that is a
finding about the model:

- *sinks exist*: above 0 and at most 4 % of the positions are sinks by the study's definition with ε = 3, in column
  sums.
- *sinks move*: the strongest key of a head with a sink changes in more than 5 % of the steps; in an autoregressive
  model, in at most 5 %.
- *masking K sinks*: the interval of the paired cost overlaps that of the model's cost in the study's Table 1; if the
  table has none, masking 1 or 5 costs at most 0.05 (in an autoregressive model, more than 0.05). A cost is accuracy
  without masking minus accuracy with it: positive if accuracy is lost.

The thresholds of 4 %, 5 % and 0.05 are partly the study's and partly ours; a share of positions depends on the length
of the text. An outcome is *open* if the 95 % interval allows both, and *recorded* if nothing is expected.

Limitation: with 50 problems, an accuracy is known to about 0.13, so a check that passes excludes only large errors.
Only the shipped models have fingerprints.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sinklens.errors import SelfCheckError, require
from sinklens.evaluation.conditions import masking
from sinklens.evaluation.protocols import PROTOCOLS, Published, find_protocol, is_checkpoint
from sinklens.evaluation.runner import evaluate
from sinklens.evaluation.soundness import Check, Outcome, damage_checks
from sinklens.evaluation.tables import frame
from sinklens.model import Model, selfcheck
from sinklens.runs import generate
from sinklens.sinks.detectors import EpsilonOverMean
from sinklens.sinks.motion import jumps
from sinklens.sinks.track import SinkTrack
from sinklens.tasks.prompts import model_input
from sinklens.tasks.registry import reads_files
from sinklens.utils.arguments import Share, checked
from sinklens.utils.escaping import in_markdown
from sinklens.utils.estimates import Estimate, student, unpaired
from sinklens.utils.versions import versions

PROMPT = "Question: Tom has 5 apples. He buys 7 more. How many apples does Tom have now?\nAnswer:"
MASKED = (1, 5, 10)
LITTLE = 0.05  # accuracy that masking may cost; the study's warning sign for autoregressive-like dependence
MOST_SINKS = 0.04  # the study's ε = 3 leaves at least 96 % of the tokens that are not sinks
STILL = 0.05  # share of pairs of steps at which a static head's sink may change
DESCRIBED = 8  # problems whose sinks are described


KNOWN: dict[str, tuple[str, int | None]] = {
    "smollm2-135m": ("c9c441cbf1904892", None),
    "smollm2-135m-causal": ("", None),
    "smollm2-135m-masked": ("", None),
    "tiny-canvas": ("e096eff9718515ea", 490),
    "tiny-dream": ("e26870b0cad372aa", 498),
    "tiny-duo": ("f6c9e8d271c6c991", 413),
    "tiny-llada": ("49c30b6a6a6fe0ca", 458),
    "tiny-llada-moe": ("e4559764a2e67e6b", 489),
    "tiny-llada-skills": ("0dcac91da5c74471", 435),
    "tiny-llama": ("a1b2bc2759bf1277", 500),
    "tiny-llama-skills": ("af74d733e9ec23b4", 500),
    "tiny-mdlm": ("b93459020d82773c", 426),
    "tiny-mmada": ("f0d0d6973732d565", 470),
    "tiny-sdar": ("de13e59ab3a71608", 500),
    "tiny-text": ("8f8d7d21f82bb2a8", None),
    "tiny-text-causal": ("454bda7e2aaac03a", None),
    "tiny-two-modes": ("9df3b332d5d12f92", 500),
}
"""Shipped model -> its `Model.fingerprint`, "" where merging an adapter rounds differently on other machines; and how
many held-out word problems it gets right, None if it was not trained on them."""
HELD_OUT = 500
STAND_INS = {"gsm8k": "tiny-gsm", "humaneval": "tiny-code"}
"""Published task -> the task that the shipped models can do."""


def known(model: str) -> tuple[str, int | None]:
    """What is published about `model`, as in `KNOWN`; ("", None) if nothing is."""
    return next((found for name, found in KNOWN.items() if is_checkpoint(model, name)), ("", None))


def ships(model: str) -> bool:
    """Whether `model` is one of `KNOWN`."""
    return any(is_checkpoint(model, name) for name in KNOWN)


def protocol_for(model: str, task: Literal["gsm8k", "humaneval"] = "gsm8k") -> str:
    """The protocol with which to measure `model`.

    A shipped model is measured on its own word problems or functions, any other on the task, with a protocol that has a
    published score of it, or with the study's settings if there is none.
    """
    if ships(model):
        return STAND_INS[task]
    scored = [name for name, protocol in PROTOCOLS.items() if protocol.task.startswith(task)]
    best = max(scored, key=lambda name: len(scores_of(model, name)))  # the first of those with most scores
    return best if scores_of(model, best) else f"llada-{task}"


def scores_of(model: str, protocol: str) -> tuple[Published, ...]:
    """The published scores of `model` under a protocol, with 0, 1, 5 and 10 sinks masked; none under an unknown one."""
    _, right = known(model)
    if protocol == "tiny-gsm" and right is not None:
        return (Published(model, right / HELD_OUT, f"model card of {Path(model).name}", HELD_OUT),)
    listed = PROTOCOLS[protocol].published if protocol in PROTOCOLS else ()
    return tuple(score for score in listed if is_checkpoint(model, score.model) and score.score is not None)


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
    departs: str = ""

    @property
    def failed(self) -> list[str]:
        """Names of the checks of the checkpoint that failed."""
        return [check.name for check in self.checks if check.outcome == "failed" and not check.statement]

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(asdict(self) | {"versions": dict(self.versions)}, indent=1)

    def to_markdown(self) -> str:
        """The report as a Markdown table under a heading."""
        about = f"{self.family}, {self.dtype}, {self.device}; {', '.join(f'{k} {v}' for k, v in self.versions.items())}"
        heading = f"{self.model} at {self.revision}" if self.revision else self.model
        rows = [
            ("check", "outcome", "expected", "found (a cost is positive if accuracy is lost)"), ("---",) * 4,
            *((f"*{one.name}*" if one.statement else one.name, one.outcome, in_markdown(one.expected),
               in_markdown(one.found)) for one in self.checks),
        ]  # fmt: skip
        table = ["| " + " | ".join(row) + " |" for row in rows]
        notes = [f"Protocol {self.protocol}, {self.problems} problems. Statements of the study are in italics."]
        notes += [f"The runs depart from the protocol: {self.departs}."] * bool(self.departs)
        shown = [f"### {in_markdown(heading)}", "", in_markdown(about), "", *table, "", *map(in_markdown, notes), ""]
        return "\n".join(shown)


@checked
def verify(
    model: "Model",
    out: str | Path,
    *,
    problems: int = 50,
    data: str | Path | None = None,
    fingerprint: str = "",
    protocol: str = "",
    score: Share | None = None,
    batch_size: int = 10,
    settings: Mapping[str, Any] | None = None,
) -> Verification:
    """Run all checks on a model.

    Args:
        model: the model, loaded with ``check=False``, so that a failing self-check is reported.
        out: folder of the runs' records; an interrupted call resumes there.
        problems: number of problems, from the beginning of the test set.
        data: local file or folder of GSM8K; the hub by default. Shipped models use their own word problems, unless
            `protocol` names another task.
        fingerprint: the expected `Model.fingerprint`; by default that of a shipped model.
        protocol: name of the protocol, or of a task; by default a protocol that has a published score of the model.
        score: the accuracy that was published for these settings on all problems of the data, in [0, 1]; by default
            that of the protocol.
        batch_size: problems per run.
        settings: sampler settings; a run whose settings differ from the protocol's is not compared with the score.

    Raises:
        SettingError: an argument is wrong, or `data` is given for word problems, which are not read from a file.
        SinklensError: the problems cannot be read, or `out` holds results of another kind.
    """
    chosen = find_protocol(protocol or protocol_for(model.name))
    require(
        data is None or reads_files(chosen.task),
        f"the problems of {chosen.task} ship with sinklens and are not read from {data}. To measure on GSM8K, "
        f"name its protocol or task, e.g. protocol='gsm8k-cot-zeroshot'; or leave data= out.",
    )
    task, scores = chosen.make_task(data), {one.masked: one for one in scores_of(model.name, chosen.name)}
    own = None if score is None else Published(model.name, score, "as given", len(task.samples()))
    stated = own or scores.get(0)  # a given score is of these settings, whatever the protocol says
    checks = [fingerprint_check(model, fingerprint or known(model.name)[0]), self_check(model)]
    number, departs = 0, ""
    if checks[-1].outcome == "passed":
        chosen = chosen.with_settings(settings or {})
        evaluate(model, chosen, masking(MASKED), out, task=task, limit=problems, batch_size=batch_size)
        table = frame(out)
        table = table[table["protocol"] == chosen.name]
        unmasked = table[table["condition"] == "unmasked"].iloc[0]
        number, departs = int(unmasked["total"]), str(unmasked["departs"])
        accuracy = Estimate(unmasked["estimate"], unmasked["low"], unmasked["high"], number)
        checks += [
            *damage_checks(model),
            prompt_check(model),
            accuracy_check(accuracy, stated, departs if score is None else ""),
        ]
        given = {"chat_template": chosen.fitted(model).chat_template is True} | chosen.run_settings(model)
        some = list(task.samples(problems))[:DESCRIBED]
        tracks: list[Any] = [generate(model, model_input(one), progress=False, **given).sinks for one in some]
        causal = model.checkpoint.family.causal
        checks += [existence_check(tracks), motion_check(tracks, causal)]
        for _, row in table[table["against_unmasked_total"] > 0].iterrows():
            value, low, high = (float(row[f"against_unmasked_{name}"]) for name in ("difference", "low", "high"))
            gain, masked = Estimate(value, low, high, number), int(row["masked"])
            checks.append(masking_check(masked, gain, causal, scores.get(0), scores.get(masked)))
    return Verification(
        model.name, model.checkpoint.revision, model.family, str(model.cfg.dtype), str(model.cfg.device),
        versions("sinklens", "torch", "transformers"), chosen.name, number, tuple(checks), departs,
    )  # fmt: skip


def fingerprint_check(model: "Model", expected: str) -> Check:
    """Whether the weights, config and tokenizer are the expected ones."""
    found = model.fingerprint
    outcome: Outcome = "recorded" if not expected else "passed" if found == expected else "failed"
    return Check("fingerprint", outcome, expected or "none published", found)


def self_check(model: "Model") -> Check:
    """Whether the hook points show what the model computes (`sinklens.model.selfcheck`)."""
    expected = "hook points show what the model computes"
    try:
        selfcheck.check(model.tree, model.checkpoint.family.causal)
    except SelfCheckError as error:
        return Check("self-check", "failed", expected, str(error))
    return Check("self-check", "passed", expected, "they do")


def prompt_check(model: "Model") -> Check:
    """Whether two runs of a fixed prompt are the same, and decide every position."""
    prompt = PROMPT if model.tokenizer is not None else [list(range(1, 9))]
    first, second = (generate(model, prompt, seed=0, record_sinks=False, progress=False) for _ in range(2))
    answer = first.answers[0]
    wrong = ["two runs with one seed differ"] * (not first.canvas.equal(second.canvas))
    wrong += [f"{answer.masks} positions are never decided"] * bool(answer.masks)
    text = f"{len(answer.text or '')} characters: {json.dumps((answer.text or '')[:60], ensure_ascii=False)}"
    outcome: Outcome = "failed" if wrong else "passed"
    return Check("fixed prompt", outcome, "two runs are equal, and no position stays masked", "; ".join(wrong) or text)


def accuracy_check(found: Estimate, published: Published | None, departs: str) -> Check:
    """Whether the accuracy agrees with the published score, by Newcombe's interval of their difference."""
    if published is None or published.accuracy is None:
        return Check("accuracy", "recorded", "no published score", str(found), found)
    stated = f"{published.score:.3f} ({published.source})"
    if departs:
        return Check("accuracy", "recorded", f"{stated}; not compared, since the run departs", str(found), found)
    gap = unpaired(published.accuracy, found)
    outcome: Outcome = "failed" if gap.low > 0 or gap.high < 0 else "passed"
    return Check("accuracy", outcome, stated, f"{found}; difference {_interval(gap)}", found)


def existence_check(tracks: Sequence[SinkTrack]) -> Check:
    """Whether sinks exist: some positions are sinks by Eq. 3 with ε = 3 in column sums, and few are."""
    shares = [float(track.detect(EpsilonOverMean()).sum() / track.scores().notnull().sum()) for track in tracks]
    mean = mean_of(shares)
    none, many = mean.high <= 0 or not any(shares), mean.low > MOST_SINKS
    fits = mean.low > 0 and mean.high <= MOST_SINKS
    expected = f"above 0 and at most {MOST_SINKS:.0%} of the positions are sinks (Eq. 3, ε = 3)"
    return _statement("sinks exist", fits, none or many, expected, f"{mean.value:.2%}", mean)


def motion_check(tracks: Sequence[SinkTrack], causal: bool) -> Check:
    """Whether sinks move: how often the strongest key of a head with a sink changes from one step to the next."""
    moved = [jumps(track, track.detect(EpsilonOverMean())) for track in tracks]
    shares = [float(one["changes"].sum() / one["pairs"].sum()) for one in moved if one["pairs"].sum()]
    expected = f"changes in {'at most' if causal else 'more than'} {STILL:.0%} of the steps: "
    expected += "an autoregressive model's sinks stay" if causal else "a diffusion model's sinks move"
    mean = mean_of(shares)
    still, moving = mean.high <= STILL, mean.low > STILL
    fits, fails = (still, moving) if causal else (moving, still)
    text = f"{mean.value:.1%}" if shares else "no head has a sink in two steps in a row"
    return _statement("sinks move", fits, fails, f"{expected} (Figs. 4, 7)", text, mean)


def _statement(name: str, fits: bool, fails: bool, expected: str, text: str, number: Estimate) -> Check:
    if not math.isnan(number.low):
        text += f" [{number.low:.2%}, {number.high:.2%}]"
    outcome: Outcome = "failed" if fails else "passed" if fits else "open"
    return Check(name, outcome, expected, text, number, statement=True)


def masking_check(
    masked: int, gain: Estimate, causal: bool, plain: Published | None, published: Published | None
) -> Check:  # fmt: skip
    """Whether masking K sinks costs what the study says: the published difference, or little.

    The cost is accuracy without masking minus accuracy with it, positive if accuracy is lost. With published accuracies
    of the model, its paired interval has to overlap the interval of their difference. Otherwise the interval of a
    diffusion model must not lie above `LITTLE`, nor that of an autoregressive one below it; the study gives no number
    for 10 sinks that holds for all models, so nothing is expected of them.
    """
    cost = Estimate(0.0 - gain.value, 0.0 - gain.high, 0.0 - gain.low, gain.n, gain.p)
    found, name = f"cost {_interval(cost)} of {cost.n}, paired", f"masking {masked} sink{'s' * (masked > 1)}"
    if plain is not None and published is not None and plain.accuracy and published.accuracy:
        gap = unpaired(published.accuracy, plain.accuracy)  # without masking minus with it
        fits = cost.low <= gap.high and gap.low <= cost.high
        fails, expected = not fits, f"cost {_interval(gap)} ({published.source})"
    elif masked > 5:
        return Check(name, "recorded", "depends on the model (Table 1)", found, cost, statement=True)
    else:
        fits, fails, expected = cost.high < LITTLE, cost.low > LITTLE, f"cost at most {LITTLE:.2f}"
        if causal:
            fits, fails, expected = fails, fits, f"cost above {LITTLE:.2f}: an autoregressive model collapses"
    return Check(name, "passed" if fits else "failed" if fails else "open", expected, found, cost, statement=True)


def mean_of(values: Sequence[float]) -> Estimate:
    """Mean over prompts with Student's limits; NaN without values."""
    if not values:
        return Estimate(math.nan, math.nan, math.nan, 0)
    error = float(np.std(values, ddof=min(1, len(values) - 1)) / math.sqrt(len(values)))
    return student(float(np.mean(values)), error, len(values) - 1, len(values))


def _interval(found: Estimate) -> str:
    return f"{found.value:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"
