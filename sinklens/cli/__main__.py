"""``python -m sinklens.cli``."""

import sys

from sinklens.cli import main

if __name__ == "__main__":
    sys.exit(main())
