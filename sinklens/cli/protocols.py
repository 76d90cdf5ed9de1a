"""The command ``sinklens protocols``: published scores with their settings and sources.

Pitfall: a score without a note on what is unstated can still depend on what its source never mentions, such as the
order of examples or the version of a library.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sinklens.cli.options import Names
from sinklens.errors import SinklensError, nearest, require
from sinklens.utils.escaping import say

if TYPE_CHECKING:
    from sinklens.evaluation.protocols import Published


def protocols(names: Names = (), /, *, model: str | None = None) -> None:
    """List the protocols.

    Args:
        names: show these (default: all)
        model: only protocols with a score of a model whose name has this text (default: all)
    """
    from sinklens.evaluation.protocols import HARNESS_PROTOCOLS, PROTOCOLS

    found: dict[str, Any] = {**PROTOCOLS, **HARNESS_PROTOCOLS}
    if (unknown := next((name for name in names if name not in found), None)) is not None:
        raise SinklensError(
            f"no protocol is called {unknown!r}; `sinklens protocols` lists all.{nearest(unknown, found)}"
        )
    listed = [one for name, one in found.items() if name in names or not names]
    part = None if model is None else model.lower()
    chosen = [one for one in listed if part is None or any(part in score.model.lower() for score in one.published)]
    require(chosen, f"no protocol has a published score of a model whose name contains {model!r}.", SinklensError)
    say(*(line for one in chosen for line in (*_in_full(one), "")), "Brackets: 95 % intervals (Wilson).")


def _in_full(one: Any) -> list[str]:
    from sinklens.evaluation.protocols import EvalProtocol

    if isinstance(one, EvalProtocol):  # with settings for each sampler
        model = one.published[0].model if one.published else "MODEL"
        command, source = f"sinklens evaluate {model} --protocol {one.name}", one.note
        groups = [f"{sampler}: {_listed(given)}" for sampler, given in one.settings.items()]
        groups += [f"{one.extractor} extractor"] * bool(one.extractor)
    else:
        command = one.command() or "not available here"
        source = "; ".join(dict.fromkeys(score.source for score in one.published))
        groups = [_listed(one.settings)]
    groups += [f"{one.shots} shots"] * (one.shots is not None) + ["chat template"] * bool(one.chat_template)
    return [
        one.name,
        f"  task      {one.task or 'with OpenCompass only'}",
        f"  settings  {'; '.join(filter(None, groups)) or 'not stated'}",
        *(f"  score     {score.model}: {_score(score)} ({score.source})" for score in one.published),
        f"  source    {source}",
        *(f"  unstated  {text}" for text in one.unstated),
        f"  run       {command}",
    ]


def _listed(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in given.items())


def _score(one: "Published") -> str:
    if one.score is None:
        return "no number"
    text = f"{one.score:.4g}" if one.accuracy is None else str(one.accuracy)
    return f"{text}, {one.masked} sinks masked" if one.masked else text
