"""Integers given by a user, read the same way in Python and on the command line.

Pitfall: True and 1.0 equal 1, and the text "1" reads like it, but a run with any of them could draw other numbers than
a run with 1. None of them counts as an integer here.
"""

import operator
from typing import Any

MOST_SEED = 2**63 - 1  # what the files of a run can store


def as_integer(given: Any) -> int | None:
    """An integer of any type, e.g. NumPy's or a tensor without axes, as Python's; None for anything else.

    >>> as_integer(3), as_integer(True), as_integer(3.0)
    (3, None, None)
    """
    kind, axes = str(getattr(given, "dtype", "")), int(getattr(given, "ndim", 0))
    if isinstance(given, bool) or kind.endswith("bool") or axes > 0:  # a tensor of one value is a list of values
        return None
    try:
        return operator.index(given)
    except (TypeError, RuntimeError):
        return None
