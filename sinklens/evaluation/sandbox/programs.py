"""What runs in the two sandboxed processes: the candidate's program in one, the tests in the other.

The *candidate* executes the program, then answers calls: arguments arrive on one pipe and results leave on another, as
plain values (wire_format.py). The *checker* executes the tests and passes their ``check`` a stand-in that makes such
calls. Only the checker can write to the report, and it sends "passed" after ``check`` returned, with a key that only it
knows. Whatever the program does to its own process, it can only answer calls, correctly or not.

Known difference from running both in one process: the tests see copies. A function that modifies its argument in place
cannot be tested, and the tests' helpers come from the task's own prompt, not from the program.
"""

import builtins
import os
import random
import sys
import traceback
import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sinklens.evaluation.sandbox.wire_format import (
    MalformedError,
    Opaque,
    UnsendableError,
    decode,
    encode,
    receive,
    send,
)

TEXT_LIMIT = 2000  # characters of an error's text that are kept
SendVerdict = Callable[..., None]


def candidate(task: dict[str, Any], calls: int, replies: int) -> None:
    """Execute ``task["program"]`` and answer calls of ``task["entry_point"]`` until the caller closes the pipe."""
    random.seed(0)
    module = types.ModuleType("program")
    sys.modules["program"] = module
    try:
        exec(compile(task["program"], "program.py", "exec"), module.__dict__)
        function = _defined(module.__dict__, task["entry_point"], "the program")
    except BaseException as error:  # noqa: BLE001 whatever a program raises is its answer, even SystemExit
        send(replies, _raised(error))
        return
    send(replies, ["ready"])
    while True:
        try:
            arguments = receive(calls)
        except EOFError:
            return
        try:
            reply = ["value", encode(_call(function, arguments))]
            send(replies, reply)
        except BaseException as error:  # noqa: BLE001 as above
            send(replies, _raised(error))


def _defined(space: dict[str, Any], name: str, where: str) -> Any:
    if name not in space:
        raise NameError(f"{where} defines no {name!r}")
    return space[name]


def _call(function: Any, arguments: Any) -> Any:
    positional, named = decode(arguments)
    return function(*positional, **named)


def _raised(error: BaseException) -> list[str]:
    """An exception as a reply; its traceback goes to standard error."""
    text = "".join(traceback.format_exception(error, limit=-5))
    sys.stderr.write(text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]}...\n")
    return ["raised", type(error).__name__, _text(error)]


class GoneError(BaseException):
    """The candidate's process has exited; a BaseException, so no ``except Exception`` in a test swallows it."""


class CandidateError(Exception):
    """The candidate raised something other than a built-in exception."""


class StandIn:
    """The function that the tests call in place of the candidate's.

    Attributes:
        gone: the candidate's process ended while it was needed.
        raised: exceptions caused by the candidate, not by the tests.
    """

    def __init__(self, calls: int, replies: int) -> None:
        self._calls, self._replies = calls, replies
        self.gone = False
        self.raised: list[BaseException] = []

    def wait(self) -> None:
        """Wait until the program is loaded; raise what it raised."""
        self._answer()

    def __call__(self, *positional: Any, **named: Any) -> Any:
        try:
            arguments = encode((positional, named), strict=True)
        except UnsendableError as error:
            if not isinstance(error.value, Opaque):
                raise
            raise self._blame(TypeError(str(error))) from error  # an opaque result, passed back as an argument
        try:
            send(self._calls, arguments)
        except OSError as error:
            raise self._hang_up() from error
        return self._answer()

    def _answer(self) -> Any:
        try:
            reply = receive(self._replies)
        except (EOFError, OSError) as error:
            raise self._hang_up() from error
        except MalformedError as error:
            raise self._blame(error) from error
        match reply:
            case ["ready"]:
                return None
            case ["value", data]:
                try:
                    return decode(data)
                except MalformedError as error:
                    raise self._blame(error) from error
            case ["raised", str(kind), str(text)]:
                raise self._blame(_rebuilt(kind[:100], text[:TEXT_LIMIT]))
            case _:
                raise self._blame(MalformedError("a reply of unknown form"))

    def _blame(self, error: BaseException) -> BaseException:
        self.raised.append(error)
        return error

    def _hang_up(self) -> GoneError:
        self.gone = True
        return GoneError("the program's process ended before the tests did")


def _rebuilt(kind: str, text: str) -> Exception:
    """The exception named `kind` if it is an ordinary built-in one, else a `CandidateError` that names it."""
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        with suppress(TypeError):  # a few need more than a text
            return known(text)
    return CandidateError(f"{kind}: {text}")


def checker(task: dict[str, Any], calls: int, replies: int, report: SendVerdict) -> None:
    """Execute ``task["test"]`` and its ``check``; report one verdict.

    Verdicts: "passed" with the key; "failed", with what happened and, if the candidate raised, the name of that error;
    "gone" if the candidate's process ended; "broken" if the tests fail to run regardless of the candidate.
    """
    random.seed(0)
    function = StandIn(calls, replies)
    space: dict[str, Any] = {"__name__": "tests"}
    try:
        exec(compile(task["helpers"], "helpers.py", "exec"), space)
        space[task["entry_point"]] = function
        exec(compile(task["test"], "tests.py", "exec"), space)
        check = _defined(space, "check", "the source of the tests")
    except BaseException as error:  # noqa: BLE001 any error makes the task unusable
        return report(verdict="broken", detail=_describe(error, task["test"]))
    try:
        function.wait()
        check(function)
    except GoneError:
        return report(verdict="gone")
    except BaseException as error:  # noqa: BLE001 any error of a test is a verdict
        ours = not any(error is known for known in function.raised)
        verdict = "broken" if ours and isinstance(error, NameError | UnsendableError) else "failed"
        return report(verdict=verdict, kind=type(error).__name__, detail=_describe(error, task["test"]))
    if function.gone:  # a test swallowed everything
        return report(verdict="gone")
    return report(verdict="passed", key=task["key"])


def _describe(error: BaseException, test: str) -> str:
    """An error in one line, with the line of the tests that raised it."""
    lines = test.splitlines()
    numbers = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests.py"]
    text = f"{type(error).__name__}: {_text(error)}".rstrip(": ")
    if numbers and numbers[-1] is not None and numbers[-1] <= len(lines):
        text += f" (at: {lines[numbers[-1] - 1].strip()[:200]})"
    return text


def _text(error: BaseException) -> str:
    try:
        return str(error)[:TEXT_LIMIT]
    except Exception:  # noqa: BLE001 its str() may fail, e.g. on an integer of a million digits
        return "(a text that cannot be printed)"


def finish() -> None:
    """Exit at once, skipping exit handlers and threads."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed or replaced
            stream.flush()
    os._exit(0)
