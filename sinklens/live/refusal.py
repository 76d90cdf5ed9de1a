"""Refusals of requests: an HTTP status and a sentence for the page."""


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
