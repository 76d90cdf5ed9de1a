"""The lab's page in a browser: run, change, compare, edit, and take the result home."""

from urllib.parse import unquote

import layouts
import numpy as np
import pytest
import torch
from building import random_hf
from lab_page import MENU, PROMPT, shown_at_end, visited
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

import sinklens
from sinklens.experiments import effect
from sinklens.interventions import AblateHeads, ForceTokens
from sinklens.views.html import visible

pytestmark = pytest.mark.browser
REFUSED = "Failed to load resource: the server responded with a status of 400 (Bad Request)"
WIDTHS = (360, 1440)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_prompt_is_shown_step_by_step_while_it_runs(page, lab, browser, gate, plain, width):
    page.open(lab.address, width)
    page.without_changes()  # a new tab shows the runs of the last one
    page.type(PROMPT)
    page.submit()
    assert gate.reached.wait(30)
    page.waits_after(3)
    assert "step 3 of 24" in browser.text("state")
    words = plain.sinks.vocabulary
    entered, left = plain.canvas[0, 2].tolist(), plain.canvas[0, 3].tolist()
    masked = plain.sinks.special["mask"]
    assert page.tokens() == ["░" if token in masked else visible(words[token]) for token in left]
    assert entered != left
    gate.opened.set()
    page.ended("A")
    assert page.tokens() == shown_at_end(plain)
    assert browser.js("return document.documentElement.scrollWidth") <= width
    wide = "return [...document.querySelectorAll('body *')].filter(n => n.getBoundingClientRect().right > WIDTH + 1"
    assert browser.js(f"{wide.replace('WIDTH', str(width))} && !n.closest('.box, .flow, dialog')).map(n => n.id)") == []


def test_a_head_is_ablated_by_a_click_and_the_runs_are_compared(page, browser, tiny_llada, plain):
    page.run()
    browser.js(  # the scores of run B arrive late, while the pointer is over a figure
        "const { fetch } = window; window.fetch = async (...given) => { if (String(given[0]).includes('/maps')) "
        "await new Promise(done => setTimeout(done, 300)); return fetch(...given); }; "
        "setInterval(() => document.getElementById('heat').dispatchEvent(new PointerEvent('pointermove')), 20)"
    )
    browser.choose("scope", "range")
    for name, step in (("scope-to", 20), ("scope-from", 2)):
        browser.js(
            f"const n = document.getElementById('{name}'); n.value = {step}; n.dispatchEvent(new Event('change'))"
        )
    page.choose_head(0, 4, "(zero)")
    page.compared()
    assert page.chips() == ["Ablate a head: layer 0, head 4, by zero, steps 2–20"]
    hooks = AblateHeads(layers=[0], heads=[4], steps=range(2, 21))
    changed = sinklens.generate(tiny_llada, PROMPT, hooks=[hooks])
    page.go_to(23)
    assert page.tokens() == shown_at_end(changed)
    last = (plain.canvas[0, -1] != changed.canvas[0, -1]) | (plain.canvas[0, -2] != changed.canvas[0, -2])
    assert page.differing() == last.nonzero().flatten().tolist()
    first = (plain.canvas[0] != changed.canvas[0]).any(-1).nonzero().flatten()[0]
    assert f"first differ at step {first}." in browser.text("compare-text")

    found = effect(tiny_llada, PROMPT, hooks)
    cells = browser.js(
        "return [...document.querySelectorAll('#change-table tbody tr')]"
        ".map(r => [1, 2].map(n => r.cells[n].textContent.replace('–', 'nan')))"
    )
    expected = np.stack([found.under_replay.kl.values[0], found.free_running.kl.values[0]], axis=1)
    np.testing.assert_allclose(np.array(cells, dtype=float), expected, rtol=0.01, atol=1e-6)
    browser.choose("scope", "all")
    browser.click("same")
    page.compared()
    assert "B runs on the canvases of A" in browser.text("compare-text")
    assert "free-running" not in browser.text("verdict")

    browser.js("document.querySelector('#chips input').click()")  # switched off
    browser.wait("return document.getElementById('compare').hidden")
    assert browser.js("return document.getElementById('show-B').disabled")
    browser.click("same")


def test_the_script_and_the_saved_page_reproduce_what_is_shown(page, browser, tmp_path, plain):
    page.run()
    page.choose_head(1, 2, "(zero)")
    page.compared()
    shown = page.tokens()
    made = {}
    exec(compile(page.python(), "lab.py", "exec"), made)
    assert torch.equal(made["first"].canvas, plain.canvas)
    assert shown_at_end(made["second"]) == shown
    saved = browser.driver.execute_async_script(
        "const [done] = arguments; fetch(document.getElementById('save-page').href).then(a => a.text()).then(done)"
    )
    file = tmp_path / "run.html"
    file.write_text(saved)
    page.fresh()
    browser.driver.get(file.as_uri())
    browser.wait("return performance.getEntriesByName('first-view').length > 0")
    assert (browser.text("prompt"), browser.text("answer")) == (f"<|startoftext|>{PROMPT}", made["second"].text)


def state_of(browser):
    return browser.js(
        "return [document.getElementById('step').value, document.getElementById('layer').value, "
        "document.getElementById('head').value, document.body.dataset.shown, document.getElementById('prompt').value, "
        "[...document.querySelectorAll('#chips .said')].map(n => n.textContent)]"
    )


def test_a_reload_and_a_second_tab_find_the_state(page, lab, browser):
    page.run()
    page.choose_head(2, 1, "(mean)")
    page.compared()
    page.go_to(9)
    before = state_of(browser)
    assert before[:3] == ["9", "2", "1"]
    page.go_to(11)
    browser.wait("return JSON.parse(sessionStorage.getItem('sinklens-lab')).state.step === 11")
    browser.driver.refresh()
    browser.wait("return document.body.dataset.shown && document.getElementById('step').value === '11'")
    page.compared()
    assert state_of(browser) == ["11", *before[1:]]

    first = browser.driver.current_window_handle
    browser.driver.switch_to.new_window("tab")
    try:
        page.open(lab.address)  # a new tab shows the newest pair, and what other tabs run
        page.compared()
        second = browser.driver.current_window_handle
        browser.driver.switch_to.window(first)
        page.run("Question: Mia has 20 pens. She loses 6 of them. How many pens are left?\nAnswer:")
        ran = browser.js("return document.body.dataset.shown")
        browser.driver.switch_to.window(second)
        browser.wait(
            f"return document.body.dataset.shown === '{ran}' && "
            "document.getElementById('prompt').value.startsWith('Question: Mia')"
        )
        page.quiet()
        page.fresh()
    finally:
        browser.driver.close()
        browser.driver.switch_to.window(first)


def test_proposals_are_listed_and_a_forced_token_decides(page, browser, tiny_llada, plain):
    page.run()
    page.go_to(0)
    at = plain.prompt_length + 6
    browser.js(f"document.querySelector('#tokens .tok[data-at=\"{at}\"]').click()")
    assert f"Hide position {at} from all heads, all steps" in browser.js(MENU)
    rows = browser.wait(
        "const rows = [...document.querySelectorAll('#proposals li')].map(r => [r.querySelector('bdi').textContent, "
        "+r.querySelector('.value').textContent]); return rows.length && rows"
    )
    with torch.no_grad():
        chances = tiny_llada.run_with_hooks(plain.canvas[:, 0])[0, at].softmax(-1)
    best = chances.topk(10)
    assert [p for _, p in rows] == pytest.approx(best.values.tolist(), abs=6e-4)
    assert rows[0][0] == visible(tiny_llada.tokenizer.decode(best.indices[:1]))
    forced = int(best.indices[3])
    browser.js("document.querySelectorAll('#proposals button')[3].click()")
    page.compared()
    page.go_to(23)
    assert page.tokens() == shown_at_end(
        sinklens.generate(tiny_llada, PROMPT, hooks=[ForceTokens(tokens={at: forced}, steps=[0])])
    )

    page.without_changes()
    page.ended("A")
    page.go_to(5)
    browser.choose("scope", "on")
    place = at + 4
    browser.js(f"document.querySelector('#tokens .tok[data-at=\"{place}\"]').click()")
    page.pick("Force a token here, from step 5 on")
    browser.js(
        "document.querySelector('#chip-fields [data-name=token] input').value = '9 9'; "
        "document.getElementById('chip-save').click()"
    )
    assert "tokens of this model" in browser.wait("return document.getElementById('chip-trouble').textContent")
    assert [line.rpartition(" - ")[2] for line in browser.complaints_until(REFUSED)] == [REFUSED]
    browser.js(
        "const input = document.querySelector('#chip-fields [data-name=token] input'); input.value = '15'; "
        "input.dispatchEvent(new Event('input'))"
    )
    offered = browser.wait(
        "const found = [...document.querySelectorAll('#token-choices button')]; "
        "return found.length && found.map(n => [n.textContent, n.ariaPressed])"
    )
    ids = [tiny_llada.tokenizer(text, add_special_tokens=False).input_ids for text in ("15", " 15")]
    known = [(text, one[0]) for text, one in zip(("15", "␣15"), ids, strict=True) if len(one) == 1]
    assert [text for text, _ in offered] == [f"{text} #{token}" for text, token in known]
    assert offered[-1][1] == "true", "with the leading space, which most tokens have"
    browser.js("document.getElementById('chip-save').click()")
    page.compared()
    assert page.chips() == [f"Force a token: position {place}, token  15, from step 5 on"]
    assert f"ForceTokens(tokens={{{place}: {ids[1][0]}}}, steps=range(5, 24))" in page.python()


def test_everything_is_done_with_keys_alone(page, browser):
    page.without_changes().type(PROMPT)
    page.submit()
    page.ended("A")
    press = lambda *keys: ActionChains(browser.driver).send_keys(*keys).perform()  # noqa: E731
    browser.js("document.activeElement.blur()")
    press("?")
    assert browser.js("return document.getElementById('help').open && !document.querySelector(':modal')")
    press(Keys.ESCAPE)
    browser.wait("return !document.getElementById('help').open && !document.activeElement.closest('dialog')")
    press("g", Keys.ARROW_RIGHT, Keys.ENTER)
    layer, head = (browser.js(f"return document.getElementById('{name}').value") for name in ("layer", "head"))
    press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ENTER)  # the third entry
    page.compared()
    assert page.chips() == [f"Mask a head's strongest keys: layer {layer}, head {head}, top 1, all steps"]
    press("x")
    page.ended("A")
    press("t", Keys.ARROW_RIGHT, "m")
    assert browser.js("return document.activeElement.getAttribute('role')") == "menuitem"
    press(Keys.ESCAPE)
    assert browser.js("return document.activeElement.id") == "tokens"
    names = "[...document.querySelectorAll('button, input, select, textarea, canvas, a[href]')]"
    nameless = (
        f"{names}.filter(n => !n.textContent.trim() && !n.ariaLabel && !(n.labels || []).length && "
        "!n.getAttribute('aria-labelledby'))"
    )
    assert browser.js(f"return {nameless}.map(n => n.id || n.outerHTML)") == []


def test_a_menu_stays_open_while_its_figure_is_scrolled_into_view(page, browser):
    page.run()
    browser.js("document.getElementById('prompt').scrollIntoView()")
    ActionChains(browser.driver).send_keys(Keys.ESCAPE, "g", Keys.ENTER).perform()
    before = browser.js("const y = scrollY; scrollBy(0, 40); if (y === scrollY) scrollBy(0, -40); return y")
    browser.driver.execute_async_script(
        "const [done] = arguments; requestAnimationFrame(() => requestAnimationFrame(done))"
    )
    assert browser.js("return scrollY") != before
    assert browser.js("return document.activeElement.getAttribute('role')") == "menuitem"
    browser.js("document.body.dispatchEvent(new WheelEvent('wheel', {bubbles: true}))")
    assert browser.js("return document.getElementById('menu').hidden && document.activeElement.id") == "grid"


def test_a_second_model_and_attention_of_any_step_are_shown(page, browser, plain):
    page.run()
    page.go_to(7)
    browser.choose("layer", 2)
    browser.choose("head", 3)
    label = "Attention of step 7, layer 2, head 3"  # before, what lies below is hidden: no scrolling
    browser.wait(f"return (document.getElementById('pattern').ariaLabel || '').startsWith('{label}')")
    browser.js("document.getElementById('circuits').scrollIntoView()")
    browser.wait("return document.getElementById('circuits').dataset.shown === '7/2/all'")
    score = plain.sinks.scores().to_numpy()[0, 7, 2, 3]
    keys = browser.js("return [...document.querySelectorAll('#keys .at')].map(n => +n.textContent)")
    assert keys == np.argsort(-score, kind="stable")[:12].tolist()
    browser.choose("model-b", "tiny-llama")
    page.compared()
    assert "tiny-llama" in browser.text("side-B-title")
    assert browser.text("text-A") == plain.text


def test_hostile_tokens_and_prompts_are_shown_and_not_executed(browser, tmp_path, monkeypatch):
    words = [f"<img/src=x/onerror=window.bad={n}>" for n in range(3, 60)]
    monkeypatch.setattr(layouts, "WORDS", ["<pad>", "<s>", "</s>", *words, "<mask>"])
    model = sinklens.load(random_hf("llama"), tokenizer=layouts.word_tokenizer(tmp_path / "words"))
    with visited(browser, model) as page:
        page.run(" ".join(words[:5]), gen_length=8)
        assert set(page.tokens()) <= {*words, "<pad>", "<s>", "</s>", "<mask>", "░"}
        page.go_to(0)
        browser.js("[...document.querySelectorAll('#tokens .tok.mask')].at(-1).click()")
        browser.wait("return document.querySelectorAll('#proposals li').length === 10")
        browser.js("document.querySelector('#proposals button').click()")
        page.compared()
        assert "<img/src" in page.chips()[0]
        assert browser.js("return [window.bad, document.images.length]") == [None, 0]
        asked = [unquote(address) for address in browser.requests()]
        assert asked
        assert [address for address in asked if not address.startswith(page.lab.address)] == []
        page.quiet()
