"""The command line: ``sinklens demo | trace | analyse | evaluate | score | table | hooks | models | train``."""

from sinklens.cli.app import main

__all__ = ["main"]
