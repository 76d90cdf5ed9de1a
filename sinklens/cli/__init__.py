"""The command line: ``sinklens demo | trace | lab | analyse | evaluate | score | table | hooks | models | train``."""

from sinklens.cli.app import main

__all__ = ["main"]
