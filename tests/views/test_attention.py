"""CircuitsVis's attention heads as a self-contained document."""

import html
import json
import re

import numpy as np
import pytest
import torch

import sinklens
from sinklens.errors import SettingError, SinklensError, TrackError
from sinklens.tasks import held_out
from sinklens.views import attention, pattern_at
from sinklens.views.attention import CELLS, AttentionView, block_size, pooled
from sinklens.views.html import visible

HOSTILE = [
    "</script>",
    "<img src=x onerror='parent.bad=1;window.bad=1'>",
    '"&amp;',
    "a\u2028b",
    "\u202etxt",
    "\x00\x1b",
    "░",
]


@pytest.fixture(scope="module")
def run(tiny_llada):
    return sinklens.generate(tiny_llada, [problem.prompt for problem in held_out(2)])


def props(view):
    block = re.search(r'<script type="application/json" id="props">(.*?)</script>', view.document)
    return json.loads(block[1])["props"]


def random_pattern(heads, positions):
    return torch.randn(heads, positions, positions).softmax(-1).numpy()


def test_the_view_holds_the_pattern_and_its_tokens_of_all_heads_or_some(run, tiny_llama):
    causal = sinklens.generate(tiny_llama, held_out(1)[0].prompt, gen_length=2)
    given = props(attention(run, step=9, layer=2, row=0))
    np.testing.assert_allclose(given["attention"], pattern_at(run, 9, 2, 0), atol=5.1e-5)
    expected = [run.sinks.vocabulary[token] for token in run.canvas[0, 9][run.real[0]].tolist()]
    shown = ["░" if word == "<|mdm_mask|>" else visible(word) for word in expected]
    assert given["tokens"] == shown
    assert "░" in shown
    assert given["attentionHeadNames"] == [f"Head {head}" for head in range(6)]
    assert (given["maskUpperTri"], props(attention(causal, step=0, layer=0))["maskUpperTri"]) == (False, True)
    some = props(attention(run, step=9, layer=2, heads=[4, -6]))
    assert some["attention"] == [given["attention"][4], given["attention"][0]]
    assert some["attentionHeadNames"] == ["Head 4", "Head 0"]


def test_pooling_keeps_the_largest_value_of_every_block():
    pattern = random_pattern(2, 11)
    small = pooled(pattern, 4)
    assert small.shape == (2, 3, 3)
    for head, row, column in np.ndindex(2, 3, 3):
        assert small[head, row, column] == pattern[head, 4 * row :, 4 * column :][:4, :4].max()
    assert pooled(pattern, 1) is pattern


@pytest.mark.parametrize(("heads", "positions"), [(1, 40), (6, 51), (32, 512), (32, 4096), (64, 2)])
def test_circuitsvis_gets_no_more_cells_than_it_draws_in_a_second(heads, positions):
    block = block_size(heads, positions)
    assert heads * (-(-positions // block)) ** 2 <= CELLS
    assert block == 1 or heads * (-(-positions // (block - 1))) ** 2 > CELLS


def test_a_large_view_says_how_many_positions_a_cell_covers_and_no_token_closes_its_script():
    view = AttentionView(random_pattern(8, 100), [f"t{n}" for n in range(100)], range(8), False, "planted", first=5)
    assert "each cell the largest of 2 \\u00d7 2 positions" in view.document
    assert props(view)["tokens"][:2] == ["5–6", "7–8"]
    view = AttentionView(random_pattern(1, len(HOSTILE)), HOSTILE, [0], False, "</script><b>", height=300)
    assert props(view)["tokens"] == HOSTILE
    assert not any(text in view.document for text in ("<img", "</script><b>"))
    frame = view._repr_html_()
    assert frame.count("<") == 2
    assert html.unescape(re.search('srcdoc="(.*)"', frame, re.S)[1]) == view.document


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        ({"step": 24, "layer": 0}, r"step 24 does not exist"),
        ({"step": 0, "layer": 0, "heads": [6]}, r"head 6 does not exist; this track has 6"),
        ({"step": 0, "layer": 0, "heads": []}, r"heads is empty"),
        ({"step": 0, "layer": 0, "heads": "3"}, r"heads must be a list of integers"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_an_index_out_of_range_is_rejected(run, ask, text):
    with pytest.raises((TrackError, SettingError), match=text):
        attention(run, **ask)


def test_saving_to_an_unwritable_path_raises(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SinklensError, match=r"could not write .* Make room or choose another place"):
        attention(run, step=0, layer=0).save(tmp_path / "file" / "heads.html")
    with pytest.raises(SinklensError, match=r"heads.png: this view is HTML; name it .html"):
        attention(run, step=0, layer=0).save(tmp_path / "heads.png")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.browser
def test_a_saved_view_draws_every_head_without_the_network(run, browser, tmp_path):
    browser.open(attention(run, step=9, layer=2).save(tmp_path / "heads.html"))
    assert browser.js("return document.querySelectorAll('#heads canvas').length") == 7
    assert "step 9, layer 2" in browser.text("note")
    assert browser.js("return [...document.querySelectorAll('#heads h4')].map(h => h.textContent)") == [
        f"Head {head}" for head in range(6)
    ]
    inked = browser.js(
        "return [...document.querySelectorAll('#heads canvas')].map(c => new Set(new Uint32Array("
        "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size)"
    )
    assert min(inked) > 10  # each of them shows many shades
    assert (browser.requests(), browser.complaints()) == ([(tmp_path / "heads.html").as_uri()], [])


@pytest.mark.browser
def test_several_views_work_on_one_notebook_page(run, browser, tmp_path):
    views = [attention(run, step=9, layer=2), attention(run, step=3, layer=1, heads=[1, 5])]
    page = "<!doctype html><meta charset='utf-8'><body data-drawn='1'>" + "".join(view._repr_html_() for view in views)
    (tmp_path / "page.html").write_text(page)
    browser.open(tmp_path / "page.html", height=2000)
    for number, maps in ((0, 7), (1, 3)):
        browser.driver.switch_to.frame(browser.driver.find_elements("css selector", "iframe")[number])
        browser.wait("return document.body.dataset.drawn === '1'")
        assert browser.js("return document.querySelectorAll('#heads canvas').length") == maps
        browser.driver.switch_to.default_content()
    assert browser.complaints() == []


@pytest.mark.browser
def test_hostile_tokens_are_drawn_as_text_and_not_executed(browser, tmp_path):
    title = "<img src=x onerror='window.bad=1'>"
    view = AttentionView(random_pattern(2, len(HOSTILE)), HOSTILE, [0, 1], False, title)
    browser.open(view.save(tmp_path / "hostile.html"))
    assert browser.js("return document.querySelectorAll('#heads canvas').length") == 3
    assert browser.js("return [window.bad, document.images.length]") == [None, 0]
    assert title in browser.text("note")
    assert browser.complaints() == []
