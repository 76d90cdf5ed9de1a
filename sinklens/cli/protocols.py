"""The command ``sinklens protocols``: published scores with their settings and sources.

Pitfall: a score without a note on what is unstated can still depend on what its source never mentions, such as the
order of examples or the version of a library.
"""

from typing import TYPE_CHECKING, Any

from sinklens.cli.options import Names
from sinklens.errors import SinklensError, nearest

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
    unknown = next((name for name in names if name not in found), None)
    if unknown is not None:
        raise SinklensError(
            f"no protocol is called {unknown!r}; `sinklens protocols` lists all.{nearest(unknown, found)}"
        )
    chosen = [one for name, one in found.items() if name in names or not names]
    if model is not None:
        chosen = [one for one in chosen if any(model.lower() in score.model.lower() for score in one.published)]
    if not chosen:
        raise SinklensError(f"no protocol has a published score of a model whose name contains {model!r}.")
    print("\n\n".join("\n".join(_in_full(one)) for one in chosen))
    print("\nBrackets: 95 % intervals (Wilson).")


def _in_full(one: Any) -> list[str]:
    from sinklens.evaluation.protocols import EvalProtocol

    own = isinstance(one, EvalProtocol)
    model = one.published[0].model if one.published else "MODEL"
    command = f"sinklens evaluate {model} --protocol {one.name}" if own else one.command() or "not available here"
    lines = [one.name, f"  task      {(one.task if own else one.tasks) or 'with OpenCompass only'}"]
    lines += [f"  settings  {_settings(one)}"]
    lines += [f"  score     {score.model}: {_score(score)} ({score.source})" for score in one.published]
    lines += [f"  source    {_source(one)}"]
    lines += [f"  unstated  {text}" for text in one.unstated]
    return [*lines, f"  run       {command}"]


def _settings(one: Any) -> str:
    """The settings on one line; our protocols have some for each sampler."""
    from sinklens.evaluation.protocols import EvalProtocol

    own = isinstance(one, EvalProtocol)
    groups = {f"{sampler}: ": one.of(sampler) for sampler in one.settings} if own else {"": one.settings}
    parts = [before + ", ".join(f"{name} {value}" for name, value in given.items()) for before, given in groups.items()]
    parts += [] if one.shots is None else [f"{one.shots} shots"]
    parts += ["chat template"] * one.chat_template
    parts += [f"{one.extractor} extractor"] if own and one.extractor else []
    return "; ".join(filter(None, parts)) or "not stated"


def _source(one: Any) -> str:
    from sinklens.evaluation.protocols import EvalProtocol

    return one.note if isinstance(one, EvalProtocol) else "; ".join(dict.fromkeys(s.source for s in one.published))


def _score(one: "Published") -> str:
    if one.score is None:
        return "no number"
    text = f"{one.score:.4g}" if one.accuracy is None else str(one.accuracy)
    return f"{text}, {one.masked} sinks masked" if one.masked else text
