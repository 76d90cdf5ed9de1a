"""The report: the contents of the page, its size, and what a reader sees when using its controls."""

import base64
import json
import re
import time
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from building import random_model
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

import sinklens
from sinklens.errors import SettingError, SinklensError, TrackError
from sinklens.interventions import AblateHeads
from sinklens.sinks import EpsilonOverMean, Record, build_track
from sinklens.tasks import held_out
from sinklens.views import most_moving_head, pattern_at, report
from sinklens.views.html import visible
from sinklens.views.report import Material, build, material
from sinklens.views.report_data import Numbers

HOSTILE = [
    "</script>", "<img src=x onerror='window.bad=1'>", "<b>", '"', "'", "&amp;", "\u2028", "\u202e", "\x00", "\x1b[31m",
    " ", "\n", "\t", "${7*7}", "{{data}}", "\\u003c", "░", "日本", "\U0001f600",
]  # fmt: skip
WIDTHS = (360, 1440)


def planted(
    steps=6,
    layers=2,
    heads=3,
    prompt=4,
    answer=6,
    words=None,
    padding=0,
    causal=False,
    seed=0,
    spread=1.0,
    patterns=True,
):
    """A page's material from random patterns, with matching scores; half of the answer is decided late."""
    rng = np.random.default_rng(seed)
    length = prompt + answer
    words = words or [f" w{number}" for number in range(length)]

    def pattern(step, layer):
        generator = np.random.default_rng([seed, step, layer])
        logits = generator.normal(size=(heads, length, length)).astype(np.float32) * spread
        logits[:, :, generator.integers(length, size=heads)] += 3
        if causal:
            logits += np.where(np.tri(length, dtype=bool), 0, -np.inf).astype(np.float32)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    score = np.full((1, steps, layers, heads, padding + length), np.nan, dtype=np.float32)
    for step in range(steps):
        for layer in range(layers):
            score[0, step, layer, :, padding:] = pattern(step, layer).sum(1)
    decided = np.full(padding + length, -1)
    decided[padding + prompt :] = rng.integers(steps, size=answer)
    ids = np.concatenate([np.full(padding, 2), 2 + np.arange(length) % len(words)])
    canvas = np.stack([np.where(decided >= step, 1, ids) for step in range(steps + 1)])
    real = np.arange(padding + length) >= padding
    masked = canvas[:-1] == 1
    track = build_track(
        score, canvas[None, :-1], masked[None], (masked & (canvas[1:] != 1))[None], real[None], decided[None],
        {
            "model": "some/planted", "family": "llada", "prompt_length": padding + prompt, "causal": int(causal),
            "seed": 3, "settings": json.dumps({"steps": steps}), "special": json.dumps({"mask": [1]}),
            "vocabulary": json.dumps({1: "<mask>", **{2 + n: word for n, word in enumerate(words)}}),
        },
    )  # fmt: skip
    give = (lambda step, chosen: {layer: torch.tensor(pattern(step, layer)) for layer in chosen}) if patterns else None
    return Material(track, canvas, "".join(words), "answer", give)


@pytest.fixture(scope="module")
def padded(tiny_llada):
    """Two prompts; the first is shorter, so its row begins with padding."""
    prompts = sorted(
        (problem.prompt for problem in held_out(12)), key=lambda text: len(tiny_llada.tokenizer(text).input_ids)
    )
    return sinklens.generate(tiny_llada, [prompts[0], prompts[-1]])


@pytest.fixture(scope="module")
def page(padded, tmp_path_factory):
    return report(padded, tmp_path_factory.mktemp("page") / "report.html")


def info_of(text):
    return json.loads(re.search(r'<script type="application/json" id="info">(.*?)</script>', text)[1])


def chunk_of(text, name, dtype):
    packed = re.search(rf'id="chunk-{name}">(.*?)</script>', text)[1]
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=dtype)


# Contents of the page


def test_numbers_are_those_of_the_track(padded):
    """Strongest keys, sinks, counts and the layer × head map against those of the track."""
    track = padded.sinks.isel(batch=0)
    numbers = Numbers(track, padded.canvas[0].numpy())
    first = numbers.first
    assert first > 0
    assert numbers.positions == int(padded.real[0].sum())
    for layer in range(4):
        for head in range(6):
            assert (numbers.path[:, 1 + 4 + layer * 6 + head] + first).tolist() == track.trajectory(
                layer, head
            ).tolist()
    scores = track.scores()
    means = scores.mean("head").to_numpy()[0]
    assert (numbers.path[:, 1:5] + first).tolist() == np.nanargmax(means, axis=-1).tolist()
    assert (numbers.path[:, 0] + first).tolist() == np.nanargmax(means.mean(axis=1), axis=-1).tolist()
    np.testing.assert_allclose(numbers.strength, scores.max("pos").mean("step")[0], rtol=1e-6)
    assert numbers.sink_heads.tolist() == track.detect().to_numpy()[0].sum(axis=(1, 2))[:, first:].tolist()
    assert numbers.most_moving(range(4)) == most_moving_head(padded.sinks, 0)
    assert numbers.layers_by_motion()[0] == numbers.most_moving(range(4))[0]
    given = planted()
    given.track.data["score"][0, 2, 1, 0] = 0.0  # a head without attention has no strongest key
    assert np.argwhere(Numbers(given.track, given.canvas).path < 0).tolist() == [[2, 1 + 2 + 3]]


@pytest.mark.parametrize(("coarse", "dtype"), [(False, np.uint16), (True, np.uint8)])
def test_maps_store_scores_with_the_stated_precision(monkeypatch, coarse, dtype):
    if coarse:
        monkeypatch.setattr("sinklens.views.report_data.FINE", 0)
    given = planted(spread=2.0)
    numbers = Numbers(given.track, given.canvas)
    kept = [0, 2, 5]
    for layer in (0, 1):
        maps = numbers.maps(layer, kept)
        score = given.track.scores().to_numpy()[0, kept, layer].swapaxes(0, 1)
        score = np.concatenate([score.mean(axis=0, keepdims=True), score])
        peak = np.array(maps.peaks)[:, None, None]
        np.testing.assert_allclose(peak[:, 0, 0], score.max(axis=(1, 2)), rtol=1e-6)
        read = peak * (np.frombuffer(maps.scores, dtype).reshape(score.shape) / np.iinfo(dtype).max) ** 2
        allowed = 2 * np.sqrt(score * peak) / np.iinfo(dtype).max + peak / np.iinfo(dtype).max ** 2
        assert (np.abs(read - score) <= 0.5 * allowed + 1e-6).all()
        found = given.track.detect(EpsilonOverMean(3.0)).to_numpy()[0, kept, layer].swapaxes(0, 1)
        bits = np.unpackbits(np.frombuffer(maps.sinks, np.uint8))[: score.size].reshape(score.shape)
        assert found.any()
        assert (bits[1:] == found).all()
        others = (score[0].sum(-1, keepdims=True) - score[0]) / (score.shape[-1] - 1)
        assert (bits[0] == (score[0] > others + 3)).all()


def test_attention_in_the_page_is_the_pattern(padded, page):
    text = page.read_text()
    info = info_of(text)["attention"]
    assert info["block"] == 1
    assert sorted((step, layer) for step, layer, _ in info["places"]) == [
        (step, layer) for step in (0, 8, 15, 23) for layer in range(4)
    ]
    for step, layer, side in info["places"]:
        read = (chunk_of(text, f"pattern-{step}-{layer}", np.uint8).reshape(6, side, side) / 255) ** 2
        exact = pattern_at(padded, step, layer, 0).numpy()
        assert (np.abs(read - exact) <= np.sqrt(exact) / 255 + 1 / 255**2).all()


def test_no_text_in_the_page_is_parsed_as_markup_and_only_its_scripts_are_allowed():
    text = build(planted(prompt=10, answer=10, words=HOSTILE))
    assert info_of(text)["vocabulary"][2:] == [visible(word) for word in HOSTILE]
    outside = re.sub(r"<script[^>]*>.*?</script>|<style>.*?</style>", "", text, flags=re.S)
    assert not any(word in outside for word in ("<img", "onerror", "${7*7}"))
    assert text.count("<img") == 0
    assert not re.search(r"""(?:src|href)\s*=""", outside)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not any(word in policy for word in ("unsafe", "http"))


def test_without_a_tokenizer_ids_are_shown():
    run = sinklens.generate(
        random_model("llama", False), torch.randint(0, 60, (1, 5)), gen_length=4, steps=4, block_length=4
    )
    given = info_of(build(material(run)))
    assert given["prompt"].startswith("token ids [")
    assert all(re.fullmatch(r"⟨\d+⟩", word) for word in given["vocabulary"][2:])


def test_the_page_of_a_run_that_stopped_early_says_so(tiny_llada):
    with sinklens.trace(tiny_llada, held_out(1)[0].prompt) as t:
        for step in t.steps:
            if step == 5:
                t.stop()
    given = info_of(build(material(t)))
    ran = t.generation.sinks.steps
    assert given["steps"] == list(range(ran))
    assert [f"{ran} of 24", "steps"] in given["facts"]


def test_recorded_patterns_are_the_default_and_the_page_of_a_changed_run_explains_missing_ones(tiny_llada):
    blind, prompt = AblateHeads(layers=[0], heads=[2]), held_out(1)[0].prompt
    given = info_of(build(material(sinklens.generate(tiny_llada, prompt, hooks=blind))))
    assert given["attention"]["places"] == []
    assert "hooks or the trace's block changed the run" in given["attention"]["why"]
    kept = sinklens.generate(tiny_llada, prompt, hooks=blind, record_sinks=Record(patterns=[(2, 1), (7, 3)]))
    places = info_of(build(material(kept)))["attention"]["places"]
    assert [(step, layer) for step, layer, _ in places] == [(2, 1), (7, 3)]


# Size of the page


def test_layers_are_added_while_they_fit_starting_with_the_most_moving():
    given = planted(layers=4, heads=8, prompt=60, answer=60)
    full = len(build(given))
    order = Numbers(given.track, given.canvas).layers_by_motion()
    seen = []
    for budget in (15e6, full + 1_500_000, full + 60_000):
        text = build(given, budget_mb=budget / 1e6)
        layers = list(dict.fromkeys(layer for _, layer, _ in info_of(text)["attention"]["places"]))
        assert len(text) <= budget
        assert sorted(layers) == sorted(order[: len(layers)])
        expected = f"the attention of {4 - len(layers)} more layers was left out"
        assert any(expected in note for note in info_of(text)["notes"]) == (len(layers) < 4)
        seen.append(len(layers))
    assert seen[0] == 4
    assert 1 <= seen[2] < 4


def test_positions_are_merged_if_one_layer_does_not_fit_and_the_page_says_so():
    given = planted(steps=4, layers=1, heads=8, prompt=60, answer=60)
    text = build(given, budget_mb=(len(build(given)) - 250_000) / 1e6)
    info = info_of(text)
    block = info["attention"]["block"]
    assert block > 1
    assert any(f"each cell covers {block} × {block} positions" in note for note in info["notes"])
    step, layer, side = info["attention"]["places"][1]
    assert side == -(-120 // block)
    small = chunk_of(text, f"pattern-{step}-{layer}", np.uint8).reshape(8, side, side)
    exact = np.round(255 * np.sqrt(given.patterns(step, [layer])[layer].numpy()))
    assert small[3, 2, 1] == exact[3, 2 * block : 3 * block, block : 2 * block].max()


def test_pages_of_long_runs_drop_layers_then_steps_and_say_so():
    given = planted(steps=60, layers=3, heads=8, prompt=40, answer=40, patterns=False)
    full = len(build(given))
    layer = 1.02 * len(re.search(r'id="chunk-scores-0">(.*?)</script>', build(given))[1])  # and its sinks
    fewer = info_of(build(given, budget_mb=(full - layer) / 1e6))
    assert len(fewer["held"]) < 3
    assert any(f"it holds score maps of {len(fewer['held'])} of 3 layers" in note for note in fewer["notes"])
    text = build(given, budget_mb=(full - 2.2 * layer) / 1e6)
    fewest = info_of(text)
    assert len(fewest["held"]) == 1
    assert len(fewest["steps"]) < 60
    assert {0, 59} <= set(fewest["steps"])
    assert any(f"{len(fewest['steps'])} of 60 steps are shown" in note for note in fewest["notes"])
    assert chunk_of(text, "committed", np.uint8).sum() == 40  # every decision is marked in the next step shown


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (0.3, r"budget_mb is too small: 0.00 MB are left for the scores"),
        (1.3, r"left for the attention patterns of 24"),
    ],
)
def test_a_budget_in_which_nothing_fits_is_rejected(budget, text):
    given = planted(layers=4, heads=32, prompt=100, answer=100)
    with pytest.raises(SettingError, match=text):
        build(replace(given, kept=[(step, layer) for step in range(6) for layer in range(4)]), budget)


@pytest.mark.parametrize(("place", "given", "error", "text"), [
    ("file/report.html", {}, SinklensError, "could not write .* Make room or choose another place"),
    ("report.html", {"row": 2}, TrackError, "batch 2 does not exist; this track has 2"),
    ("report.html", {"sinks": None}, TrackError, "recorded no sink scores .* record_sinks=True"),
])  # fmt: skip
def test_invalid_input_leaves_no_file(padded, tmp_path, place, given, error, text):
    (tmp_path / "file").write_text("")
    with pytest.raises(error, match=text):
        report(replace(padded, sinks=given.get("sinks", padded.sinks)), tmp_path / place, row=given.get("row", 0))
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


# What a reader sees


def tokens(browser):
    """[position in the row, text, classes] of every token shown."""
    return browser.js(
        "return [...document.querySelectorAll('.tok:not(.later)')]"
        ".map(t => [+t.dataset.at, t.textContent, [...t.classList]])"
    )


def expected_tokens(run, row, step, layer, head):
    """The same from the run."""
    track, words = run.sinks, run.sinks.vocabulary
    canvas, first = run.canvas[row], int(run.real[row].int().argmax())
    found = track.detect().to_numpy()[row, step, layer, head]
    strongest = track.trajectory(layer, head, row=row)[step]
    committed, shown = track.data["committed"].to_numpy()[row, step], []
    end = run.tokens.shape[1]
    while end > run.prompt_length and int(run.tokens[row, end - 1]) in track.special["end"]:
        end -= 1
    folded = run.tokens.shape[1] - end > 3  # more than the answer's first end token and two others
    for at in range(first, canvas.shape[1]):
        token = int(canvas[step + 1 if committed[at] else step, at])
        if token < 0:
            continue
        mask = token in track.special["mask"]
        marks = {
            "mask": mask,
            "new": committed[at],
            "sink": found[at],
            "strongest": at == strongest,
            "ended": folded and at > end,
        }
        text = "░" if mask else visible(words[token])
        shown.append([at - first, text, ["tok", *[name for name, there in marks.items() if there]]])
    return shown


def shown_step(browser):
    return int(browser.js("return document.getElementById('step').value"))


def where(browser):
    """Position named by the sentence, as counted by the run."""
    return int(re.search(r"goes to position (\d+)", browser.text("sentence"))[1])


@pytest.fixture
def opened(browser, page):
    browser.open(page)
    yield browser
    assert browser.complaints() == []


@pytest.fixture
def shown(browser, tmp_path):
    """Opens the page of some material; returns its file."""

    def show(text):
        file = tmp_path / "page.html"
        file.write_text(text)
        browser.open(file)
        return file

    yield show
    assert browser.complaints() == []


@pytest.mark.browser
def test_the_page_opens_offline_with_an_empty_console_and_its_header(opened, page, padded, tiny_llada):
    opened.js("document.getElementById('circuits').scrollIntoView()")
    opened.wait("return document.getElementById('circuits').dataset.shown")
    assert (opened.requests(), opened.complaints()) == ([page.as_uri()], [])
    ids = padded.canvas[0, 0, : padded.prompt_length][padded.real[0, : padded.prompt_length]]
    assert opened.text("prompt") == tiny_llada.tokenizer.decode(ids)
    assert opened.text("answer") == padded.answers[0].text
    for place, text in (
        ("model", "tiny-llada"), ("facts", "24 steps"), ("facts", "4 × 6 layers × heads"),
        ("notes", "Uniform attention gives each position 1"),
    ):  # fmt: skip
        assert text in opened.text(place)
    assert opened.js("return fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert opened.complaints_until("Content Security Policy")


@pytest.mark.browser
@pytest.mark.parametrize("causal", [False, True])
def test_every_step_shows_the_canvas_and_its_sinks(browser, padded, page, tiny_llama, tmp_path, causal):
    run = sinklens.generate(tiny_llama, [problem.prompt for problem in held_out(3)]) if causal else padded
    browser.open(report(run, tmp_path / "report.html") if causal else page)
    layer, head = most_moving_head(run.sinks, 0)
    path = run.sinks.trajectory(layer, head)
    for step in range(run.steps_run):
        assert shown_step(browser) == step
        assert [[at, text, sorted(marks)] for at, text, marks in tokens(browser)] == [
            [at, text, sorted(marks)] for at, text, marks in expected_tokens(run, 0, step, layer, head)
        ]
        assert where(browser) == path[step]
        browser.click("forward")
    assert ("autoregressive" in browser.text("facts")) == causal
    assert browser.complaints() == []


@pytest.mark.browser
def test_keys_and_play_move_the_step(opened):
    typed = (Keys.END, Keys.BACKSPACE, Keys.BACKSPACE, "17", Keys.ENTER)
    for keys, step in {Keys.END: 23, Keys.ARROW_LEFT: 22, typed: 17, Keys.HOME: 0, Keys.ARROW_RIGHT: 1}.items():
        opened.keys("step-number" if keys is typed else "step", *keys)
        assert shown_step(opened) == step
    opened.click("play")
    opened.wait("return +document.getElementById('step').value >= 2")
    opened.click("play")
    stopped = shown_step(opened)
    time.sleep(0.8)
    assert shown_step(opened) == stopped
    opened.keys("canvas-title", " ")
    opened.wait("return +document.getElementById('step').value === 23", seconds=40)
    opened.wait("return document.getElementById('play').getAttribute('aria-pressed') === 'false'")


def score_in(text):
    return float(re.search(r"receives ([\d.]+)", text)[1])


@pytest.mark.browser
def test_layer_and_head_can_be_chosen_by_menu_map_and_keyboard(opened, padded):
    scores = padded.sinks.scores().to_numpy()[0]

    def agrees(layer, head):
        one_head, all_heads = f"layer {layer}, head {head}", "the mean of all 24 heads"
        who = one_head if head >= 0 else f"the mean of the 6 heads of layer {layer}" if layer >= 0 else all_heads
        opened.wait(f"return document.getElementById('sentence').textContent.includes('In {who}, ')")
        one = scores[0] if layer < 0 else scores[0, layer]
        one = one.mean(axis=(0, 1)) if layer < 0 else one.mean(axis=0) if head < 0 else one[head]
        assert where(opened) == np.nanargmax(one)
        assert score_in(opened.text("sentence")) == pytest.approx(np.nanmax(one), abs=0.006)

    opened.choose("layer", 1)
    opened.choose("head", 4)
    agrees(1, 4)
    opened.point("grid", 3, 2, click=True)
    agrees(3, 2)
    opened.keys("grid", Keys.ARROW_RIGHT, Keys.ARROW_UP)
    agrees(2, 3)
    opened.keys("canvas-title", "]")
    agrees(2, 4)
    opened.choose("head", -1)
    agrees(2, -1)
    opened.choose("layer", -1)
    agrees(-1, -1)


@pytest.mark.browser
def test_tokens_and_figures_describe_a_place_and_go_to_its_step(opened, padded):
    layer, head = most_moving_head(padded.sinks, 0)
    scores, first = padded.sinks.scores().to_numpy()[0, :, layer, head], int(padded.real[0].int().argmax())
    heads = padded.sinks.detect().to_numpy()[0].sum(axis=(1, 2))
    opened.click("forward")
    for at in (3, 30):
        opened.js(f"document.querySelector('.tok[data-at=\"{at}\"]').click()")
        readout = opened.text("token-readout")
        assert readout.startswith(f"position {at + first} ")
        assert score_in(readout) == pytest.approx(scores[1, at + first], abs=0.006)
        assert f"a sink in {heads[1, at + first]} of 24 heads" in readout
    for step, at in ((0, 0), (13, 20), (23, scores.shape[1] - first - 1)):
        opened.point("heat", step, at)
        readout = opened.text("heat-readout")
        assert readout.startswith(f"step {step}, position {at + first} ")
        assert score_in(readout) == pytest.approx(scores[step, at + first], abs=0.006)
        assert shown_step(opened) == 1
    opened.point("heat", 17, 5, click=True)
    assert shown_step(opened) == 17
    ActionChains(opened.driver).move_to_element_with_offset(opened.at_rest("path"), 40, 0).click().perform()
    step = shown_step(opened)
    assert 12 <= step <= 18
    assert opened.text("path-readout").startswith(f"step {step}: position {np.nanargmax(scores[step])} ")


@pytest.mark.browser
def test_the_attention_of_a_step_layer_and_head_is_shown(opened, padded):
    opened.wait("return document.getElementById('pattern').dataset.cells")
    first = int(padded.real[0].int().argmax())
    for step, layer, head in ((8, 1, 5), (23, 3, 0)):
        for name, value in (("step", step), ("layer", layer), ("head", head)):
            opened.choose(f"attention-{name}", value)
        label = f"Attention of step {step}, layer {layer}, head {head}"
        opened.wait(f"return document.getElementById('pattern').ariaLabel.startsWith('{label}')")
        exact = pattern_at(padded, step, layer, 0).numpy()[head]
        for query, key in (np.unravel_index(exact.argmax(), exact.shape), (3, 7)):
            opened.point("pattern", int(query), int(key))
            readout = opened.text("pattern-readout")
            assert readout.startswith(f"query {query + first} ")
            assert f"gives key {key + first} " in readout
            value = 0.0 if "under" in readout else float(readout.rpartition(" ")[2])
            assert value == pytest.approx(exact[query, key], abs=float(np.sqrt(exact[query, key])) / 255 + 0.001)
        best = np.argsort(-np.nan_to_num(padded.sinks.scores().to_numpy()[0, step, layer, head]), kind="stable")[:12]
        assert opened.js("return [...document.querySelectorAll('#keys .at')].map(n => +n.textContent)") == best.tolist()


@pytest.mark.browser
@pytest.mark.parametrize("kept", [[15], [4, 15], [23, 2], [0, 9], [], [11, 12]])
def test_a_page_opens_with_the_nearest_step_it_holds_and_names_it(browser, tiny_llada, tmp_path, kept):
    record = Record(patterns=[(step, layer) for step in kept for layer in (0, 2)])
    run = sinklens.generate(tiny_llada, held_out(1)[0].prompt, record_sinks=record)
    browser.open(report(run, tmp_path / "page.html"))
    browser.wait("return document.getElementById('pattern').dataset.cells")
    held = sorted(kept) or [0, 8, 15, 23]
    for step in (0, 13):
        browser.js(
            "const s = document.getElementById('step'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))",
            step,
        )
        nearest = min(held, key=lambda one: abs(one - step))
        text = f"Step {nearest} is shown" + ("." if nearest == step else f", the nearest to step {step}.")
        browser.wait(f"return document.getElementById('attention-text').textContent.endsWith('{text}')")
        label = f"Attention of step {nearest}, layer"
        browser.wait(f"return document.getElementById('pattern').ariaLabel.startsWith('{label}')")


# Again at every look: a frame out of view does not draw, and a figure above that is drawn later moves it there.
IN_VIEW = "document.getElementById('circuits').scrollIntoView();"
SELECTED = "['step', 'layer'].map(part => document.getElementById('attention-' + part).value).join('/') + '/all'"


def drawn(browser, label=None, large=""):
    """Head names in CircuitsVis's frame once it shows `label` (by default what is selected), and the head shown at full
    size, `large` if given.
    """
    wanted = f"'{label}'" if label else SELECTED  # read at every look: the page may still be handling keys
    browser.wait(f"{IN_VIEW} return document.getElementById('circuits').dataset.shown === {wanted}")
    assert len(browser.driver.find_elements("css selector", "#circuits iframe")) == 1
    browser.driver.switch_to.frame(browser.driver.find_element("css selector", "#circuits iframe"))
    names = browser.js("return [...document.querySelectorAll('#heads h4')].map(h => h.textContent)")
    assert browser.js("return document.querySelectorAll('#heads canvas').length") == len(names) + 1
    text = "document.querySelector('#heads h2').textContent"
    large = browser.wait(f"return {text}.startsWith('{large}') && {text}")
    browser.driver.switch_to.default_content()
    return names, large


@pytest.mark.browser
def test_circuitsvis_draws_the_heads_of_the_chosen_step_and_layer(opened):
    every = [f"Head {head}" for head in range(6)]
    opened.choose("attention-step", 8)
    opened.choose("attention-layer", 1)
    opened.choose("attention-head", 4)
    assert drawn(opened, "8/1/all")[0] == every
    opened.wait("return !document.querySelector('#circuits.busy')")
    opened.choose("attention-layer", 3)
    assert drawn(opened, "8/3/all")[0] == every
    assert opened.js("return document.querySelector('#circuits iframe').title") == "Attention heads of step 8, layer 3"
    opened.choose("attention-head", 2)
    assert drawn(opened, "8/3/all", large="Head 2") == (every, "Head 2")
    opened.choose("circuits-heads", "one")
    assert drawn(opened, "8/3/one") == (["Head 2"], "Head 2")


@pytest.mark.browser
def test_hostile_text_is_shown_verbatim_and_not_executed(browser, shown):
    file = shown(build(planted(prompt=len(HOSTILE), answer=len(HOSTILE), words=HOSTILE)))
    browser.keys("step", Keys.END)
    texts = {at: text for at, text, _ in tokens(browser)}
    assert [texts[at] for at in range(2 * len(HOSTILE))] == [visible(word) for word in HOSTILE * 2]
    assert browser.text("prompt").startswith(
        "</script><img src=x onerror='window.bad=1'><b>\"'&amp;\\u2028\\u202e\\x00"
    )
    browser.point("heat", 5, 1)
    assert "<img src=x onerror='window.bad=1'>" in browser.text("heat-readout")
    drawn(browser)
    assert browser.js("return [window.bad, document.images.length]") == [None, 0]
    browser.driver.switch_to.frame(browser.driver.find_element("css selector", "#circuits iframe"))
    assert browser.js("return [window.bad, document.images.length]") == [None, 0]
    browser.driver.switch_to.default_content()
    assert browser.requests() == [file.as_uri()]


@pytest.mark.browser
@pytest.mark.parametrize(
    "sizes",
    [
        {"steps": 1},
        {"layers": 1, "heads": 1},
        {"steps": 1, "layers": 1, "heads": 1, "prompt": 1, "answer": 1},
        {"answer": 0},
    ],
)
def test_the_smallest_runs_have_a_page(browser, shown, sizes):
    shown(build(planted(**sizes)))
    drawn(browser)
    assert browser.js("return document.getElementById('play').disabled") is (sizes.get("steps") == 1)
    assert where(browser) >= 0


@pytest.mark.browser
def test_a_page_without_attention_patterns_says_why(browser, shown):
    shown(build(planted(patterns=False)))
    assert "This page has no attention patterns" in browser.text("attention-why")
    assert not browser.driver.find_element("id", "attention-choice").is_displayed()


@pytest.mark.browser
@pytest.mark.parametrize("spread", [5.0, 1.0])
def test_a_large_page_weighs_under_15_mb_and_is_drawn(browser, shown, spread):
    """32 heads × 512 positions × 4 steps of attention: as sharp as in trained heads, and the worst case."""
    text = build(planted(steps=8, layers=2, heads=32, prompt=384, answer=128, spread=spread))
    assert len(text.encode()) <= 15_000_000
    assert len({step for step, _, _ in info_of(text)["attention"]["places"]}) == 4
    shown(text)
    assert browser.js("return performance.getEntriesByName('first-view')[0].startTime") < 6000
    assert len(drawn(browser)[0]) == 32
    assert "Each cell covers" in browser.text("circuits-note")


@pytest.mark.browser
@pytest.mark.parametrize("width", WIDTHS)
def test_no_width_scrolls_sideways(browser, page, width):
    browser.open(page, width=width)
    browser.keys("step", Keys.HOME, *[Keys.ARROW_RIGHT] * 13)
    drawn(browser)
    assert browser.js("return document.documentElement.scrollWidth") <= width  # innerWidth grows with the page
    wide = "return [...document.querySelectorAll('main *')].filter(n => n.getBoundingClientRect().right > WIDTH + 1"
    wide = wide.replace("WIDTH", str(width))
    assert browser.js(f"{wide} && !n.closest('.box, .flow')).map(n => n.id || n.className)") == []
