"""The command line, ``sinklens COMMAND``: demo, trace, lab, analyse, evaluate, score, merge, export, table, hooks, …"""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see `app.run`): 130 after Ctrl+C, even while Python imports modules."""
    try:
        from sinklens.cli.app import run

        return run(arguments)
    except KeyboardInterrupt:
        print("sinklens: interrupted; unfinished files were discarded.", file=sys.stderr)
        return 130


__all__ = ["main"]
