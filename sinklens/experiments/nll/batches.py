"""Work in batches that fit into memory: when memory runs out, the batch is halved and the work continues.

Pitfall: a batch that just fits leaves nothing for other processes on the device; pass `rows` where memory is shared.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from sinklens.errors import DeviceMemoryError
from sinklens.utils.memory import explained

Row = TypeVar("Row")
POSITIONS = 16384  # of a first batch: 128 draws of 128 tokens


class Batches:
    """Divides rows into batches.

    Attributes:
        rows: most rows in a batch; None for as many as have `POSITIONS` positions. Out of memory lowers it for good.
    """

    def __init__(self, rows: int | None = None) -> None:
        self.rows = rows

    def run(self, rows: Sequence[Row], length: Callable[[Row], int], work: Callable[[Sequence[Row]], None]) -> None:
        """Call `work` on consecutive batches of `rows`; `length` is the number of positions that a row needs.

        Raises:
            DeviceMemoryError: a single row does not fit.
        """
        start = 0
        while start < len(rows):
            batch = self._next(rows[start:], length)
            try:
                with explained(partial("A likelihood pass of {} rows ran out of memory.".format, len(batch))):
                    work(batch)
            except DeviceMemoryError:
                if len(batch) == 1:
                    raise
                self.rows = len(batch) // 2
                continue
            start += len(batch)

    def _next(self, rows: Sequence[Row], length: Callable[[Row], int]) -> Sequence[Row]:
        """The first rows, as many as fit; at least one."""
        if self.rows is not None:
            return rows[: self.rows]
        longest, count = 0, 0
        for row in rows:
            longest = max(longest, length(row))
            if count and longest * (count + 1) > POSITIONS:
                break
            count += 1
        return rows[:count]
