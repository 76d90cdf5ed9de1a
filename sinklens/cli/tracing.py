"""The commands trace and verify.

Pitfall: ``verify`` fails only if the checkpoint itself does. A statement of the study that does not hold is a finding
about the model.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from sinklens.cli.options import Integer, LoadingOfRun, Run, fitted
from sinklens.cli.settings import Settings
from sinklens.cli.writing import write_figure
from sinklens.errors import SinklensError, require
from sinklens.utils.atomic import write_file
from sinklens.utils.escaping import say

if TYPE_CHECKING:
    from sinklens.runs.result import Generation


def trace(
    model: str,
    /,
    prompt: str,
    *,
    out: Path = Path("sinklens-trace"),
    settings: Settings | None = None,
    run: Run | None = None,
    loading: LoadingOfRun | None = None,
) -> None:
    """Run a model on a prompt.

    Args:
        model: shipped name, hub name or folder; see `sinklens models`
        prompt: the prompt; @FILE reads it from FILE, and bash needs $'...' for line breaks written as \\n
        out: folder for answer.txt, sinks.nc, sinks.png and report.html
    """
    from rich.console import Console

    from sinklens.model import load
    from sinklens.runs import generate
    from sinklens.utils.folders import check_folder
    from sinklens.views import most_moving_head, report, sink_path, terminal

    asked = _prompt(prompt)
    check_folder(out, "a trace")
    loaded = load(model, **fitted(model, loading, settings))
    found = generate(loaded, asked, **run or {}, **settings or {})
    assert found.sinks is not None
    write_file(out / "answer.txt", f"{found.text}\n")
    found.sinks.save(out / "sinks.nc")
    write_figure(out / "sinks.png", sink_path(found.sinks, *most_moving_head(found.sinks)).figure)
    report(found, out / "report.html")
    terminal.show(loaded, found, Console(highlight=False))
    say("", *(found.text or "").split("\n"), *_remarks(found, asked))
    say(f"Written to {out}/: answer.txt, sinks.nc, sinks.png, report.html.")


def _prompt(given: str) -> str:
    """The prompt of ``--prompt``."""
    file = given.removeprefix("@")
    require(
        file == given or not file.endswith(".jsonl"),
        f"trace reads {file} as one text, and this is JSON Lines; give a text file, or pass token ids to "
        f"sinklens.generate.",
        SinklensError,
    )
    try:
        return given if file == given else Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SinklensError(f"could not read the prompt from {file}: {error}") from error


def _remarks(run: "Generation", prompt: str) -> list[str]:
    """What equal confidences, a prompt, and an answer that is empty, unfinished or without an end token, need said."""
    found = ["The prompt has a backslash and an n; for a line break, write $'...\\n...' in bash."] * ("\\n" in prompt)
    if run.ties is not None and (tied := int(run.ties.sum())):
        found.append(f"{tied} positions were chosen among equal confidences, so their order in time is arbitrary.")
    for answer in run.answers:
        found += ["The answer is empty."] * answer.empty
        found += [f"{answer.masks} positions are still masked at the end."] * bool(answer.masks)
        found += ["No end-of-sequence token was generated; try a larger --gen-length."] * (not answer.ended)
    return found


def verify(
    model: str,
    /,
    *,
    out: Path = Path("sinklens-verify"),
    problems: Integer = 50,
    data: Path | None = None,
    fingerprint: str = "",
    protocol: str = "",
    score: float | None = None,
    batch_size: Integer = 10,
    settings: Settings | None = None,
    loading: LoadingOfRun | None = None,
) -> None:
    """Check a checkpoint that you have, and write a report that can be pasted.

    Args:
        model: shipped name, hub name or folder
        out: folder for report.json, report.md and the records of the runs; rerun to resume
        problems: problems of the accuracies
        data: local file or folder of GSM8K (default: the hub)
        fingerprint: the expected fingerprint (default: of shipped models)
        protocol: another protocol, or a task (default: a protocol with a published score)
        score: accuracy that was published for these settings on all problems (default: the protocol's)
        batch_size: problems at a time
    """
    from sinklens.evaluation.verification import verify as checked
    from sinklens.model import load

    found = checked(
        load(model, **fitted(model, loading, settings), check=False), out / "runs", problems=problems, data=data,
        fingerprint=fingerprint, protocol=protocol, score=score, batch_size=batch_size, settings=settings or {},
    )  # fmt: skip
    write_file(out / "report.json", found.to_json())
    write_file(out / "report.md", found.to_markdown())
    say(*found.to_markdown().split("\n"))
    say(f"Written to {out}/: report.json and report.md, which docs/verified.md collects.")
    require(not found.failed, f"{found.model} failed: {', '.join(found.failed)}.", SinklensError)
