"""What a run of the lab is: everything that decides its canvas, read from a request and written to its record.

The arguments that a run of the lab shares with `sinklens.generate` are checked by the types declared there.

A `RunSpec` contains the specification of the run that it replays, so it can be repeated and printed as Python
even after that run was removed.

A record is read with the checks of a request, since anyone who can write to the folder of ``--keep`` can forge one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sinklens.errors import SettingError
from sinklens.families import SAMPLERS
from sinklens.families.registry import find_sampler
from sinklens.live.chips import Expression, expressions, is_index, read_chips
from sinklens.live.problems import SHIPPED
from sinklens.live.refusal import Refused, require
from sinklens.runs import generate
from sinklens.sampling import as_policy
from sinklens.utils.arguments import arguments

MOST_CHARACTERS = 20_000  # of a prompt
MOST_SETTING = 1_000_000
MOST_REPLAYS = 32  # runs in a chain in which each replays the next
RUN = arguments(generate)
OF_RUN = ("seed", "chat_template", "cache")  # arguments of a run that the form has; prompt, hooks and replay are built
FIELDS = (
    "model", "prompt", "ids", "problem", "settings", "sampler", *OF_RUN, "chips", "replay", "compare_to",
)  # fmt: skip


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides a run.

    Attributes:
        model: name of the model in the lab; of a request, "" for the first.
        prompt: the text, or token ids; of a request, "" if `task` names it.
        task: task and index of the problem that the prompt comes from.
        settings: sampler settings that were given.
        sampler: another sampler than the family's.
        seed, cache: as in `sinklens.generate`; a cache policy by name.
        chat_template: whether the tokenizer's chat template is applied.
        chips: see chips.py.
        replay: id of the run whose canvases are forced.
        replayed: its specification.
        compare_to: id of the run that the page shows beside it; does not change the run.
    """

    model: str
    prompt: str | list[int]
    task: tuple[str, int] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    sampler: str | None = None
    seed: int = RUN["seed"].default
    chat_template: bool = RUN["chat_template"].default
    cache: str | None = RUN["cache"].default
    chips: tuple[dict[str, Any], ...] = ()
    replay: str | None = None
    replayed: "RunSpec | None" = None
    compare_to: str | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of `sinklens.generate` besides prompt, hooks and replay; those with their default left out."""
        changed = {name: getattr(self, name) for name in OF_RUN if getattr(self, name) != RUN[name].default}
        return changed | self.of_sampler

    @property
    def of_sampler(self) -> dict[str, Any]:
        """The sampler's settings that were given, and its name if one is chosen."""
        return dict(self.settings) | ({} if self.sampler is None else {"sampler": self.sampler})

    @property
    def changes(self) -> list[Expression]:
        """The interventions of the run."""
        return expressions(self.chips)

    def to_json(self) -> dict[str, Any]:
        """The specification as JSON."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)} | {
            "task": None if self.task is None else list(self.task),
            "settings": dict(self.settings),
            "chips": list(self.chips),
            "replayed": None if self.replayed is None else self.replayed.to_json(),
        }

    @property
    def replays(self) -> int:
        """Number of runs in the chain of replays below this one."""
        return 0 if self.replayed is None else 1 + self.replayed.replays

    @classmethod
    def from_json(cls, found: Any, depth: int = 0) -> "RunSpec":
        """The specification that `to_json` wrote.

        Args:
            found: the record.
            depth: number of runs that replay this one.

        Raises:
            Refused: it is not one; a record can be damaged or forged.
        """
        names = {entry.name for entry in fields(cls)}
        require(isinstance(found, dict), "the record of a run must be an object.")
        require(set(found) == names, "the record of a run lacks fields, or has others.")
        require(depth <= MOST_REPLAYS, f"a record holds at most {MOST_REPLAYS} replays.")
        prompt, task = found["prompt"], found["task"]
        read = read_request(
            {name: found[name] for name in FIELDS if name in names - {"prompt"}}
            | {"ids" if isinstance(prompt, list) else "prompt": prompt}
        )
        require(read.model != "", "model must be a short text.")
        require((found["replay"] is None) == (found["replayed"] is None), "a replay needs the run that it replays.")
        samplers = list(SAMPLERS.values()) if read.sampler is None else [find_sampler(read.sampler)]
        unknown = set(read.settings).difference(*(one.settings() for one in samplers))
        require(not unknown, f"no such setting: {str(sorted(unknown)[:1])[1:-1]:.40}.")
        return replace(
            read,
            task=None if task is None else _task(task),
            replayed=None if found["replayed"] is None else cls.from_json(found["replayed"], depth + 1),
        )


def read_request(body: Any) -> RunSpec:
    """The body of POST /api/runs, checked as far as that is possible without models and other runs.

    Its prompt is "" if a problem names it; ``replayed`` is not filled in.

    Raises:
        Refused: it is malformed, or too large.
    """
    require(isinstance(body, dict), f"the request must be a JSON object; got {type(body).__name__}.")
    unknown = sorted(set(body) - set(FIELDS))
    require(not unknown, f"unknown field {str(unknown[:1])[1:-1]:.40}; a run has {', '.join(FIELDS)}.")
    template = body.get("chat_template") or False
    require(
        template is True or template is False,
        "chat_template must be true or false: a template is code, and the lab runs no code that comes from the page. "
        "To use another, set tokenizer.chat_template before sinklens.lab(model).",
    )
    settings = body.get("settings") or {}
    require(isinstance(settings, dict), f"settings must be an object; got {type(settings).__name__}.")
    require(
        all(value is None or isinstance(value, str | int | float) for value in settings.values()),
        "a setting must be a number, a word, true, false or null.",
    )
    fixed = [name for name in settings if name in RUN or name == "sampler"]
    require(not fixed, f"{', '.join(fixed[:1])} is a field of the run, not a setting.")
    endless = [name for name, value in settings.items() if isinstance(value, float) and not math.isfinite(value)]
    require(not endless, f"{str(endless[:1])[1:-1]:.40} must be a finite number.")
    large = [name for name, value in settings.items() if isinstance(value, int) and abs(value) > MOST_SETTING]
    require(not large, f"{str(large[:1])[1:-1]:.40} is too large; a setting is at most {MOST_SETTING:,}.")
    task = _problem(body.get("problem"))
    return RunSpec(
        model=_text(body, "model") or "",
        prompt=_prompt(body, task is not None),
        task=task,
        settings=settings,
        sampler=_text(body, "sampler"),
        seed=_of_run("seed", body.get("seed", RUN["seed"].default)),
        chat_template=template,
        cache=_of_run("cache", _text(body, "cache")),
        chips=read_chips(body.get("chips") or []),
        replay=_text(body, "replay"),
        compare_to=_text(body, "compare_to"),
    )


def _of_run(name: str, given: Any) -> Any:
    """An argument of `generate`, checked by its type; a cache policy by its name."""
    try:
        value = RUN[name].read(given)
        if name == "cache":
            as_policy(value)
    except SettingError as error:
        raise Refused(str(error)) from error
    return value


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    require(value is None or (isinstance(value, str) and len(value) <= 200), f"{name} must be a short text or null.")
    return value


def _prompt(body: Mapping[str, Any], of_task: bool) -> str | list[int]:
    text, ids = body.get("prompt"), body.get("ids")
    count = (text is not None) + (ids is not None) + of_task
    require(count == 1, f"give exactly one of prompt, ids and problem; got {count} of them.")
    if ids is not None:
        require(isinstance(ids, list) and bool(ids) and all(map(is_index, ids)), "ids must be a list of token ids.")
        require(len(ids) <= MOST_CHARACTERS, f"a prompt has at most {MOST_CHARACTERS:,} ids; got {len(ids):,}.", 413)
        return ids
    if text is not None:
        require(isinstance(text, str), f"prompt must be text; got {type(text).__name__}.")
        most = f"a prompt has at most {MOST_CHARACTERS:,} characters; got {len(text):,}."
        require(len(text) <= MOST_CHARACTERS, most, 413)
    return text or ""


def _problem(given: Any) -> tuple[str, int] | None:
    if given is None:
        return None
    valid = isinstance(given, dict) and isinstance(given.get("task"), str) and is_index(given.get("index"))
    require(valid, "problem must be {task: name, index: number}.")
    return given["task"], given["index"]


def _task(given: Any) -> tuple[str, int]:
    """Task and index of a record."""
    valid = isinstance(given, list) and len(given) == 2 and given[0] in SHIPPED and is_index(given[1])
    require(valid, "task must be [name, index] of a task of the lab.")
    return given[0], given[1]
