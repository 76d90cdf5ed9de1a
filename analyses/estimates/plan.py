"""Plans of tests: a claim, how it is tested and what would matter, written down before anything is measured.

A plan is a file in YAML or JSON:

    claim: masking digits that are sinks costs more than masking as much attention elsewhere
    model: tiny-dream
    contrast: {mask: sinks, kind: digit, against: same_mass}
    detector: {epsilon: 3}
    measure: cost
    n: 100
    of_interest: 0.1

Everything in it is checked when it is read. `Plan.identity` holds all of it, with hashes of the prompts and answers. It
is stored under its hash before the first run (analyses/tested.py), and a plan that has changed since is refused.

Limitation: a plan does not say what its author had already seen of these prompts.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from sinklens.errors import SettingError, nearest
from sinklens.sinks.strongest import KIND_NAMES, NOT
from sinklens.tasks.prompts import read_answers, read_groups, read_prompts
from sinklens.tasks.word_problems import HELD_OUT_SIZE, held_out, template_of
from sinklens.utils.arguments import Positive, Seed, check_arguments
from sinklens.utils.documents import read_json, read_yaml

REQUIRED = ("claim", "model", "contrast", "n", "of_interest")
TEMPLATE, NO_GROUP = "template", "none"
PARTS: dict[str, dict[str, Any]] = {
    "contrast": {"mask": "sinks", "kind": "any", "against": "same_mass"},
    "detector": {"epsilon": 3.0},
    "expect": {"against": 0.05, "between": 0.1},
}
"""The parts of a plan that have keys of their own, with their defaults."""


@dataclass(frozen=True)
class Plan:
    """A test of one claim: that masking keys changes a measure more than masking control keys does.

    Attributes:
        claim: one plain sentence.
        model: shipped name, hub name or folder.
        mask: the keys of the unchanged run that are masked: "sinks", or "others", all keys that are not sinks.
        kind: of these, only tokens of a kind, such as "digit" or "not digit"; "any" for all.
        against: the control, of `Against`.
        epsilon: a key is a sink if its column sum is more than this above the mean of the others.
        measure: "cost" (right answers lost) or "changed" (answers that change).
        n: number of prompts.
        of_interest: the smallest difference of interest, a share of the prompts.
        group: what prompts share: "template" of the shipped problems, or a key of each line of `prompts`. The claim is
            then about further groups, and groups are compared instead of prompts. "" is the template of shipped
            problems, and none for a file; "none" compares prompts, and is about further prompts of these groups.
        prompts: a file of prompts; "" for the shipped held-out problems.
        seed: seed of the runs and of random keys.
        settings: sampler settings.
        expect: for the power beforehand: ``against``, the share of prompts that change the other way; ``between``, the
            standard deviation of the differences between groups.
    """

    claim: str
    model: str
    n: Annotated[int, Ge(2)]
    of_interest: Positive
    mask: Literal["sinks", "others"] = "sinks"
    kind: str = "any"
    against: Literal["same_mass", "random", "same_kind", "nearest", "nothing"] = "same_mass"
    epsilon: Positive = 3.0
    measure: Literal["cost", "changed"] = "cost"
    group: str = ""
    prompts: str = ""
    seed: Seed = 0
    settings: dict[str, Any] = field(default_factory=dict)
    expect: dict[str, float] = field(default_factory=lambda: dict(PARTS["expect"]))

    def __post_init__(self) -> None:
        check_arguments(self)
        kinds = ("any", *KIND_NAMES)
        if (kind := self.kind.removeprefix(NOT)) not in kinds:
            raise SettingError(f"contrast.kind is {kind!r}; known: {', '.join(kinds)}.{nearest(kind, kinds)}")
        for name, value in self.expect.items():
            if not isinstance(value, int | float):
                raise SettingError(f"expect.{name} is {value!r}; give a number.")
        if self.of_interest >= 1:
            raise SettingError(f"of_interest is {self.of_interest}; it is a share of prompts, such as 0.1.")
        if not self.prompts and self.group not in ("", NO_GROUP, TEMPLATE):
            raise SettingError(f"the shipped problems have the group 'template', or 'none'; got {self.group!r}.")

    def texts(self) -> list[Any]:
        """The first `n` prompts.

        Raises:
            SettingError: there are fewer.
        """
        found = read_prompts(self.prompts) if self.prompts else [one.prompt for one in held_out(HELD_OUT_SIZE)]
        if len(found) < self.n:
            where = self.prompts or "the held-out problems"
            raise SettingError(f"n is {self.n}, and {where} has {len(found)} prompts; give at most that many.")
        return found[: self.n]

    def answers(self) -> dict[str, str]:
        """The expected answers of the file of prompts."""
        return read_answers(self.prompts, self.n) if self.prompts else {}

    def groups(self) -> list[str]:
        """The group of every prompt; empty without groups.

        Raises:
            SettingError: a line has no such key, or there is one group only.
        """
        if self.group == NO_GROUP or (self.prompts and not self.group):
            return []
        if not self.prompts:
            found = [str(template_of(prompt)) for prompt in self.texts()]
            if not self.group and len(set(found)) < 2:
                return []
        else:
            found = read_groups(self.prompts, self.group, self.n)
        if len(set(found)) < 2:
            raise SettingError(f"all prompts are of one group ({found[0]}); leave group out, or give other prompts.")
        return found

    def identity(self) -> dict[str, Any]:
        """Everything that the plan determines, as plain JSON values, with a hash of each prompt."""
        prompts = [hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16] for prompt in self.texts()]
        answers = hashlib.sha256(json.dumps(self.answers(), sort_keys=True).encode()).hexdigest()
        found = {**asdict(self), "prompts": prompts, "answers_sha256": answers, "groups": self.groups()}
        return dict(json.loads(json.dumps(found)))


def read_plan(path: str | Path) -> Plan:
    """Read a plan from a file (.yaml, .yml or .json).

    Raises:
        SettingError: the file cannot be read, or a key or a value (named in the error) is unknown, missing or wrong.
    """
    given = _parsed(Path(path))
    inner = PARTS["contrast"] | PARTS["detector"]
    _known_keys("", given, [*(entry.name for entry in fields(Plan) if entry.name not in inner), *PARTS])
    missing = [name for name in REQUIRED if name not in given]
    if missing:
        raise SettingError(f"{path} has no {', '.join(missing)}; a plan needs {', '.join(REQUIRED)}.")
    parts = {}
    for name, defaults in PARTS.items():
        found = given.get(name, {})
        if not isinstance(found, dict):
            raise SettingError(f"{name} is {found!r}; write keys such as {name}: {json.dumps(defaults)}.")
        _known_keys(f"{name}.", found, list(defaults))
        parts[name] = {**defaults, **found}
    values = {name: value for name, value in given.items() if name not in PARTS}
    values |= parts["contrast"] | parts["detector"] | {"expect": parts["expect"]}
    if isinstance(prompts := values.get("prompts"), str) and prompts:
        values["prompts"] = str(Path(path).parent / prompts)  # an absolute path stays
    return Plan(**values)


def _parsed(path: Path) -> Mapping[str, Any]:
    """What a file holds."""
    if path.suffix not in (".yaml", ".yml", ".json"):
        raise SettingError(f"{path} is not a plan; give a .yaml or .json file.")
    found = read_json(path, SettingError) if path.suffix == ".json" else read_yaml(path, SettingError)
    if not isinstance(found, dict):
        raise SettingError(f"{path} holds no keys; a plan needs {', '.join(REQUIRED)}.")
    return found


def _known_keys(before: str, given: Mapping[str, Any], known: list[str]) -> None:
    for key in given:
        if key not in known:
            listed = ", ".join(dict.fromkeys(known))
            raise SettingError(f"a plan has no {before}{key}; known: {listed}.{nearest(str(key), known)}")
