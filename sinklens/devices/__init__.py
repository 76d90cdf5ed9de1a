"""Check that sinklens works on this machine's accelerator, and how fast: ``python -m sinklens.devices.check``.

The check is a suite of pytest tests, one file per *part*. conftest.py chooses the device and the sizes; report.py
writes what the tests found. The other files are what benchmarks and tests share; they do not need pytest.
"""

__all__: list[str] = []
