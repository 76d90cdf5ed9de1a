"""A live lab in the browser: run a model, change the run by pointing, and take the result home as Python.

    lab = sinklens.lab(model)     # in a notebook: shows the lab in the cell
    lab.address, lab.token, lab.close()

`sinklens lab MODEL` does the same from the command line. ``sinklens.lab`` is the function `lab` of this package.
Starlette and uvicorn (``pip install "sinklens[lab]"``) are imported when a lab opens.

How it works: requests arrive in the server's thread (app.py), behind the checks of security.py. Runs happen in one
model thread (thread.py) through the same `Denoising` as `sinklens.generate` (execution.py). What happens is an event
that all tabs get (events.py), and a finished run is a file (history.py). A change made on the page is a chip, and a
chip is one intervention (chips.py).
"""

from sinklens.live.server import Lab, lab

__all__ = ["Lab", "lab"]
