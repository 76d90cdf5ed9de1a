"""The report as a widget: a click in a browser becomes the model's selection, as anywidget's interface has it."""

import base64
import json
import sys

import pytest

import sinklens
from sinklens.errors import SettingError
from sinklens.sinks import Record
from sinklens.tasks import held_out
from sinklens.views import run_widget

PAGE = """<!doctype html><meta charset="utf-8"><body data-drawn="1"><div id="cell"></div><script type="module">
const state = {state}, saved = [];
const model = {{
  get: (name) => state[name], set: (name, value) => {{ state[name] = value; }},
  save_changes: () => {{ saved.push(state.selection); }}, on() {{}}, off() {{}}, send() {{}},
}};
window.saved = saved;
const module = await import("data:text/javascript;base64,{code}");
window.leave = await module.default.render({{ model, el: document.getElementById("cell") }});
</script>"""


@pytest.fixture(scope="module")
def widget(tiny_llada):
    prompt = held_out(1)[0].prompt
    run = sinklens.generate(tiny_llada, prompt, steps=4, gen_length=8, record_sinks=Record(patterns=[(2, 1)]))
    return run_widget(run, height=2400)


@pytest.mark.browser
def test_a_click_on_the_canvas_or_in_a_pattern_is_the_selection(widget, browser, tmp_path):
    state = json.dumps({name: getattr(widget, name) for name in ("document", "height", "selection")})
    code = base64.b64encode(widget._esm.encode()).decode()
    page = tmp_path / "cell.html"
    page.write_text(PAGE.format(state=state.replace("<", "\\u003c"), code=code))
    browser.open(page, height=2600)
    browser.wait("return document.querySelector('iframe')")
    browser.driver.switch_to.frame(browser.driver.find_element("tag name", "iframe"))
    browser.wait("return performance.getEntriesByName('attention').length > 0")
    browser.point("pattern", 5, 3, click=True)
    browser.js("document.querySelectorAll('.tok')[4].click()")
    read = "return Number(document.getElementById(arguments[0]).value)"
    layer, head, pattern_head = (browser.js(read, name) for name in ("layer", "head", "attention-head"))
    browser.driver.switch_to.default_content()
    browser.wait("return saved.length === 2")
    mean = [None if number < 0 else number for number in (layer, head)]
    assert browser.js("return saved") == [
        {"step": 2, "layer": 1, "head": pattern_head, "query": 5, "key": 3},
        {"step": 0, "layer": mean[0], "head": mean[1], "query": None, "key": 4},
    ]
    browser.js("leave(); document.querySelector('iframe').contentWindow.postMessage('', '*')")
    assert (browser.complaints(), browser.requests()) == ([], [page.as_uri()])


def test_the_selection_of_a_notebook_reaches_python(widget):
    heard, chosen = [], {"step": 2, "layer": 1, "head": 0, "query": 5, "key": 3}
    assert widget.selection == {}
    widget.observe(lambda change: heard.append(change.new), "selection")
    widget.set_state({"selection": chosen})  # what a message of the notebook's page calls
    assert (widget.selection, heard) == (chosen, [chosen])


def test_without_anywidget_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(SettingError, match=r"a widget needs anywidget .*pip install 'sinklens\[notebook\]'"):
        run_widget(type("Run", (), {"STANDS_FOR": sinklens.Generation})())
