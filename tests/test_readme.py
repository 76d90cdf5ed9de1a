"""The README is short, and the page of the commands names those that exist. tests/test_docs.py runs the examples."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

from sinklens.cli.app import COMMANDS

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_readme_has_fewer_than_700_words_besides_code():
    assert len(re.findall(r"\w[\w'-]*", re.sub(r"```.*?```", "", README.read_text(), flags=re.DOTALL))) < 700


def test_the_commands_page_shows_commands_that_exist_and_explains_all():
    written = (README.parent / "docs" / "commands.md").read_text()
    assert set(re.findall(r"(?m)^    sinklens ([\w-]+)", written)) <= set(COMMANDS)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="commands.md"))
    built = runpy.run_path(str(README.parent / "docs" / "reference.py"))["on_page_markdown"](written, page)
    assert set(re.findall(r"(?m)^## sinklens ([\w-]+)", built)) == set(COMMANDS)
