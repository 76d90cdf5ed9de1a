"""The pictures of the docs: drawn from runs and pages, as they are now, and each with an alternative text."""

import importlib
import re
import sys

import pytest
from contracts import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
script, pages = (importlib.import_module(name) for name in ("doc_pictures", "page_pictures"))
NAMES = {"draw_masks": "masks", "draw_canvas": "canvas", "draw_replay": "replay", "draw_policies": "policies"}


@pytest.mark.extended
@pytest.mark.parametrize("draw", NAMES)
@pytest.mark.filterwarnings("ignore:.*is a diffusion model")
def test_the_stored_picture_is_that_of_the_run(draw, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    getattr(script, draw)()
    stored = (ROOT / "docs" / "pictures" / f"{NAMES[draw]}.svg").read_text()
    assert (tmp_path / f"{NAMES[draw]}.svg").read_text() == stored, "run python scripts/pictures.py concepts"


def test_no_picture_is_older_than_the_page_it_shows():
    assert pages.HASH.read_text().strip() == pages.templates(), "run python scripts/pictures.py pages"


def test_every_picture_is_on_a_page_with_a_text():
    texts = "".join(page.read_text() for page in (ROOT / "docs" / "concepts").glob("*.md"))
    shown = dict(re.findall(r"!\[([^\]]+)\]\(\.\./pictures/(\w+)\.svg\)", texts))
    assert sorted(shown.values()) == sorted(NAMES.values())
    assert min(map(len, shown)) > 60
