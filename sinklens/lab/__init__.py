"""A live lab in the browser: run a model, change the run by pointing, and take the result home as Python.

    lab = sinklens.lab(model)     # in a notebook: shows the lab in the cell
    lab.url, lab.close()

`sinklens lab MODEL` does the same from the command line. The package itself is called: ``sinklens.lab(model)`` is
`open_lab`. Starlette and uvicorn (``pip install "sinklens[lab]"``) are imported when a lab opens.

How it works: requests arrive in the server's thread (app.py), behind the checks of security.py. Runs happen in one
model thread (thread.py) through the same `Denoising` as `sinklens.generate` (execution.py). What happens is an event
that all tabs get (events.py), and a finished run is a file (history.py). A change made on the page is a chip, and a
chip is one intervention (chips.py).
"""

import sys
from types import ModuleType
from typing import Any

from sinklens.lab.server import Lab, open_lab

__all__ = ["Lab", "open_lab"]


class _CallableModule(ModuleType):
    """This module, which can be called: ``sinklens.lab(model)``."""

    def __call__(self, model: Any, **options: Any) -> Lab:
        return open_lab(model, **options)


sys.modules[__name__].__class__ = _CallableModule
