"""Values cross the pipe unchanged and as built-in types; anything else is refused and never executed."""

import json
import math
import os
import struct
from collections import Counter, OrderedDict, namedtuple

import pytest

from sinklens.evaluation.sandbox.wire_format import (
    FRAME_LIMIT,
    ITERATOR_LIMIT,
    MalformedError,
    Opaque,
    UnsendableError,
    decode,
    encode,
    receive,
    send,
)


class EqualsAll:
    def __eq__(self, other):
        return True

    __hash__ = None


class EqualNumber(int):
    def __eq__(self, other):
        return True

    __hash__ = int.__hash__


def received(value):
    """`value` after crossing the pipe."""
    return decode(json.loads(json.dumps(encode(value))))


@pytest.mark.parametrize(
    "value",
    [None, True, False, 0, -7, 3**5000, 0.1, -0.0, 5e-324, math.inf, 1 + 2j, "", "ä\x00\ud800", b"\xff", [], [1, [2.0]],
     (), (1,), (1, (2,)), {}, {1: "a", "1": None, (1, 2): [True]}, set(), {1, "a"}, frozenset({(1,)}), range(1, 9, 2)],
    ids=lambda value: f"{value!s:.20}" if not isinstance(value, str | int | set) else type(value).__name__,
)  # fmt: skip
def test_a_plain_value_arrives_unchanged(value):
    arrived = received(value)
    assert arrived == value
    assert type(arrived) is type(value)


def test_differences_that_equality_ignores_are_preserved():
    assert math.isnan(received(math.nan))
    assert math.copysign(1, received(-0.0)) == -1
    assert [type(item) for item in received([1, True, 1.0])] == [int, bool, float]
    assert list(received({3: 0, 1: 0, 2: 0})) == [3, 1, 2]
    assert received({1: 2}.keys()) == {1}
    assert received({1: 2}.keys()) != [1]


def test_a_subclass_arrives_as_its_built_in_base_and_loses_its_equality():
    assert EqualNumber(1) == 2
    assert received(EqualNumber(1)) != 2
    pair = namedtuple("pair", "a b")
    for value, plain in ((pair(1, 2), (1, 2)), (Counter("aa"), {"a": 2}), (OrderedDict(a=1), {"a": 1})):
        assert received(value) == plain
        assert type(received(value)) is type(plain)


def test_an_iterator_arrives_as_an_iterator_and_does_not_equal_a_list():
    assert received(map(abs, [-1, 2])) != [1, 2]
    assert tuple(received(map(abs, [-1, 2]))) == (1, 2)
    endless = received(iter(int, 1))
    assert isinstance(endless, Opaque)
    assert isinstance(received(iter(range(ITERATOR_LIMIT + 1))), Opaque)


def test_any_other_object_arrives_as_a_placeholder_with_its_truth_value_that_equals_nothing():
    thing = received(EqualsAll())
    assert isinstance(thing, Opaque)
    assert thing != 1
    assert thing
    assert received([EqualsAll()]) != [1]
    falsy = type("Falsy", (), {"__bool__": lambda self: False})()
    assert not received(falsy)
    assert repr(received(len)) == "<a builtin_function_or_method>"


def test_an_argument_without_a_plain_form_is_refused_by_name():
    with pytest.raises(UnsendableError, match="a function cannot be passed to a program"):
        encode([1, [lambda: 0]], strict=True)
    with pytest.raises(UnsendableError, match="a Opaque cannot") as caught:
        encode(received(len), strict=True)
    assert isinstance(caught.value.value, Opaque)


def test_a_value_that_contains_itself_is_refused():
    value: list[object] = []
    value.append(value)
    with pytest.raises(RecursionError, match="recursion"):
        encode(value)


@pytest.mark.parametrize(
    "data",
    ["text", 5, 1.5, [], ["int"], ["int", "zz"], ["int", 7], ["float", "x"], ["list", 3], ["list", [5]], ["eval", "1"],
     ["dict", [[["list", []], None]]], ["dict", [[None]]], ["set", [["list", []]]], ["range", 1, 2, 0], ["range", "a"],
     ["bytes", "xyz"], ["complex", "1"], ["opaque"], {"tag": "int"}, [["int"], 1]],
    ids=str,
)  # fmt: skip
def test_data_without_a_plain_form_are_malformed(data):
    with pytest.raises(MalformedError, match="not a plain value"):
        decode(data)


def test_excessive_nesting_is_malformed():
    data: object = None
    for _ in range(5000):
        data = ["list", [data]]
    with pytest.raises(MalformedError, match="RecursionError"):
        decode(data)


@pytest.fixture
def ends():
    read, write = os.pipe()
    yield read, write
    for end in (read, write):
        try:
            os.close(end)
        except OSError:  # a test closed it
            continue


def test_frames_arrive_unchanged(ends):
    send(ends[1], [1, "a"])
    send(ends[1], None)
    assert receive(ends[0]) == [1, "a"]
    assert receive(ends[0]) is None
    os.close(ends[1])
    with pytest.raises(EOFError, match="was closed"):
        receive(ends[0])


def test_a_frame_that_is_too_long_is_refused_before_it_is_read(ends):
    os.write(ends[1], struct.pack(">I", FRAME_LIMIT + 1))
    with pytest.raises(MalformedError, match=f"{FRAME_LIMIT + 1} bytes was announced; {FRAME_LIMIT} are allowed"):
        receive(ends[0])
    with pytest.raises(MalformedError, match=f"{FRAME_LIMIT} fit"):
        send(ends[1], "x" * FRAME_LIMIT)


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 100_000], ids=["cut", "no text", "deep"])
def test_a_frame_that_is_not_json_is_malformed(ends, body):
    os.set_blocking(ends[1], False)
    sent = os.write(ends[1], struct.pack(">I", min(len(body), 60_000)) + body[:60_000])
    assert sent >= 5
    with pytest.raises(MalformedError, match="not JSON"):
        receive(ends[0])
