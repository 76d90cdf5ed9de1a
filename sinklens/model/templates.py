"""Renders the chat template of a tokenizer, a program in Jinja that came with the checkpoint, within limits.

transformers compiles templates in Jinja's sandbox, which keeps them from Python's objects, but not from running forever
or filling the memory. Here a template may run `MOST_LINES` lines, and no operation, filter or call may make more than
`MOST_VALUES` characters or items, estimated from the sizes of what it is given.

Pitfall: lines are counted with Python's trace function, so a debugger does not stop inside a template.
"""

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from sinklens.errors import PromptError, require

MOST_LINES = 10**6  # published templates run a few hundred
MOST_VALUES = 10**8
WIDTH = re.compile(r"[%:][^%:{}]{0,4}?(\d{7,})")  # in a format, such as "%9999999d" or "{:>9999999}"


def render(tokenizer: Any, turns: list[dict[str, str]], template: Any, name: str, generates: bool = True) -> str:
    """The text of chat turns.

    Args:
        template: None for the tokenizer's.
        name: of the template, for the error.
        generates: whether the text ends with the header of the answer (``add_generation_prompt``).

    Raises:
        PromptError: the template failed, or exceeded a limit.
    """
    left, before = MOST_LINES, sys.gettrace()

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OverflowError(f"it runs more than {MOST_LINES:,} lines")
        return count

    try:
        compiled = _limited(tokenizer.get_chat_template(template))
        sys.settrace(count)
        return str(
            compiled.render(
                messages=turns, tools=None, documents=None, add_generation_prompt=generates,
                **tokenizer.special_tokens_map,
            )
        )  # fmt: skip
    except Exception as error:  # a template is a program, so it can fail in any manner
        raise PromptError(
            f"the chat template{name} failed on a user turn ({type(error).__name__}: {error!s:.300}). Pass another "
            f"template as a string, or leave chat_template (--chat) out."
        ) from error
    finally:
        sys.settrace(before)


@cache
def _limited(template: str) -> Any:
    """The template, compiled in transformers' environment with limits."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    plain = _compile_jinja_template("").environment
    limited = plain.overlay()
    limited.intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(context: Any, name: str, left: Any, right: Any) -> Any:
        _check((left, right), sum if name == "+" else math.prod)
        return plain.binop_table[name](left, right)

    limited.call_binop, limited.call, limited.concat = call_binop, _checked(plain.call), _joined
    limited.filters = {name: _checked(function) for name, function in plain.filters.items()}
    made = limited.from_string(template)
    made.root_render_func.__globals__.update(concat=_joined, str_join=_joined, markup_join=_joined)
    return made


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that checks what it is given; Jinja's marks of what else a filter takes stay."""

    def checked(*given: Any, **named: Any) -> Any:
        _check((*given, *named.values()))
        return function(*given, **named)

    checked.__dict__.update(getattr(function, "__dict__", {}))  # functions of C have none
    return checked


def _joined(parts: Iterable[Any]) -> str:
    found, size = [], 0
    for part in map(str, parts):
        size += len(part)
        if size > MOST_VALUES:
            break
        found.append(part)
    _check((size,))
    return "".join(found)


def _check(given: Iterable[Any], together: Callable[..., Any] = math.prod) -> None:
    """Refuse what would make too many values."""
    require(
        together(map(_size, given)) <= MOST_VALUES,
        f"an operation would make more than {MOST_VALUES:,} characters",
        OverflowError,
    )


def _size(value: Any) -> int:
    """Characters of a text, of those in a list, and of the text of a method; an integer, as a width or a count."""
    value = getattr(inspect.unwrap(value), "__self__", 1) if callable(value) else value
    if isinstance(value, str):
        return max(1, len(value), *(int(width[:20]) for width in WIDTH.findall(value)))
    if isinstance(value, list | tuple):
        return max(1, sum(map(_size, value)))
    return max(1, abs(value)) if isinstance(value, int) else 1
