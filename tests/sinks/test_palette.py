"""The colors of pictures: declared once, used everywhere, and readable without color."""

import re

import numpy as np
import pytest
from contracts import ROOT
from matplotlib.colors import to_hex, to_rgb

from sinklens.sinks.palette import RAMPS, script
from sinklens.views import color_map
from sinklens.views.html import REPORT

APART = ("palette.py", "theme.css")  # the palette, and the grays and accents of pages
OTHER = re.compile(r"cmap=[\"']\w+|#(?!000000|ffffff)(?:[0-9a-fA-F]{6}|[0-9a-fA-F]{3})\b(?! \{|\w)")


def test_no_view_page_or_tutorial_has_a_color_map_or_a_color_of_its_own():
    kinds = [("sinklens", ".js"), ("sinklens", ".css"), ("sinklens", ".html"), ("sinklens", ".py"), ("analyses", ".py")]
    files = [file for folder, kind in kinds for file in (ROOT / folder).rglob(f"*{kind}") if file.name not in APART]
    found = {file.name: OTHER.findall(file.read_text()) for file in files}
    found |= {file.name: re.findall(r"cmap=[\"']\w+", file.read_text()) for file in (ROOT / "tutorials").glob("*.py")}
    assert {"figures.js", "heads.css", "feature_html.py", "drawing.py", "05_from_transformerlens.py"} <= set(found)
    assert {name: colors for name, colors in found.items() if colors} == {}
    assert script() in REPORT.script()


@pytest.mark.parametrize(("ramp", "turns"), [("sequential", [-1]), ("dark", [1]), ("diverging", [1, -1])])
def test_the_lightness_of_a_ramp_changes_all_the_way(ramp, turns):
    light = [np.dot(to_rgb(stop), (0.2126, 0.7152, 0.0722)) for stop in RAMPS[ramp]]
    signs = np.sign(np.diff(light))
    assert signs.tolist() == np.repeat(turns, len(signs) // len(turns)).tolist()
    if ramp != "dark":
        places = np.linspace(0, 1, len(light))
        assert [to_hex(color_map(ramp)(at)) for at in places[[0, -1]]] == [RAMPS[ramp][0], RAMPS[ramp][-1]]
