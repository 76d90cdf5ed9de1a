"""The page in use: the first visit, what a failed request leaves, the history, links, sizes and colors of text."""

import pytest
from lab_page import MENU, shown_at_end, visited

import sinklens
from sinklens.errors import SinklensError
from sinklens.live import reading

pytestmark = pytest.mark.browser
TOKENS = "[...document.querySelectorAll('#tokens .tok')]"
BUTTONS = "[...document.querySelectorAll('button')].filter(n => n.checkVisibility())"
ROWS = "document.querySelectorAll('#history li')"

# Texts that are smaller than 12.5 px or have a contrast below 4.5 : 1, by the formula of WCAG 2; disabled controls and
# texts that nobody sees do not count. The background is that of the nearest ancestors, blended.
UNREADABLE = """
const number = (text) => text.match(/[\\d.]+/g).map(Number), scale = (text) => (text.startsWith('color(') ? 255 : 1);
const rgba = (text) => {
  const [r, g, b, a = 1] = number(text.replace('srgb', '')), by = scale(text);
  return [r * by, g * by, b * by, a];
};
const over = ([r, g, b, a], [s, t, u]) => [r * a + s * (1 - a), g * a + t * (1 - a), b * a + u * (1 - a)];
const paper = matchMedia('(prefers-color-scheme: dark)').matches ? [0, 0, 0] : [255, 255, 255];
function ground(node) {
  const colors = [];
  for (let at = node; at; at = at.parentElement) colors.push(rgba(getComputedStyle(at).backgroundColor));
  return colors.reverse().reduce((below, color) => over(color, below), paper);
}
const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const light = (color) => color.reduce((sum, c, n) => sum + linear(c / 255) * [0.2126, 0.7152, 0.0722][n], 0);
const left = 'script, style, noscript, option, :disabled, [aria-disabled=true]', seen = { visibilityProperty: true };
const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement, style = getComputedStyle(node);
  const text = walker.currentNode.textContent.trim();
  if (!text || !node.checkVisibility(seen) || node.closest(left) || node.getBoundingClientRect().width < 2) continue;
  const below = ground(node), [one, two] = [light(over(rgba(style.color), below)), light(below)];
  const contrast = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05), size = parseFloat(style.fontSize);
  const seldom = [text.slice(0, 30), size, Math.round(contrast * 100) / 100, node.className || node.tagName];
  if (size < 12.5 || contrast < 4.5) found.push(seldom);
}
return found;
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_text_is_large_and_dark_enough_to_read_and_the_slider_in_sight(page, browser, scheme, width):
    features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}  # no color is on its way to another
    emulated = {"features": [{"name": name, "value": value} for name, value in features.items()]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", emulated)
    try:
        page.open(page.lab.address, width)
        page.run()
        page.choose_head(1, 5, "(zero)")
        page.compared()
        browser.js("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
        page.go_to(9)
        browser.js("document.querySelector('#chips input').click()")  # off, which is grey
        assert browser.js(UNREADABLE) == []
        assert browser.js("return document.documentElement.scrollWidth") <= width
        names = browser.js(
            f"return {BUTTONS}.filter(n => !n.closest('li')).map(n => n.ariaLabel || n.textContent.trim())"
        )
        assert sorted(names) == sorted(set(names)), "no two buttons have one name"
        primary = "filter(n => getComputedStyle(n).backgroundColor === getComputedStyle(document.body).color)"
        assert browser.js(f"return {BUTTONS}.{primary}.map(n => n.id)") == ["run"]
        browser.click("form-fold")
        assert browser.js(f"return {BUTTONS}.{primary}.map(n => n.id)") == ["run-b"]
        fonts = browser.js(
            "return ['grid', 'heat', 'path'].map((id) => document.getElementById(id).getContext('2d').font)"
        )
        assert all(float(font.split("px")[0]) >= 12.5 for font in fonts)
        browser.size(width, 700)
        for place in ("path", "attention", "history") if width == 390 else ():
            browser.js(f"document.getElementById('{place}').scrollIntoView()")
            top, bottom = browser.js(
                "const box = document.getElementById('step').getBoundingClientRect(); return [box.top, box.bottom]"
            )
            assert 0 <= top < bottom <= 80, "the slider stays in sight on a phone"
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_failed_request_clears_its_panel_and_says_why(browser, monkeypatch):
    """The pattern, proposals and comparison of one model do not stay on the page under another one's name."""
    for name in ("patterns", "proposals"):
        real = getattr(reading, name)

        def refuse(spec, outcome, model, *rest, real=real, name=name):
            if spec.model == "tiny-canvas":
                raise SinklensError(f"no {name} today")
            return real(spec, outcome, model, *rest)

        monkeypatch.setattr(reading, name, refuse)
    with visited(browser, "tiny-llada", compare=["tiny-canvas"]) as page:
        page.run()
        browser.choose("layer", 2)
        browser.wait("return document.querySelectorAll('#keys li').length > 5")
        page.unfold()
        browser.choose("model-name", "tiny-canvas")
        page.run()
        assert browser.wait("return document.getElementById('attention-why').textContent") == "no patterns today"
        seen = "return [...document.querySelectorAll('#attention .pair, #attention .circuits')].map(n => n.hidden)"
        assert browser.js(seen) == [True, True]
        assert browser.js(
            "return [document.getElementById('pattern').width, document.querySelectorAll('#keys li').length]"
        ) == [0, 0]
        page.go_to(0)
        browser.js("document.querySelector('#tokens .tok.mask, #tokens .part:last-child .tok').click()")
        page.browser.js("document.getElementById('prompt').focus()")
        browser.driver.get_log("browser")
        browser.js(
            "[...document.querySelectorAll('#history button')].filter(n => n.textContent === 'as A').at(-1).click()"
        )
        browser.wait(
            "return document.getElementById('attention-why').hidden && document.querySelectorAll('#keys li').length > 5"
        )
        assert browser.text("title").startswith("tiny-llada")


def test_the_first_visit_offers_a_run_and_run_b_waits_for_a(browser, tiny_llada):
    with visited(browser, sinklens.load("tiny-llada")) as page:
        prompt = browser.js("return document.getElementById('prompt').value")
        assert prompt.startswith("Question:")
        browser.choose("add-kind", "ablate_head")
        browser.click("add-chip")
        browser.js("document.querySelector('#chip-fields [data-name=layer] input').value = 1; "
                   "document.querySelector('#chip-fields [data-name=head] input').value = 5; "
                   "document.getElementById('chip-save').click()")  # fmt: skip
        browser.click("run-b")  # there is no run A yet: the form's comes first
        page.compared()
        assert browser.js(
            "return ['form', 'changes'].map(id => document.getElementById(id).classList.contains('folded'))"
        ) == [True, True]
        assert "seed 0" in browser.text("form-said")
        assert "Ablate a head: layer 1, head 5" in browser.text("changes-said")
        assert browser.js("return document.getElementById('form').getBoundingClientRect().height") < 80
        plain = sinklens.generate(tiny_llada, prompt)
        browser.click("show-A")
        page.ended("A")
        assert page.tokens() == shown_at_end(plain)
        hidden = browser.js(
            "return [...document.querySelectorAll('#tokens .tok')].filter(n => n.offsetWidth === 0).length"
        )
        ends = tiny_llada.eos_token_ids
        final = plain.canvas[0, -1].tolist()
        assert hidden == len(final) - 1 - next(at for at, token in enumerate(final) if token in ends)
        browser.js("document.querySelector('#tokens .more').click()")
        assert browser.js(f"return {TOKENS}.every(n => n.offsetWidth > 0)")
        page.quiet()


def test_the_history_can_be_filtered_and_undone(page, browser):
    page.run()
    page.choose_head(2, 1, "(mean)")
    page.compared()
    newest = "document.querySelector('#history li')"
    assert "seed 0 · Ablate a head: layer 2, head 1, by mean, all steps" in browser.js(f"return {newest}.textContent")
    box = (
        "const box = document.getElementById('history-filter'); box.value = arguments[0]; "
        "box.dispatchEvent(new Event('input'))"
    )
    browser.js(box, "mean")
    assert browser.js(f"return {ROWS}.length") >= 1
    browser.js(box, "no such run")
    assert browser.js(f"return {ROWS}.length") == 0
    browser.js(box, "")
    before = browser.js(f"return {ROWS}.length")
    browser.js(f"[...{newest}.querySelectorAll('button')].find(n => n.textContent === 'Delete').click()")
    assert "Deleted: Question: Tom" in browser.js(f"return {newest}.textContent")
    browser.js(f"{newest}.querySelector('button').click()")
    assert "by mean" in browser.js(f"return {newest}.textContent")
    assert browser.js(f"return {ROWS}.length") == before


def test_colors_layers_and_files_are_offered(page, browser, tiny_llada, plain):
    page.run()
    page.go_to(4)
    for name, said in (("confidence", "Full color: 1"), ("entropy", "nats"), ("decided", "the last step")):
        browser.choose("token-color", name)
        browser.wait(f"return document.querySelector('.card.canvas .head p').textContent.includes('{said}')")
    colored = browser.js(
        f"return {TOKENS}.filter(n => n.style.backgroundColor !== 'transparent').map(n => +n.dataset.at)"
    )
    assert colored == [at for at, step in enumerate(plain.unmask_step[0].tolist()) if 0 <= step <= 4]
    browser.choose("token-color", "attention")
    browser.js("document.querySelector('#tokens .tok[data-at=\"30\"]').click()")
    page.pick("Read position 30 layer by layer")
    cells = browser.wait(
        "const cells = [...document.querySelectorAll('#lens-table td')]; return cells.length && cells.length"
    )
    assert cells == 4 * 24
    browser.js(
        "window.saved = []; let last; URL.createObjectURL = (blob) => { last = blob.text(); return '#'; }; "
        "HTMLAnchorElement.prototype.click = function () { last.then((text) => saved.push([this.download, text])); }; "
        "document.querySelectorAll('.save').forEach(node => node.click())"
    )
    figures = ["Heads", "Step by position", "Path of the strongest key", "Attention"]
    for figure in figures:
        browser.click("save-picture")
        assert browser.js(MENU) == figures
        page.pick(figure)
    saved = dict(browser.wait("return saved.length === document.querySelectorAll('.save').length + 4 && saved"))
    (layers,) = [text for name, text in saved.items() if "layers" in name]
    assert layers.splitlines()[0] == "layer," + ",".join(map(str, range(24)))
    assert sum(text.startswith("\ufffdPNG") for text in saved.values()) == len(figures)
