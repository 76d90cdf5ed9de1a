"""The pictures of the concept pages: drawn from runs, as stored, and each on a page with an alternative text."""

import importlib.util
import re

import pytest
from contracts import ROOT

SPEC = importlib.util.spec_from_file_location("doc_pictures", ROOT / "scripts" / "doc_pictures.py")
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)
NAMES = {"draw_masks": "masks", "draw_canvas": "canvas", "draw_replay": "replay", "draw_policies": "policies"}


@pytest.mark.extended
@pytest.mark.parametrize("draw", NAMES)
@pytest.mark.filterwarnings("ignore:.*is a diffusion model")
def test_the_stored_picture_is_that_of_the_run(draw, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    getattr(script, draw)()
    stored = (ROOT / "docs" / "pictures" / f"{NAMES[draw]}.svg").read_text()
    assert (tmp_path / f"{NAMES[draw]}.svg").read_text() == stored, "run python scripts/doc_pictures.py"


def test_every_picture_is_on_a_page_with_a_text():
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "concepts").glob("*.md"))
    shown = dict(re.findall(r"!\[([^\]]+)\]\(\.\./pictures/(\w+)\.svg\)", pages))
    assert sorted(shown.values()) == sorted(NAMES.values())
    assert min(map(len, shown)) > 60
