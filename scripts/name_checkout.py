"""Add this checkout to a path file (``.pth``) of the current environment.

Without it, ``import sinklens`` in a script next to the checkout finds the checkout's folder, as an empty package of
that name, before the installed one.
"""

import sysconfig
from pathlib import Path

file = Path(sysconfig.get_paths()["purelib"]) / "sinklens-checkout.pth"
file.write_text(f"{Path(__file__).resolve().parents[1]}\n")
