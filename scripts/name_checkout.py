"""Name this checkout in a path file of the environment that runs this.

Without it, ``import sinklens`` in a script that lies beside the checkout finds the checkout's folder, an empty package
of that name, before it asks the installed one.
"""

import sysconfig
from pathlib import Path

file = Path(sysconfig.get_paths()["purelib"]) / "sinklens-checkout.pth"
file.write_text(f"{Path(__file__).resolve().parents[1]}\n")
