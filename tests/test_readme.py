"""Every Python block of the README runs unchanged from a file, as a reader would run it."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from sinklens.cli.app import COMMANDS

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.extended
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_readme_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"block{number}.py"
    file.write_text(BLOCKS[number])
    assert runpy.run_path(str(file)).keys() & {"model", "table"}


def test_the_readme_has_at_most_700_words_besides_code():
    prose = re.sub(r"```.*?```", "", README.read_text(), flags=re.DOTALL)
    assert len(re.findall(r"\w[\w'-]*", prose)) <= 700


def test_the_commands_page_shows_commands_that_exist_and_explains_all():
    written = (README.parent / "docs" / "commands.md").read_text()
    assert set(re.findall(r"(?m)^    sinklens ([\w-]+)", written)) <= set(COMMANDS)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="commands.md"))
    built = runpy.run_path(str(README.parent / "docs" / "reference.py"))["on_page_markdown"](written, page)
    assert set(re.findall(r"(?m)^## sinklens ([\w-]+)", built)) == set(COMMANDS)
