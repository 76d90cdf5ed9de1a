"""The command ``sinklens protocols``: published scores with their settings and sources.

Pitfall: a score without a note on what is unstated can still depend on what its source never mentions, such as the
order of examples or the version of a library.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sinklens.errors import SinklensError, nearest

if TYPE_CHECKING:
    from sinklens.evaluation.published import Published

WIDE = 400  # columns of a table written to a file or a pipe


class Listed(NamedTuple):
    """A protocol as the command lists it."""

    name: str
    task: str
    settings: str
    published: "tuple[Published, ...]"
    source: str
    unstated: tuple[str, ...]
    command: str


def add_protocols(command: argparse.ArgumentParser) -> None:
    """Add the options of ``protocols``."""
    command.add_argument("names", metavar="NAME", nargs="*", help="show these in full (default: list all)")
    command.add_argument("--model", metavar="TEXT", help="only protocols with a score of a model whose name has TEXT")
    command.set_defaults(command=run_protocols)


def run_protocols(options: argparse.Namespace) -> None:
    """`sinklens protocols`."""
    found = {one.name: one for one in _all()}
    for name in options.names:
        if name not in found:
            raise SinklensError(
                f"no protocol is called {name!r}; `sinklens protocols` lists all.{nearest(name, found)}"
            )
    chosen = [found[name] for name in options.names] or list(found.values())
    if options.model is not None:
        chosen = [one for one in chosen if _of_model(one, options.model)]
    if not chosen:
        raise SinklensError(f"no protocol has a published score of a model whose name contains {options.model!r}.")
    if options.names:
        print("\n\n".join("\n".join(_in_full(one)) for one in chosen))
    else:
        _show(chosen)


def _of_model(one: Listed, text: str) -> bool:
    return any(text.lower() in score.model.lower() for score in one.published)


def _all() -> Iterator[Listed]:
    from sinklens.evaluation.protocols import PROTOCOLS
    from sinklens.evaluation.published import HARNESS_PROTOCOLS

    for own in PROTOCOLS.values():
        settings = [f"{sampler}: {_settings(own.of(sampler))}" for sampler in own.settings]
        given = _of_task(own.shots, own.chat_template, own.extractor)
        model = own.published[0].model if own.published else "MODEL"
        command = f"sinklens evaluate {model} --protocol {own.name}"
        yield Listed(own.name, own.task, "; ".join([*settings, *given]), own.published, own.note, own.unstated, command)
    for other in HARNESS_PROTOCOLS.values():
        given = [_settings(other.settings), *_of_task(other.shots, other.chat_template, None)]
        source = "; ".join(dict.fromkeys(score.source for score in other.published))
        task = other.tasks or "with OpenCompass only"
        settings_text = "; ".join(part for part in given if part)
        yield Listed(other.name, task, settings_text, other.published, source, other.unstated, other.command())


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def _of_task(shots: int | None, chat_template: bool, extractor: str | None) -> list[str]:
    found = [] if shots is None else [f"{shots} shots"]
    return found + ["chat template"] * chat_template + ([] if extractor is None else [f"{extractor} extractor"])


def _score(one: "Published") -> str:
    if one.score is None:
        return "no number"
    text = f"{one.score:.4g}" if one.accuracy is None else str(one.accuracy)
    return f"{text}, {one.masked} sinks masked" if one.masked else text


def _in_full(one: Listed) -> list[str]:
    lines = [one.name, f"  task      {one.task}", f"  settings  {one.settings or 'not stated'}"]
    lines += [f"  score     {score.model}: {_score(score)} ({score.source})" for score in one.published]
    lines += [f"  source    {one.source}"]
    lines += [f"  unstated  {text}" for text in one.unstated]
    return [*lines, f"  run       {one.command or 'not available here'}"]


def _show(listed: Sequence[Listed]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("protocol", "published score", "settings", "source", "unstated")
    for one in listed:
        scores = [f"{score.model.split('/')[-1]} {_score(score)}" for score in one.published if not score.masked]
        cells = (one.name, "\n".join(scores), one.settings or "not stated", one.source, "; ".join(one.unstated))
        table.add_row(*map(escape, cells))
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDE).print(table)
    print("sinklens protocols NAME shows one in full, with its command. Brackets: 95 % intervals (Wilson).")
