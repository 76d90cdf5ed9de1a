"""Arguments declared once: the name, type, range, default and meaning of each, read from a signature and its docstring.

    @dataclass(frozen=True)
    class Window:
        \"\"\"Positions that a head sees.

        Attributes:
            width: number of positions.
            share: share of them that stays; None keeps all.
        \"\"\"

        width: Count = 8
        share: Share | None = None

        def __post_init__(self) -> None:
            check_arguments(self)             # Window(width=0): "width must be an integer of at least 1; got 0."

`arguments` reads the declaration of a class or a function. The command line, the lab's form and the checks are derived
from it. Ranges are written as for pydantic and hypothesis, with
`annotated_types` in `Annotated`.

The decorator `checked` checks the arguments of a public function in the same way, before it runs.

Where a `Sequence` is declared, a single value counts as a list of one. Where an array is declared, whatever NumPy reads
as one, such as a list or a tensor, is left to the code that uses it. Values are described in errors by `Words`, or by
the `ARGUMENT` of a class.

Limitation: values are checked against None, bool, int, float, str, `Literal`, classes, lists and unions of these, dicts
and functions. Any other type, such as a protocol or one marked `Unread`, accepts every value, and so does a quoted name
that is imported only for type checking and that `sinklens` does not export; the code that uses the value checks it.
"""

import builtins
import functools
import inspect
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from sinklens.errors import SettingError
from sinklens.utils.integers import MOST_SEED, as_integer

LIMITS = {  # mark of a range -> its attribute, the comparison and the words
    Ge: ("ge", operator.ge, "of at least"),
    Gt: ("gt", operator.gt, "above"),
    Le: ("le", operator.le, "of at most"),
    Lt: ("lt", operator.lt, "below"),
}
REQUIRED = inspect.Parameter.empty  # the default of an argument without one
REFUSED = object()
UNIONS = (Union, types.UnionType)
KNOWN: dict[Any, list[str]] = {
    types.NoneType: ["None"], bool: ["True", "False"], str: ["a text"], Path: ["a path"], Callable: ["a function"],
    Mapping: ["a dict"], dict: ["a dict"],
}  # fmt: skip
MANY = {int: "integers, such as [0, 2] or range(3)", str: "texts", float: "numbers"}
REAL = float | int  # type checkers take an int for a float, and checks at run time do not
LISTS: tuple[Any, ...] = (Sequence, list, tuple)
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
SECTION = re.compile(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n(?= ))*)", flags=re.MULTILINE)
ENTRY = re.compile(r"^ {4}([*\w]+(?:, [*\w]+)*): ((?:.*(?:\n {5,}.*)*))", flags=re.MULTILINE)


@dataclass(frozen=True)
class Words:
    """How an error describes the values of a type; in `Annotated`, where the type alone says too little.

    Attributes:
        text: completes "must be".
    """

    text: str


class Unread:
    """In `Annotated`, marks a type whose values are checked where they are used."""


Count = Annotated[int, Ge(1)]
Number = Annotated[float | int, Words("a finite number")]
Share = Annotated[float | int, Ge(0), Le(1), Words("a number from 0 to 1")]
Positive = Annotated[float | int, Gt(0)]
NonNegative = Annotated[float | int, Ge(0)]
Seed = Annotated[int, Ge(0), Le(MOST_SEED), Words("an integer from 0 to 2**63 - 1")]


@dataclass(frozen=True)
class Argument:
    """One argument.

    Attributes:
        name: its name.
        annotation: its type as declared, with ranges and None.
        default: its default, or `REQUIRED`.
        meaning: its entry in the docstring, on one line.
    """

    name: str
    annotation: Any
    default: Any = REQUIRED
    meaning: str = ""

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types in its union without None, each with its range."""
        return tuple(kind for kind in _union(self.annotation) if kind is not types.NoneType)

    @property
    def type(self) -> Any:
        """The first type of its union, without its range: int, float, bool, str, a `Literal`, or another."""
        return _bare(self.kinds[0])

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values of a `Literal`; empty for another type."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    def read(self, given: Any) -> Any:
        """`given`, checked; an integer of any type, e.g. NumPy's, as Python's.

        Raises:
            SettingError: it has another type or is out of range.
        """
        return read_as(self.annotation, self.name, given)


def read_as(annotation: Any, name: str, given: Any) -> Any:
    """`given` as a value of a type, with its range.

    >>> read_as(Count, "width", 3)
    3

    Raises:
        SettingError: it has another type or is out of range; the message begins with `name`.
    """
    kinds = _union(annotation)
    for kind in kinds:
        if (value := _read(kind, given)) is not REFUSED:
            return value
    for kind in [get_args(bare)[0] for bare in map(_bare, kinds) if get_origin(bare) is Sequence]:
        if kind is not Any and (value := _read(kind, given)) is not REFUSED:
            return (value,)
    *most, last = [words for kind in kinds if not hasattr(kind, "STANDS_FOR") for words in _described(kind)]
    allowed = f"{', '.join(most)} or {last}" if most else last
    shown = f"{given!r:.80}{'…' * (len(repr(given)) > 80)}"
    raise SettingError(
        f"{name} must be {allowed}; got {type(given).__name__ if chr(10) in shown else shown}.{_held(kinds, given)}"
    )


def checked(function: FunctionT) -> FunctionT:
    """A function that reads each argument as a value of its declared type, with `read_as`; it is `plainly_shown`."""

    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind_partial(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises it again, with the name of the function
        declared = arguments(function)
        for name in [name for name in bound.arguments if name in declared]:
            bound.arguments[name] = declared[name].read(bound.arguments[name])
        return function(*bound.args, **bound.kwargs)

    return plainly_shown(call)  # type: ignore[return-value]


def plainly_shown(function: FunctionT) -> FunctionT:
    """A function or dataclass whose signature in ``help()`` and in editors has types without ranges and words."""
    code: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    signature = inspect.signature(code)
    shown = [one.replace(annotation=_plain(one.annotation)) for one in signature.parameters.values()]
    code.__signature__ = signature.replace(parameters=shown)
    return function


@cache
def arguments(declared: Callable[..., Any]) -> dict[str, Argument]:
    """The arguments of a class or a function by name, in order; ``**settings`` is not among them.

    The meaning comes from the docstring, for a class also from those of its bases.
    """
    described: dict[str, str] = {}
    for one in reversed(inspect.getmro(declared) if isinstance(declared, type) else (declared,)):
        described |= meanings(one.__doc__)
    own = inspect.get_annotations(  # not those that are shown
        inspect.unwrap(declared.__init__ if isinstance(declared, type) else declared)  # type: ignore[misc]
    )
    return {
        name: Argument(
            name, _resolved(own.get(name, entry.annotation), declared), entry.default, described.get(name, "")
        )
        for name, entry in inspect.signature(declared).parameters.items()
        if entry.kind not in (entry.VAR_KEYWORD, entry.VAR_POSITIONAL)
    }


def as_tuple(given: Any) -> tuple[Any, ...]:
    """One value or several, as a tuple; a text is one value."""
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def check_arguments(record: Any) -> None:
    """Check every argument of an object, which keeps each under its name, by the declared type.

    Call it at the end of ``__init__``, or in ``__post_init__`` of a dataclass, which may be frozen.

    Raises:
        SettingError: a value has another type or is out of range.
    """
    declared: Callable[..., Any] = type(record)
    for argument in arguments(declared).values():
        given = getattr(record, argument.name)
        if (value := argument.read(given)) is not given:
            object.__setattr__(record, argument.name, value)


def meanings(docstring: str | None) -> dict[str, str]:
    """The entries under ``Args:`` and ``Attributes:`` of a docstring by name, each on one line."""
    entries = [
        entry for section in SECTION.findall(inspect.cleandoc(docstring or "")) for entry in ENTRY.findall(section)
    ]
    return {name.lstrip("*"): " ".join(text.split()) for names, text in entries for name in names.split(", ")}


class _Names(dict[str, Any]):
    """The names that a quoted annotation may use.

    A name imported only for type checking is looked up in `sinklens`; if it is not there, any value is accepted.
    """

    def __missing__(self, name: str) -> Any:
        return getattr(sys.modules["sinklens"], name, Any)


def _resolved(annotation: Any, declared: Callable[..., Any]) -> Any:
    """An annotation without quotes; any type without an annotation."""
    if not isinstance(annotation, str):
        return Any if annotation is REQUIRED else annotation
    module = sys.modules.get(declared.__module__, builtins)  # a script that runpy ran is there no more
    try:
        return eval(annotation, {}, _Names({**vars(builtins), **vars(module)}))
    except (AttributeError, SyntaxError, TypeError):  # Any has neither attributes nor arguments
        return Any


def _held(kinds: Sequence[Any], given: Any) -> str:
    """A hint that names an attribute of the wrong value that is right, e.g. ``sinks`` of a run given for its track."""
    held = [
        name for name, value in getattr(given, "__dict__", {}).items()
        if any(hasattr(kind, "ARGUMENT") and isinstance(value, kind) for kind in map(_bare, kinds))
    ]  # fmt: skip
    return f" Pass its .{held[0]}." if held else ""


def _read(kind: Any, given: Any) -> Any:
    """`given` as a value of one type of a union, or `REFUSED`."""
    bare = _bare(kind)
    if Unread in getattr(kind, "__metadata__", ()):
        return given
    if get_origin(bare) in LISTS:
        return given if _is_list(given, bare) else REFUSED
    if (origin := get_origin(bare)) in (Mapping, dict, Callable):
        return given if isinstance(given, origin) else REFUSED
    if get_origin(bare) in UNIONS:
        return next((value for one in get_args(bare) if (value := _read(one, given)) is not REFUSED), REFUSED)
    if get_origin(bare) is Literal:
        return given if isinstance(given, str) and given in get_args(bare) else REFUSED
    if bare is int:
        given = as_integer(given)
    if bare in (int, float):
        valid = isinstance(given, Real) and not isinstance(given, bool) and _finite(given)
        return given if valid and all(compare(given, limit) for compare, limit, _ in _limits(kind)) else REFUSED
    if bare is Any or not isinstance(bare, type):
        return given
    bare = getattr(bare, "array_type", bare)  # jaxtyping's; the axes are checked where they are used
    try:
        fits = (
            isinstance(given, bare)
            or issubclass(getattr(type(given), "STANDS_FOR", object), bare)
            or (bare is bool and isinstance(given, np.bool_))
            or (bare is np.ndarray and (isinstance(given, list | tuple) or hasattr(given, "__array__")))
        )
        return given if fits else REFUSED
    except TypeError:  # a type that cannot be checked, such as a protocol
        return given


def _is_list(given: Any, bare: Any) -> bool:
    """Whether a value is a list or an array of one axis, with entries of the declared types, as many as declared."""
    if (
        not isinstance(given, Iterable)
        or isinstance(given, str | bytes | Mapping | Iterator)
        or getattr(given, "ndim", 1) != 1
    ):
        return False
    kinds, entries = get_args(bare), list(given)
    if get_origin(bare) is not tuple or ... in kinds:
        kinds = kinds[:1] * len(entries)
    fits = [_read(kind, one) is not REFUSED for kind, one in zip(kinds, entries, strict=False)]
    return all(fits) and len(kinds) == len(entries)


def _finite(given: Any) -> bool:
    try:
        return math.isfinite(given)
    except OverflowError:  # an integer that no float can hold
        return False


def _limits(kind: Any) -> list[tuple[Callable[[Any, Any], bool], Any, str]]:
    """The limits of a type: the comparison, the number and the words."""
    found = [(LIMITS[type(mark)], mark) for mark in getattr(kind, "__metadata__", ()) if type(mark) in LIMITS]
    return [(compare, getattr(mark, attribute), words) for (attribute, compare, words), mark in found]


def _described(kind: Any) -> list[str]:
    """A type and its range in words, as alternatives."""
    bare = _bare(kind)
    words = [mark.text for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, Words)]
    if words:
        return words
    if get_origin(bare) is Literal:
        return [f"one of {', '.join(map(str, get_args(bare)))}"]
    if bare in (int, float):
        limits = " and ".join(f"{words} {limit}" for _, limit, words in _limits(kind))
        return [f"{'an integer' if bare is int else 'a finite number'} {limits}".rstrip()]
    if get_origin(bare) in LISTS:
        return [f"a list of {MANY.get(one := _bare(get_args(bare)[0]), getattr(one, '__name__', 'values'))}"]
    if hasattr(bare, "array_type"):
        return [f"{'an array' if bare.array_type is np.ndarray else 'a tensor'} [{', '.join(bare.dim_str.split())}]"]
    name = getattr(bare, "__name__", str(bare))
    own = getattr(bare, "ARGUMENT", f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")
    return KNOWN.get(get_origin(bare) or bare, [own])


def _plain(annotation: Any) -> Any:
    """A type without ranges and words, at any depth."""
    origin: Any = get_origin(annotation)
    parts = tuple(map(_plain, get_args(annotation)))
    if origin is Annotated:
        return parts[0]
    if origin in UNIONS:
        return functools.reduce(operator.or_, parts)
    return origin[parts] if isinstance(annotation, types.GenericAlias) else annotation


def _union(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the type alone."""
    return get_args(annotation) if get_origin(annotation) in UNIONS else (annotation,)


def _bare(kind: Any) -> Any:
    """A type without its range; a number of either type is a float."""
    bare = kind.__origin__ if get_origin(kind) is Annotated else kind
    return float if bare == REAL else bare
