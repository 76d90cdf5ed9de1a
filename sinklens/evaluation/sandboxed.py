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
import sys
import traceback
import types
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

VALUE_LIMIT = 4 * 2**20  # bytes of one value on its way
ITERATOR_LIMIT = 100_000  # items taken from an iterator; a longer one is opaque
TEXT_LIMIT = 2000  # characters of an error's text


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


PLAIN = (bool, int, float, str)  # as in JSON, like None and lists
FORMS: dict[type, tuple[Any, Any]] = {
    bytes: (bytes.hex, bytes.fromhex),
    bytearray: (bytearray.hex, bytearray.fromhex),
    complex: (complex.__repr__, complex),
    range: (lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    tuple: (list, tuple),
    dict: (lambda value: list(map(list, value.items())), dict),
    set: (list, set),
    frozenset: (list, frozenset),
    type({}.keys()): (list, set),
}
"""Type of a value -> how its parts are taken, and how it is made of them."""
MAKERS = {kind.__name__: make for kind, (_, make) in FORMS.items()} | {"iterator": iter, "opaque": Opaque}


def _tagged(value: Any, strict: bool) -> Any:
    """`value` for JSON: what JSON knows as it is, all others as {kind: parts}."""
    if value is None or isinstance(value, PLAIN):
        return value
    if isinstance(value, list):
        return [_tagged(one, strict) for one in value]
    for kind, (parts, _) in FORMS.items():
        if isinstance(value, kind):
            return {kind.__name__: _tagged(parts(value), strict)}
    items = list(islice(value, ITERATOR_LIMIT + 1)) if isinstance(value, Iterator) else None
    if items is not None and len(items) <= ITERATOR_LIMIT:
        return {"iterator": _tagged(items, strict)}
    if strict and not isinstance(value, Opaque):
        raise UnsendableError(f"a {type(value).__name__} cannot be passed to a program in another process")
    return {"opaque": bool(value)}


def encode(value: object, strict: bool = False) -> bytes:
    """`value` as plain data; if `strict`, what has no plain form is an `UnsendableError`, else it becomes opaque."""
    return json.dumps(_tagged(value, strict)).encode()


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
        function = getattr(module, task["entry_point"])
    except BaseException as error:  # noqa: BLE001 whatever a program raises is its answer, even SystemExit
        return pipe.send_bytes(_raised(error))
    reply = encode(("ready", None))
    while True:
        pipe.send_bytes(reply)
        positional, named = decode(pipe.recv_bytes())
        try:
            reply = encode(("value", function(*positional, **named)))
        except BaseException as error:  # noqa: BLE001 as above
            reply = _raised(error)


def _raised(error: BaseException) -> bytes:
    """An exception as a reply; its traceback is printed."""
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
            if kind != "raised":
                return value
            error = _rebuilt(*value)
        except (EOFError, ConnectionError) as ended:
            self.gone = True
            raise GoneError from ended
        except (ValueError, TypeError, OSError) as malformed:
            error = ValueError(f"a malformed reply ({malformed})")
        self.raised.append(error)
        raise error


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
    function, module, loaded = StandIn(pipe), types.ModuleType("tests"), False
    try:
        exec(compile(task["helpers"], "helpers.py", "exec"), module.__dict__)
        setattr(module, task["entry_point"], function)
        exec(compile(task["test"], "tests.py", "exec"), module.__dict__)
        check = module.check
        loaded = True
        function.answer()
        check(function)
    except GoneError:
        return "gone", ""
    except BaseException as error:  # noqa: BLE001 any error of a test is a verdict
        ours = not any(error is known for known in function.raised)
        broken = not loaded or (ours and isinstance(error, NameError | UnsendableError))
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
    except Exception:  # noqa: BLE001 its str() may fail
        return "(a text that cannot be printed)"


def main() -> None:
    """Drop the rights of root, report readiness, and play the role of the task."""
    settings = json.loads(sys.argv.pop())
    report, pipe = Connection(settings["report"]), Connection(settings["pipe"])
    if settings["user"] is not None:
        os.setgroups([])
        os.setresgid(*[settings["user"]] * 3)
        os.setresuid(*[settings["user"]] * 3)
    for name, size in settings["limits"].items():
        kind = getattr(resource, f"RLIMIT_{name}")
        ceiling = resource.getrlimit(kind)[1]  # perhaps tighter
        limit = size if ceiling == resource.RLIM_INFINITY else min(size, ceiling)
        resource.setrlimit(kind, (limit, limit))
    report.send_bytes(b"ready")
    task = json.load(sys.stdin)
    random.seed(0)
    with suppress(EOFError, OSError):  # another process has exited
        if "program" in task:
            report.close()
            candidate(task, pipe)
        else:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 until the end
            report.send_bytes(json.dumps(checker(task, pipe)).encode())
    for written in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed or replaced
            written.flush()
    os._exit(0)  # without exit handlers and threads


if __name__ == "__main__":
    main()
