"""The pictures of the docs: drawn from runs, results and pages, as they are now, and each with an alternative text."""

import importlib
import re
import sys

import pytest
from contracts import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
pages, *SCRIPTS = map(importlib.import_module, ("page_pictures", "doc_pictures", "findings_figures", "sink_curve"))
PICTURES = ROOT / "docs" / "pictures"


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:.*is a diffusion model")
def test_the_stored_pictures_are_those_of_the_runs_and_results(tmp_path, monkeypatch):
    for script in SCRIPTS:
        monkeypatch.setattr(script, "FOLDER", tmp_path)
        script.main()
    drawn, stored = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in (tmp_path, PICTURES))
    old = {name for name in drawn.keys() | stored.keys() if drawn.get(name) != stored.get(name)}
    assert old == set(), "run python scripts/pictures.py concepts findings training"


def test_no_picture_is_older_than_the_page_it_shows():
    assert pages.HASH.read_text().strip() == pages.templates(), "run python scripts/pictures.py pages"


def test_every_picture_is_on_a_page_with_a_text():
    texts = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    shown = dict(re.findall(r"!\[([^\]]+)\]\((?:\.\./)?pictures/([\w.-]+)\)", texts))
    assert set(shown.values()) == {file.name for file in PICTURES.iterdir()}
    assert min(map(len, shown)) > 30
