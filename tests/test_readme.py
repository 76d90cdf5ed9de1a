"""Every Python block of the README runs as it stands, from a file, as a reader would run it."""

import re
import runpy
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_readme_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"block{number}.py"
    file.write_text(BLOCKS[number])
    names = runpy.run_path(str(file))
    assert names.keys() & {"model", "table"}


def test_the_readme_opens_with_the_two_commands():
    lines = README.read_text().splitlines()
    assert lines[2].strip().startswith("make demo")
    assert lines[3].strip().startswith("make test")
    assert len(BLOCKS) >= 4


def test_every_name_the_readme_uses_exists(tiny_llada):
    named = set(re.findall(r"[\"'`](blocks\.\d+\.[\w.]*hook_\w+)[\"'`]", README.read_text()))
    assert len(named) >= 3
    for name in named:
        assert tiny_llada.tree.resolve(name) in tiny_llada.hook_names()
