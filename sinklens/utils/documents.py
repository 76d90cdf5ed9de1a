"""JSON and YAML from other people's files, with limits on their size, depth and numbers.

A document that Python parses can still stop what reads it: nesting exhausts the stack of the next function that walks
it, an integer of 20 digits fits no tensor, NaN compares as false in every check of a range, and half a surrogate pair
cannot be written to a file. Such documents are refused here, where they enter, with the file's name.

Limitation: YAML is read without anchors and aliases, since a few lines of them stand for more values than memory holds.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sinklens.errors import CheckpointError, require

MOST_BYTES = 2**25  # the index of a model of a trillion parameters has about 2**23
MOST_YAML = 2**16  # written by hand; Python's reader takes a second for so much
DEPTH = 64
Refusal = Callable[[str], Exception]  # makes the error from its text
LONG = re.compile(r"\d{19}")  # no shorter integer exceeds 64 bits


def read_text(file: Path, error: Refusal = CheckpointError, most: int = MOST_BYTES) -> str:
    """The text of a file in UTF-8.

    Raises:
        Exception: of the class `error`; it cannot be read, or is larger than `most` bytes.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(most + 1)
        text = content.decode("utf-8-sig")
    except (OSError, ValueError) as reason:  # ValueError: not UTF-8, or a name with a null character
        raise error(f"{file} cannot be read: {reason}.") from reason
    require(len(content) <= most, f"{file} is larger than {most:,} bytes, the limit for such a file.", error)
    return text


def parse_json(text: str | bytes, where: object, error: Refusal = CheckpointError, python: bool = False) -> Any:
    """A JSON document.

    Args:
        text: the document; bytes are UTF-8.
        where: names it in the error.
        python: accept what Python writes beyond JSON: NaN, infinite numbers, half surrogate pairs and integers of up to
            4,300 digits.

    Raises:
        Exception: of the class `error`; it is not JSON, is nested more than `DEPTH` deep, or has NaN, an infinite
            number, an integer of more than 64 bits or half a surrogate pair.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        strict: dict[str, Any] = {
            "parse_constant": _finite,
            "parse_float": _finite,
            "parse_int": _integer if LONG.search(text) else None,
        }
        found = json.loads(text) if python else json.loads(text, **strict)
        unescaped = json.dumps(found, ensure_ascii=False) if "\\u" in text else text
        unescaped.encode(errors="surrogatepass" if python else "strict")  # else fails for half a surrogate pair
    except (ValueError, RecursionError) as reason:
        said = "nested too deeply" if isinstance(reason, RecursionError) else reason
        raise error(f"{where} is not valid JSON ({said}); it may be incomplete. Restore or resend it.") from reason
    level = [found]
    for _ in range(DEPTH):
        level = [
            one
            for outer in level
            if isinstance(outer, list | dict)
            for one in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(one, list | dict)
        ]
    require(not level, f"{where} is not valid JSON (nested more than {DEPTH} deep).", error)
    return found


def read_json(file: Path, error: Refusal = CheckpointError) -> dict[str, Any]:
    """The object in a JSON file; raises like `read_text` and `parse_json`, and for another value than an object."""
    found = parse_json(read_text(file, error), file, error)
    require(isinstance(found, dict), f"{file} contains a JSON {type(found).__name__}, not an object.", error)
    return found


def read_yaml(file: Path, error: Refusal = CheckpointError) -> Any:
    """A YAML document of the values that JSON has; raises like `read_text` and `parse_json`."""
    import yaml

    class Plain(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            require(
                not getattr(self.peek_event(), "anchor", None),
                "anchors and aliases are not read; write the values out",
                ValueError,
            )
            return super().compose_node(parent, index)

    try:
        text = json.dumps(yaml.load(read_text(file, error, MOST_YAML), Loader=Plain), allow_nan=False)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as reason:
        told = "it is nested too deeply" if isinstance(reason, RecursionError) else " ".join(str(reason).split())
        raise error(f"{file} is not valid YAML: {told}.") from reason
    return parse_json(text, file, error)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.40} is not finite")
    return number


def _integer(text: str) -> int:
    require(len(text) <= 20 and -(2**63) <= int(text) < 2**63, f"{text:.40} does not fit into 64 bits", ValueError)
    return int(text)
