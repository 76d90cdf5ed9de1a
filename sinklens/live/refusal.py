"""Refusals of requests: an HTTP status and a sentence for the page; and the JSON that the lab accepts.

All JSON from outside, of requests and of files, is read by `read_json`, so what it returns can always be written back.
"""

import json
from typing import Any


class Refused(Exception):
    """A request that the lab does not serve; its text is shown to the user.

    Attributes:
        status: the HTTP status, e.g. 400 malformed, 404 unknown, 409 not now, 413 too large, 422 the run cannot begin,
            429 too many.
        chip: id of the chip at fault, or None.
    """

    def __init__(self, text: str, status: int = 400, chip: str | None = None) -> None:
        super().__init__(text)
        self.status, self.chip = status, chip

    @property
    def body(self) -> dict[str, str]:
        """The refusal as JSON."""
        return {"error": str(self)} | ({} if self.chip is None else {"chip": self.chip})


def require(condition: bool, text: str, status: int = 400) -> None:
    """Refuse with `text` unless `condition` holds.

    Raises:
        Refused: it does not.
    """
    if not condition:
        raise Refused(text, status)


def read_json(text: str | bytes, what: str = "the request") -> Any:
    """A JSON document.

    Args:
        text: the document.
        what: names it in the refusal.

    Raises:
        Refused: it is not JSON, is nested too deeply, or contains NaN, an infinite number or half a surrogate pair.
    """
    try:
        found = json.loads(text)
        json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refused(
            f"{what} is not valid JSON; numbers must be finite with at most 4,300 digits, and text must be Unicode "
            f"without half surrogate pairs."
        ) from error
    return found
