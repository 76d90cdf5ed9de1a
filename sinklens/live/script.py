"""A run of the lab as a Python script that repeats it.

The script contains what the run executed: the interventions of chips.py, the settings that were given, and the run that
it replays. Values appear only as literals that Python reads back as the same value, and names only where `RunSpec`
checked them, so nothing that comes from the page or from a kept record is ever executed.

Caveat: a model that was passed to `sinklens.lab` as an object is loaded by its name; where that is not the checkpoint
it came from, edit the script's ``sinklens.load``.
"""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from sinklens.live.refusal import require
from sinklens.live.spec import RunSpec

WIDTH = 100  # characters of a call above which it is spread over lines


def script(runs: Mapping[str, RunSpec], loading: Mapping[str, str]) -> str:
    """The script.

    Args:
        runs: the runs by the names of their variables.
        loading: for each model of the lab, the expression that loads it.

    Raises:
        Refused: a run, or one that it replays, is of a model that the lab lacks.
    """
    writer = _Writer(loading)
    names = [writer.run(spec, name) for name, spec in runs.items()]
    needed = sorted({change.name for spec, _ in writer.runs for change in spec.changes})
    imports = ["import sinklens", *([f"from sinklens.interventions import {', '.join(needed)}"] if needed else [])]
    prompts = [(spec.model, spec.prompt, spec.chat_template) for spec in runs.values()]
    read = [".text" if isinstance(prompt, str) else ".tokens[0].tolist()" for _, prompt, _ in prompts]
    printed = [f"print({name}{of})" for name, of in zip(names, read, strict=True)]
    if len(names) == 2 and prompts[0] == prompts[1]:
        imports.insert(1, "from sinklens.experiments import compare")
        printed.append(f"print(compare({', '.join(names)}))")
    return "\n".join([*imports, "", *writer.lines, "", *printed, ""])


class _Writer:
    """Collects the statements; a run or a model that is needed twice is written once."""

    def __init__(self, loading: Mapping[str, str]) -> None:
        self._loading, self._models = loading, dict[str, str]()
        self.lines: list[str] = []
        self.runs: list[tuple[RunSpec, str]] = []

    def run(self, spec: RunSpec, name: str) -> str:
        """Write a run, after the one that it replays; returns the name of its variable."""
        for written, its_name in self.runs:
            if written == spec:
                return its_name
        replayed = None if spec.replayed is None else self.run(spec.replayed, f"base_of_{name}")
        arguments = [self._model(spec.model), _literal(spec.prompt), *_given(spec)]
        arguments += [_listed([change.source() for change in spec.changes])] if spec.changes else []
        arguments += [] if replayed is None else [f"replay={replayed}"]
        if spec.task is not None:
            self.lines.append(f"# problem {_literal(spec.task[1])} of {_literal(spec.task[0])[1:-1]}")
        self.lines.append(_call(f"{name} = sinklens.generate", arguments))
        self.runs.append((spec, name))
        return name

    def _model(self, model: str) -> str:
        if model not in self._models:
            unknown = f"the script needs the model {model!r:.80}, which this lab lacks; add it with --compare."
            require(model in self._loading, unknown, 404)
            name = "model" if not self._models else f"model_{len(self._models) + 1}"
            self.lines.append(f"{name} = {self._loading[model]}")
            self._models[model] = name
        return self._models[model]


def _given(spec: RunSpec) -> list[str]:
    """The arguments of a run besides prompt, hooks and replay; the seed always."""
    given = {"seed": spec.seed} | spec.given
    return [f"{name}={_literal(value)}" for name, value in given.items() if value is not None]


def _literal(value: Any) -> str:
    """`value` as a Python literal."""
    text = ascii(value)
    assert ast.literal_eval(text) == value
    return text


def _listed(changes: Sequence[str]) -> str:
    """``hooks=`` of a run."""
    short = f"hooks=[{', '.join(changes)}]"
    return short if len(short) <= WIDTH else "hooks=[\n        " + ",\n        ".join(changes) + ",\n    ]"


def _call(function: str, arguments: Sequence[Any]) -> str:
    """A call on one line, or with one argument per line."""
    short = f"{function}({', '.join(arguments)})"
    if len(short) <= WIDTH and "\n" not in short:
        return short
    return f"{function}(\n    " + ",\n    ".join(arguments) + ",\n)"
