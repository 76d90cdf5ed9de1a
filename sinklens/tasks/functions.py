"""The templates of `sinklens.tasks.tiny_code`: the names of small functions, and what they compute.

A template gives docstrings and a body of one expression; ``{x}`` and ``{y}`` stand for the parameters and ``{j}`` <
``{k}`` for constants. What the function should compute is written a second time, as a Python function of arguments and
constants (`Template.value`), which provides the expected values of the tests.

Pitfall: no model could distinguish two templates with the same docstring and different bodies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

Takes = Literal["number", "two numbers", "list", "any list", "word"]
Value = int | bool | str | list[int]


@dataclass(frozen=True)
class Template:
    """One small function.

    Attributes:
        takes: the parameters; "list" has at least five numbers, "any list" may be empty.
        names: possible names of the function.
        docs: possible wordings of its docstring.
        body: the expression that is returned.
        value: parameters, then the constants of the body (k, or j and k) -> the value returned.
        constants: smallest and largest constant; None if there are none.
    """

    takes: Takes
    names: tuple[str, ...]
    docs: tuple[str, ...]
    body: str
    value: Callable[..., Value]
    constants: tuple[int, int] | None = None


def _template(takes: Takes, names: str, docs: str, body: str, value: Callable[..., Value], *constants: int) -> Template:
    """A row of the table; `` | `` separates wordings."""
    span = (constants[0], constants[1]) if constants else None
    return Template(takes, tuple(names.split()), tuple(docs.split(" | ")), body, value, span)


_number = partial(_template, "number")
_numbers = partial(_template, "two numbers")
_list = partial(_template, "list")
_any_list = partial(_template, "any list")
_word = partial(_template, "word")

TEMPLATES: dict[str, Template] = {
    # one number and constants
    "add": _number("add plus more", "Add {k} to {x}. | {x} plus {k}.", "{x} + {k}", lambda x, k: k + x, 1, 20),
    "take": _number("take minus lose", "Take {k} from {x}. | {x} minus {k}.", "{x} - {k}", lambda x, k: x - k, 1, 20),
    "times": _number("times scale", "{x} times {k}. | {k} times {x}.", "{x} * {k}", lambda x, k: k * x, 3, 20),
    "share": _number(
        "share each", "Share {x} among {k}. | {x} by {k}.", "{x} // {k}", lambda x, k: divmod(x, k)[0], 3, 12
    ),
    "left": _number("left rest", "The rest of {x} by {k}.", "{x} % {k}", lambda x, k: divmod(x, k)[1], 3, 12),
    "rest-to": _number("to need", "Take {x} from {k}. | {k} minus {x}.", "{k} - {x}", lambda x, k: -(x - k), 1, 20),
    "at-least": _number(
        "low floor", "{x}, at least {k}. | {k} or more: {x}.", "max({x}, {k})", lambda x, k: k if x < k else x, 1, 20
    ),
    "at-most": _number(
        "cap top", "{x}, at most {k}. | {k} or less: {x}.", "min({x}, {k})", lambda x, k: k if x > k else x, 1, 20
    ),
    "above": _number("above over", "Is {x} more than {k}?", "{x} > {k}", lambda x, k: x - k > 0, 1, 20),
    "below": _number("below under", "Is {x} less than {k}?", "{x} < {k}", lambda x, k: x - k < 0, 1, 20),
    "is": _number("same hits", "Is {x} equal to {k}?", "{x} == {k}", lambda x, k: x - k == 0, 1, 20),
    "divides": _number(
        "fits whole", "Is {x} a multiple of {k}?", "{x} % {k} == 0", lambda x, k: divmod(x, k)[1] == 0, 3, 12
    ),
    "distance": _number(
        "far off", "How far {x} is from {k}.", "abs({x} - {k})", lambda x, k: max(x, k) - min(x, k), 1, 20
    ),
    "add-double": _number(
        "add_double", "Add {k} to {x}, then double it.", "({x} + {k}) * 2", lambda x, k: 2 * x + 2 * k, 1, 20
    ),
    "double-add": _number("double_add", "Double {x}, then add {k}.", "{x} * 2 + {k}", lambda x, k: x + x + k, 1, 20),
    "clamp": _number(
        "clamp hold",
        "{x}, at least {j} and at most {k}.",
        "min(max({x}, {j}), {k})",
        lambda x, j, k: sorted([x, j, k])[1],
        1,
        20,
    ),
    "between": _number(
        "within between", "Is {x} from {j} to {k}?", "{j} <= {x} <= {k}", lambda x, j, k: x in range(j, k + 1), 1, 20
    ),
    "double": _number("double twice", "Double {x}. | Two times {x}.", "{x} * 2", lambda x: x + x),
    "half": _number("half halve", "Half of {x}. | Halve {x}.", "{x} // 2", lambda x: divmod(x, 2)[0]),
    "square": _number("square area", "The square of {x}. | {x} times {x}.", "{x} * {x}", lambda x: x**2),
    "negate": _number("negate minus", "Minus {x}. | Turn the sign of {x}.", "-{x}", lambda x: 0 - x),
    "size": _number("size plain", "{x} without its sign. | The size of {x}.", "abs({x})", lambda x: max(x, -x)),
    "even": _number("even is_even", "Is {x} even?", "{x} % 2 == 0", lambda x: not x & 1),
    "odd": _number("odd is_odd", "Is {x} odd?", "{x} % 2 == 1", lambda x: bool(x & 1)),
    # two numbers
    "sum-of-two": _numbers("add total", "Add {x} and {y}. | {x} plus {y}.", "{x} + {y}", lambda x, y: y + x),
    "difference": _numbers("take minus", "Take {y} from {x}. | {x} minus {y}.", "{x} - {y}", lambda x, y: -(y - x)),
    "product": _numbers("times area", "{x} times {y}.", "{x} * {y}", lambda x, y: y * x),
    "larger": _numbers("larger most", "The larger of {x} and {y}.", "max({x}, {y})", lambda x, y: sorted([x, y])[1]),
    "smaller": _numbers(
        "smaller least", "The smaller of {x} and {y}.", "min({x}, {y})", lambda x, y: sorted([x, y])[0]
    ),
    "gap": _numbers(
        "gap far",
        "How far {x} is from {y}. | The gap of {x} and {y}.",
        "abs({x} - {y})",
        lambda x, y: max(x, y) - min(x, y),
    ),
    "more-than": _numbers("above more", "Is {x} more than {y}?", "{x} > {y}", lambda x, y: x - y > 0),
    "equal": _numbers("equal same", "Is {x} equal to {y}?", "{x} == {y}", lambda x, y: x - y == 0),
    "middle": _numbers(
        "middle mean", "The middle of {x} and {y}.", "({x} + {y}) // 2", lambda x, y: divmod(x + y, 2)[0]
    ),
    "sum-and": _numbers(
        "add_all total", "Add {x}, {y} and {k}.", "{x} + {y} + {k}", lambda x, y, k: sum([k, x, y]), 1, 20
    ),
    # lists of five numbers or more
    "first": _list("first head", "The first of {x}.", "{x}[0]", lambda x: next(iter(x))),
    "last": _list("last tail", "The last of {x}.", "{x}[-1]", lambda x: x[len(x) - 1]),
    "second": _list("second next", "The second of {x}.", "{x}[1]", lambda x: x[1:][0]),
    "item": _list("item get", "Item {k} of {x}, from 0.", "{x}[{k}]", lambda x, k: x[k:][0], 2, 4),
    "greatest": _list("greatest top", "The greatest of {x}.", "max({x})", lambda x: sorted(x)[-1]),
    "least": _list("least low", "The least of {x}.", "min({x})", lambda x: sorted(x)[0]),
    "spread": _list(
        "spread span",
        "The greatest of {x} minus the least.",
        "max({x}) - min({x})",
        lambda x: sorted(x)[-1] - sorted(x)[0],
    ),
    "ends": _list("ends sides", "Add the first and last of {x}.", "{x}[0] + {x}[-1]", lambda x: x[0] + x[len(x) - 1]),
    # any lists
    "length": _any_list("count size", "How many {x} there are.", "len({x})", lambda x: sum(1 for _ in x)),
    "total": _any_list("total add_all", "The sum of {x}. | Add all {x}.", "sum({x})", lambda x: sum([*x, 0])),
    "backwards": _any_list(
        "backwards turn", "{x} backwards. | Turn {x} around.", "{x}[::-1]", lambda x: [*reversed(x)]
    ),
    "sorted": _any_list(
        "sort order", "{x} in order. | Sort {x}.", "sorted({x})", lambda x: sorted(x, reverse=True)[::-1]
    ),
    "but-first": _any_list(
        "rest others", "All {x} but the first.", "{x}[1:]", lambda x: [n for i, n in enumerate(x) if i]
    ),
    "but-last": _any_list(
        "front others", "All {x} but the last.", "{x}[:-1]", lambda x: [*reversed([*reversed(x)][1:])]
    ),
    "first-few": _any_list(
        "start front", "The first {k} of {x}.", "{x}[:{k}]", lambda x, k: [n for i, n in enumerate(x) if i < k], 2, 4
    ),
    "last-few": _any_list(
        "end back", "The last {k} of {x}.", "{x}[-{k}:]", lambda x, k: [*reversed([*reversed(x)][:k])], 2, 4
    ),
    "other": _any_list(
        "other skip", "Each other one of {x}.", "{x}[::2]", lambda x: [n for i, n in enumerate(x) if i % 2 == 0]
    ),
    "times-in": _any_list(
        "count times", "How many times {k} is in {x}.", "{x}.count({k})", lambda x, k: sum(n == k for n in x), 1, 9
    ),
    "has": _any_list("has holds", "Is {k} in {x}?", "{k} in {x}", lambda x, k: any(n == k for n in x), 1, 20),
    "lacks": _any_list("lacks not_in", "Is {k} not in {x}?", "{k} not in {x}", lambda x, k: k not in set(x), 1, 20),
    "empty": _any_list("empty none", "Are there no {x}?", "len({x}) == 0", lambda x: x == []),
    "any": _any_list("any some", "Are there any {x}?", "len({x}) > 0", lambda x: x != []),
    "with": _any_list("put join", "{x} with {k} at the end.", "{x} + [{k}]", lambda x, k: [*x, k], 1, 9),
    "before": _any_list("put lead", "{x} with {k} at the start.", "[{k}] + {x}", lambda x, k: [k, *x], 1, 9),
    "kinds": _any_list("kinds sorts", "How many kinds of {x}.", "len(set({x}))", lambda x: len(dict.fromkeys(x))),
    "again": _any_list("again twice", "{x} two times.", "{x} * 2", lambda x: [*x, *x]),
    # words
    "repeat": _word("repeat again", "Repeat {x} {k} times.", "{x} * {k}", lambda x, k: "".join([x] * k), 2, 12),
    "letters": _word("letters size", "How many letters {x} has.", "len({x})", lambda x: sum(1 for _ in x)),
    "mirror": _word("mirror turn", "Turn {x} around.", "{x}[::-1]", lambda x: "".join(reversed(x))),
    "initial": _word("initial first", "The first letter of {x}.", "{x}[0]", lambda x: next(iter(x))),
    "loud": _word("loud shout", "{x} in big letters.", "{x}.upper()", str.upper),
    "low": _word("low small", "{x} in small letters.", "{x}.lower()", str.lower),
    "call": _word("call cry", "{x} with ! at the end.", '{x} + "!"', lambda x: f"{x}!"),
}
