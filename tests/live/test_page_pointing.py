"""Stopping a run, and changes made by pointing."""

import numpy as np
import pytest
from lab_page import MENU, PROMPT, shown_at_end
from selenium.webdriver.common.keys import Keys

import sinklens
from sinklens.interventions import FreezePattern, HideKeys, HoldSinks
from sinklens.views.html import visible

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("late", [False, True], ids=["at once", "steps before the answer to the request"])
def test_a_run_is_stopped_and_its_finished_steps_remain(page, browser, gate, plain, late):
    """Stop is pressed while the run waits before its fourth step."""
    page.without_changes().type(PROMPT)
    if late:
        browser.js(
            "const sent = window.fetch; window.fetch = async (path, given) => { const answer = await sent(path, given);"
            " if (String(path).endsWith('api/runs')) await new Promise((answered) => { window.answered = answered; }); "
            "return answer; }"
        )
    page.submit()
    assert gate.reached.wait(30)
    if late:
        browser.wait("return Boolean(window.answered)")
        browser.js("setTimeout(answered, 500)")
    page.waits_after(3)
    browser.click("halt")
    browser.wait("return performance.getEntriesByType('resource').some(({ name }) => name.endsWith('/cancel'))")
    gate.opened.set()
    page.ended("A")
    assert browser.text("state").startswith("Run A was stopped: 3 steps")
    words, entered = plain.sinks.vocabulary, plain.canvas[0, 3].tolist()
    assert page.tokens() == [
        "░" if token in plain.sinks.special["mask"] else visible(words[token]) for token in entered
    ]


def test_paths_keys_and_token_ids_are_chosen_by_pointing(page, browser, tiny_llada, plain):
    ids = plain.canvas[0, 0, : plain.prompt_length].tolist()
    page.without_changes()
    browser.choose("source", "ids")
    page.type(str(ids))
    browser.click("run")
    page.ended("A")
    assert page.tokens() == shown_at_end(plain)

    top = plain.sinks.top(1)[0, :, :, :, 0].to_numpy()
    step, layer, head = next(place for place in np.ndindex(top.shape) if (top[place[0]] == top[place]).sum() == 1)
    browser.js(
        "const [along, up] = arguments, node = document.getElementById('path'); "  # margins: 50 left, 10 right, 6, 36
        "node.scrollIntoView({block: 'center'}); const box = node.getBoundingClientRect(); "
        "const clientX = box.left + 50 + along * (box.width - 60), clientY = box.bottom - 36 - up * (box.height - 42); "
        "node.dispatchEvent(new MouseEvent('dblclick', {clientX, clientY, bubbles: true}))",
        step / (len(top) - 1),
        (int(top[step, layer, head]) + 0.5) / plain.canvas.shape[-1],
    )
    assert [browser.js(f"return +document.getElementById('{name}').value") for name in ("layer", "head")] == [
        layer,
        head,
    ]

    score = plain.sinks.scores().to_numpy()[0, -1]
    sinks = (score > (score.sum(-1, keepdims=True) - score) / (score.shape[-1] - 1) + 3).any(-1)
    for said, (layer, head) in (("sinks", np.argwhere(sinks)[0]), ("strongest keys", np.argwhere(~sinks)[0])):
        browser.choose("layer", layer)
        browser.choose("head", head)
        browser.wait(f"return document.getElementById('sentence').textContent.includes('layer {layer}, head {head},')")
        browser.keys("grid", "m")
        assert f"Mask its {said}, all steps" in browser.js(MENU)
        browser.keys("menu", Keys.ESCAPE)

    page.choose_head(0, 4, "Hold the sink of layer 0, head 4 still from step 0 on")  # step 0: the last one is shown
    page.compared()
    held = HoldSinks(at=0, layers=[0], heads=[4])
    page.choose_head(1, 0, "Freeze the pattern of layer 1, head 0 from step 0 on")
    page.compared()
    frozen = FreezePattern(at=0, layers=[1], heads=[0])
    browser.js("document.querySelector('#tokens .tok[data-at=\"3\"]').click()")
    page.pick("Hide position 3 from layer 1, head 0")
    page.compared()
    hidden = HideKeys(positions=[3], layers=[1], heads=[0])
    page.go_to(23)
    assert page.tokens() == shown_at_end(sinklens.generate(tiny_llada, PROMPT, hooks=[held, frozen, hidden]))
    script = page.python()
    for source in ("HoldSinks(at=0", "FreezePattern(at=0", "HideKeys(layers=[1], heads=[0], positions=[3])"):
        assert source in script


def test_a_change_that_the_lab_refuses_has_the_reason_beside_it(page, browser):
    page.run()
    browser.js("document.getElementById('auto').checked = true")
    browser.choose("add-kind", "ablate_head")
    browser.click("add-chip")
    browser.js(
        "const input = document.querySelector('#chip-fields [data-name=layer] input'); input.value = 9; "
        "document.getElementById('chip-save').click()"
    )
    said = browser.wait("return document.querySelector('#chips .chip.bad .warn')?.textContent")
    assert said.startswith("layer 9 does not exist; there are 4")
    page.without_changes()
    assert browser.js("return document.querySelector('#chips .bad')") is None
    assert len(browser.complaints_until("status of 422")) == 1
