"""What the page says without a look at its figures: which heads matter, whether the answer changed."""

import re

import numpy as np
import pytest
from lab_page import PROMPT, visited

import sinklens
from sinklens.experiments import effect
from sinklens.interventions import AblateHeads, HoldSinks

pytestmark = pytest.mark.browser
ROWS = (
    "return [...document.querySelectorAll('#trial-list li')].map(row => "
    "[row.querySelector('bdi').textContent, +row.querySelector('.value').textContent, row.innerText])"
)


def test_the_heads_of_a_layer_are_tried_and_listed_by_their_effect(page, browser, tiny_llada, plain):
    page.run()
    run = page.ended("A")
    browser.choose("layer", 1)
    browser.wait("return document.getElementById('grid-readout').textContent.startsWith('layer 1')")
    browser.js("document.querySelector('.head [aria-label$=\"heads… (m)\"]').click()")
    page.pick("Try the heads of layer 1 (zero)")
    browser.wait(f"return document.body.dataset.tried === '{run}/done'", 90)
    rows = browser.js(ROWS)
    sizes = [(int(re.search(r"(\d+) % of tokens|$", row[2])[1] or 0), row[1]) for row in rows[1:]]
    assert sizes == sorted(sizes, reverse=True), "by the share of changed tokens, then by KL"
    name = "layer 1, head 5"
    shown = rows[0]  # the only one that changes the answer
    assert shown[0] == name
    found = effect(tiny_llada, PROMPT, AblateHeads(layers=[1], heads=[5]))
    assert shown[1] == pytest.approx(float(np.nanmean(found.under_replay.kl)), rel=0.05)
    assert plain.text != found.free.text
    assert f"#### 12 → {found.free.text.split()[-1]}" in shown[2]
    assert all("#### 12 →" not in row[2] for row in rows[1:])
    assert "1 head changes the number after #### (12)" in browser.text("trial-said")
    browser.js(
        "document.querySelector('#trial-list li button:last-child').click()",
    )
    page.compared()
    assert page.chips() == ["Ablate a head: layer 1, head 5, by zero, all steps"]
    browser.wait("return document.getElementById('verdict').dataset.pair")
    said = browser.text("verdict")
    assert "12 → 14 number after ####" in said
    first = (plain.canvas[0] != found.free.canvas[0]).any(-1).nonzero().flatten()[0]
    assert f"step {first} first difference of the canvases" in said
    means = [float(np.nanmean(one.kl)) for one in (found.under_replay, found.free_running)]
    assert said.startswith(f"B beside A{means[0]:.2f} nats mean KL on A's canvases")
    assert f"{means[1]:.2f} nats mean KL free-running" in said
    browser.driver.refresh()  # the trial is found again
    browser.wait(f"return document.body.dataset.tried === '{run}/done'")
    assert browser.js(ROWS) == rows


def test_the_sinks_of_all_heads_are_held_from_the_menu(page, browser, tiny_llada, plain):
    page.run()
    browser.js("document.querySelector('.head [aria-label$=\"heads… (m)\"]').click()")
    page.pick("Hold the sinks of all heads still from step 0 on")
    page.compared()
    held = sinklens.generate(tiny_llada, PROMPT, hooks=[HoldSinks(at=0)])
    assert ("same answer" in browser.text("verdict")) == (held.text == plain.text)
    assert "hooks=[HoldSinks(at=0)]" in page.python()


def test_two_models_are_compared_in_words(browser, plain):
    tiny_dream = sinklens.load("tiny-dream")
    with visited(browser, sinklens.load("tiny-llada"), compare=[sinklens.load("tiny-dream")]) as page:
        page.run()
        browser.choose("model-b", tiny_dream.name)
        page.compared()
        other = sinklens.generate(tiny_dream, PROMPT)
        answer = slice(plain.prompt_length, None)
        tokens = int((plain.canvas[0, -1, answer] != other.canvas[0, -1, other.prompt_length :]).sum())
        steps = int((plain.unmask_step[0, answer] != other.unmask_step[0, other.prompt_length :]).sum())
        said = f"{tokens} positions end with another token{steps} are decided at another step"
        assert said in browser.text("verdict")
        assert "KL" not in browser.text("verdict")
        for slot, run in (("A", plain), ("B", other)):
            score = run.sinks.scores().to_numpy()[0]
            others = (score.sum(-1, keepdims=True) - score) / (score.shape[-1] - 1)
            mean = (score > others + 3).sum(axis=(1, 2)).mean(axis=0)  # heads, by position
            listed = browser.js(
                f"return [...document.querySelectorAll('#sinks-{slot} li')].slice(1).map(row => "
                "[+row.firstChild.textContent.split(' ')[1], +row.querySelector('.value').textContent])"
            )
            assert [value for _, value in listed] == pytest.approx(sorted(mean, reverse=True)[: len(listed)], abs=0.006)
            assert all(mean[at] == pytest.approx(value, abs=0.006) for at, value in listed)
        page.quiet()
