"""The wire format: Python values as plain data on a pipe to a process that is not trusted.

A value travels as JSON. Each node is null, true, false or a list ``[tag, ...]``; integers travel in hexadecimal and
floats as `float.hex`, so nothing is rounded; containers are encoded recursively. Decoding creates built-in types only,
so a value cannot carry code or its own ``__eq__``. Instances of subclasses arrive as their base type. Everything else
arrives as an `Opaque`, which knows its type's name and its truth value and equals only itself.

Known limit: values are copied, so a function's changes to its arguments stay in its own process.

A frame is a four-byte big-endian length followed by that many bytes of JSON.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator, KeysView
from itertools import islice
from typing import Any

FRAME_LIMIT = 4 * 2**20  # bytes of one value on the pipe
ITERATOR_LIMIT = 100_000  # items taken from an iterator; a longer one is opaque
LENGTH = struct.Struct(">I")


class UnsendableError(TypeError):
    """An argument has no plain form and cannot be sent.

    Attributes:
        value: the value without a plain form.
    """

    def __init__(self, value: object) -> None:
        super().__init__(f"a {type(value).__name__} cannot be passed to a program in another process")
        self.value = value


class MalformedError(ValueError):
    """The bytes received are not a valid frame or value."""


class Opaque:
    """Stands for a value without a plain form: equal only to itself, with the value's truth."""

    def __init__(self, kind: str, truth: bool) -> None:
        self.kind, self.truth = kind, truth

    def __bool__(self) -> bool:
        return self.truth

    def __repr__(self) -> str:
        return f"<a {self.kind}>"


def encode(value: object, strict: bool = False) -> Any:
    """The plain form of `value`.

    Args:
        value: anything.
        strict: refuse values without a plain form instead of sending them as opaque.

    Raises:
        UnsendableError: `strict`, and something in `value` has no plain form.
        RecursionError: `value` contains itself.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, dict):
        return ["dict", [[encode(key, strict), encode(item, strict)] for key, item in value.items()]]
    for kind, tag in ((list, "list"), (tuple, "tuple"), (set, "set"), (frozenset, "frozenset"), (KeysView, "keys")):
        if isinstance(value, kind):
            return [tag, [encode(item, strict) for item in value]]
    return _encode_single(value, strict)


def _encode_single(value: object, strict: bool) -> Any:
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", value.real.hex(), value.imag.hex()]
    if isinstance(value, str):
        return ["str", str(value)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    if strict:
        raise UnsendableError(value)
    if isinstance(value, Iterator):
        items = list(islice(value, ITERATOR_LIMIT + 1))
        if len(items) <= ITERATOR_LIMIT:
            return ["iterator", [encode(item, strict) for item in items]]
    return ["opaque", type(value).__name__, bool(value)]


MAKERS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "str": str,
    "bytes": bytes.fromhex,
    "range": range,
    "opaque": lambda kind, truth: Opaque(str(kind)[:100], truth is True),
}
GATHERERS: dict[str, Callable[..., Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "keys": lambda items: dict.fromkeys(items).keys(),
    "iterator": iter,
}


def decode(data: Any) -> Any:
    """The value of a plain form, in built-in types.

    Raises:
        MalformedError: `data` is not a plain form.
    """
    try:
        return _decode(data)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise MalformedError(f"the data received are not a plain value ({type(error).__name__})") from error


def _decode(data: Any) -> Any:
    if data is None or data is True or data is False:
        return data
    tag, *rest = data
    if tag == "dict":
        (pairs,) = rest
        return {_decode(key): _decode(item) for key, item in pairs}
    if tag in GATHERERS:
        (items,) = rest
        return GATHERERS[tag]([_decode(item) for item in items])
    return MAKERS[tag](*rest)


def send(pipe: int, data: Any) -> None:
    """Write one frame.

    Raises:
        MalformedError: it would be longer than `FRAME_LIMIT`.
        OSError: the other end was closed.
    """
    body = json.dumps(data).encode()
    if len(body) > FRAME_LIMIT:
        raise MalformedError(f"a value of {len(body)} bytes; {FRAME_LIMIT} fit on the pipe")
    body = LENGTH.pack(len(body)) + body
    while body:
        body = body[os.write(pipe, body) :]


def receive(pipe: int) -> Any:
    """Read one frame.

    Raises:
        EOFError: the other end was closed.
        MalformedError: it is too long, or not JSON.
    """
    (length,) = LENGTH.unpack(_exactly(pipe, LENGTH.size))
    if length > FRAME_LIMIT:
        raise MalformedError(f"a frame of {length} bytes was announced; {FRAME_LIMIT} are allowed")
    try:
        return json.loads(_exactly(pipe, length))
    except (ValueError, RecursionError) as error:
        raise MalformedError("a frame that is not JSON") from error


def _exactly(pipe: int, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = os.read(pipe, length - len(parts))
        if not part:
            raise EOFError("the other end of the pipe was closed")
        parts += part
    return bytes(parts)
