"""Progress of long commands: a bar of tqdm for each label, on standard error, so that a printed table can be piped."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sinklens.utils.escaping import say
from sinklens.utils.progress import bars


@contextmanager
def counting(unit: str, out: Path | None = None, call: Sequence[str] = ()) -> Iterator[Callable[[str, int, int], None]]:
    """A function to call with a label, the units done and the total.

    With the folder `out`, an interrupt prints what it keeps and the command that resumes, and exits with code 130.
    """
    try:
        with bars(unit) as count:  # closed before the message, which ends standard error
            yield count
    except KeyboardInterrupt:
        if out is None:
            raise
        command = shlex.join(["sinklens", *call])
        resume = f"sinklens: interrupted; {out} keeps the finished {unit}. To resume:"
        say(resume, *f"  {command}".split("\n"), to=sys.stderr)
        raise SystemExit(130) from None
