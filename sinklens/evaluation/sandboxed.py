"""What runs inside the sandbox: a program in one process, its tests in another (sandbox.py starts both as scripts).

The *candidate* executes the program, then answers calls of its function. The *checker* executes the tests and passes
their ``check`` a stand-in that makes such calls; only the checker can report. Calls and answers are JSON that stands
for values of built-in types, so an answer carries neither code nor its own ``__eq__``: instances of subclasses arrive
as their base type, and everything else as an `Opaque`, which equals only itself.

Known difference from one process: the tests see copies. A function that modifies its argument in place cannot be
tested, and the tests' helpers come from the task's own prompt, not from the program.
"""

import builtins
import json
import os
import random
import resource
import socket
import sys
import traceback
import types
from collections.abc import Iterator, KeysView
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

VALUE_LIMIT = 4 * 2**20  # bytes of one value on its way
ITERATOR_LIMIT = 100_000  # items taken from an iterator; a longer one is opaque
TEXT_LIMIT = 2000  # characters of an error's text
PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range)


class UnsendableError(TypeError):
    """An argument of a test has no plain form."""


class GoneError(BaseException):
    """The candidate's process has exited; a BaseException, so no ``except Exception`` in a test swallows it."""


class Opaque:
    """Stands for a value without a plain form: equal only to itself, with the value's truth."""

    def __init__(self, truth: object) -> None:
        self.truth = bool(truth)

    def __bool__(self) -> bool:
        return self.truth


MAKERS: dict[str, Any] = {
    "int": lambda text: int(text, 16), "complex": lambda parts: complex(*parts), "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex, "tuple": tuple, "dict": dict, "set": set, "frozenset": frozenset,
    "range": lambda parts: range(*parts), "iterator": iter, "opaque": Opaque,
    "type": lambda name: next(kind for kind in PLAIN if kind.__name__ == name),
}  # fmt: skip
"""Kind of a value -> how it is made of its parts."""


def _tagged(value: Any, strict: bool) -> Any:
    """`value` for JSON: texts, truth values, floats, None and lists as they are, all others as {kind: parts}."""
    kind = next((kind for kind in PLAIN if kind in type(value).__mro__), None)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return {"int": hex(value)}  # digits are limited
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is range:
        return {"range": _tagged([value.start, value.stop, value.step], strict)}
    if kind is not None:
        parts = [_tagged(one, strict) for one in (map(list, value.items()) if kind is dict else value)]
        return parts if kind is list else {kind.__name__: parts}
    if isinstance(value, KeysView):
        return _tagged(set(value), strict)
    if any(value is one for one in PLAIN):
        return {"type": value.__name__}
    if strict and not isinstance(value, Opaque):
        raise UnsendableError(f"a {type(value).__name__} cannot be passed to a program in another process")
    items = list(islice(value, ITERATOR_LIMIT + 1)) if isinstance(value, Iterator) else None
    return (
        {"opaque": bool(value)}
        if items is None or len(items) > ITERATOR_LIMIT
        else {"iterator": _tagged(items, strict)}
    )


def encode(value: object, strict: bool = False) -> bytes:
    """`value` as plain data; if `strict`, what has no plain form is an `UnsendableError`, else it becomes opaque."""
    data = json.dumps(_tagged(value, strict)).encode()
    if len(data) > VALUE_LIMIT:
        raise ValueError(f"a value of {len(data)} bytes; at most {VALUE_LIMIT} are passed on")
    return data


def decode(data: bytes) -> Any:
    """The value of plain data, in built-in types; anything else is a ValueError."""

    def made(tagged: dict[str, Any]) -> Any:
        ((kind, parts),) = tagged.items()
        return MAKERS[kind](parts)

    try:
        return json.loads(data, object_hook=made)
    except Exception as error:
        raise ValueError(f"the data received are not a plain value ({type(error).__name__})") from error


def candidate(task: dict[str, Any], pipe: Connection) -> None:
    """Execute ``task["program"]`` and answer calls of its function until the caller closes the pipe."""
    module = sys.modules["program"] = types.ModuleType("program")
    try:
        exec(compile(task["program"], "program.py", "exec"), module.__dict__)
        function = _defined(module.__dict__, task["entry_point"], "the program")
    except BaseException as error:  # noqa: BLE001 whatever a program raises is its answer, even SystemExit
        return pipe.send_bytes(_raised(error))
    pipe.send_bytes(encode(("ready", None)))
    while True:
        positional, named = decode(pipe.recv_bytes(VALUE_LIMIT))
        try:
            reply = encode(("value", function(*positional, **named)))
        except BaseException as error:  # noqa: BLE001 as above
            reply = _raised(error)
        pipe.send_bytes(reply)


def _defined(space: dict[str, Any], name: str, where: str) -> Any:
    if name not in space:
        raise NameError(f"{where} defines no {name!r}")
    return space[name]


def _raised(error: BaseException) -> bytes:
    """An exception as a reply; its traceback goes to standard error."""
    sys.stderr.write("".join(traceback.format_exception(error, limit=-5))[:TEXT_LIMIT])
    return encode(("raised", (type(error).__name__, _text(error))))


class StandIn:
    """The function that the tests call in place of the candidate's; `raised` are the errors that are not the tests'."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.gone = pipe, False
        self.raised: list[BaseException] = []

    def __call__(self, *positional: Any, **named: Any) -> Any:
        arguments = encode((positional, named), strict=True)
        with suppress(OSError):  # then there is no answer either
            self.pipe.send_bytes(arguments)
        return self.answer()

    def answer(self) -> Any:
        """The next reply, the first of which says that the program is loaded; raise what it raised."""
        try:
            kind, value = decode(self.pipe.recv_bytes(VALUE_LIMIT))
            error = _rebuilt(*value) if kind == "raised" else None
        except (EOFError, ConnectionError) as ended:
            self.gone = True
            raise GoneError from ended
        except (ValueError, TypeError, OSError) as malformed:
            error = ValueError(f"a malformed reply ({malformed})")
        if error is not None:
            self.raised.append(error)
            raise error
        return value


def _rebuilt(kind: str, text: str) -> Exception:
    """The exception named `kind` if it is an ordinary built-in one, else one that names it."""
    known = getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        with suppress(TypeError):  # a few need more than a text
            return known(text[:TEXT_LIMIT])
    return Exception(f"{kind[:100]}: {text[:TEXT_LIMIT]}")


def checker(task: dict[str, Any], pipe: Connection) -> tuple[str, str]:
    """The verdict of ``task["test"]``, and details: "passed", "failed", "memory", "gone" (the candidate's process
    ended), or "broken" (the tests fail to run regardless of the candidate).
    """  # fmt: skip
    function, space = StandIn(pipe), dict[str, Any](__name__="tests")
    try:
        exec(compile(task["helpers"], "helpers.py", "exec"), space)
        space[task["entry_point"]] = function
        exec(compile(task["test"], "tests.py", "exec"), space)
        check = _defined(space, "check", "the source of the tests")
    except BaseException as error:  # noqa: BLE001 any error makes the task unusable
        return "broken", _describe(error, task["test"])
    try:
        function.answer()
        check(function)
    except GoneError:
        return "gone", ""
    except BaseException as error:  # noqa: BLE001 any error of a test is a verdict
        ours = not any(error is known for known in function.raised)
        broken = ours and isinstance(error, NameError | UnsendableError)
        kind = "broken" if broken else "memory" if isinstance(error, MemoryError) else "failed"
        return kind, _describe(error, task["test"])
    return "gone" if function.gone else "passed", ""  # a test may swallow everything


def _describe(error: BaseException, test: str) -> str:
    """An error in one line, with the line of the tests that raised it."""
    lines = [frame.lineno or 0 for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests.py"]
    at = f" (at: {test.splitlines()[lines[-1] - 1].strip()[:200]})" if lines else ""
    return f"{type(error).__name__}: {_text(error)}".rstrip(": ") + at


def _text(error: BaseException) -> str:
    try:
        return str(error)[:TEXT_LIMIT]
    except Exception:  # noqa: BLE001 its str() may fail, e.g. on an integer of a million digits
        return "(a text that cannot be printed)"


def main() -> None:
    """Drop the rights of root, report readiness with a handle of the working folder, and play the role of the task."""
    settings = json.loads(sys.argv.pop())
    report, pipe = socket.socket(fileno=settings["report"]), Connection(settings["pipe"])
    if settings["user"] is not None:
        os.setgroups([])
        os.setresgid(*[settings["user"]] * 3)
        os.setresuid(*[settings["user"]] * 3)
    for name, size in settings["limits"].items():
        kind = getattr(resource, f"RLIMIT_{name}")
        ceiling = resource.getrlimit(kind)[1]  # perhaps tighter
        limit = size if ceiling == resource.RLIM_INFINITY else min(size, ceiling)
        resource.setrlimit(kind, (limit, limit))
    folder = os.open(".", os.O_RDONLY)
    socket.send_fds(report, [b"ready"], [folder])
    os.close(folder)
    task = json.loads(sys.stdin.read() or os._exit(1))  # the parent has exited
    random.seed(0)
    with suppress(EOFError, OSError):  # another process has exited
        if "program" in task:
            report.close()
            candidate(task, pipe)
        else:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(nowhere, stream)
            report.send(json.dumps(checker(task, pipe)).encode())
    for written in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed or replaced
            written.flush()
    os._exit(0)  # without exit handlers and threads


if __name__ == "__main__":
    main()
