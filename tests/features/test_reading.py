"""Features of a run are those of separate passes; a planted one is found where it fires, and its page shows it."""

import re

import numpy as np
import pytest
import torch
from planted_saes import random_sae
from watching import PADDED, entered, short

import sinklens
from sinklens.errors import SettingError
from sinklens.features import read_features, summarize_features
from sinklens.views import feature_page

POINT, EMBEDDED = "blocks.1.hook_resid_post", "blocks.0.hook_resid_pre"


@pytest.mark.parametrize(("architecture", "causal"), [("llama", False), ("dream", False), ("llama", True)])
def test_features_are_those_of_a_pass_over_each_row_alone(worded, architecture, causal):
    model, sae = worded(architecture, causal), random_sae()
    run = sinklens.generate(model, PADDED, **short(model, {}))
    found, decided = (read_features(run, sae, POINT, scope=scope, steps=[1, -1]) for scope in ("all", "decided"))
    assert found.step.values.tolist() == [1, run.steps_run - 1]
    for step in found.step.values:
        ids, real = entered(run, step)
        for row in range(2):
            alone = model.run_with_cache(ids[row : row + 1, real[row]], names_filter=POINT)[1][POINT][0]
            got = found.sel(step=step).isel(batch=row).to_numpy()
            known = ~np.isnan(got[:, 0])
            assert known.nonzero()[0].tolist() == real[row].nonzero()[:, 0].tolist()
            torch.testing.assert_close(torch.from_numpy(got[known]), sae.encode(alone.detach()), atol=2e-4, rtol=1e-3)
            seen = decided.sel(step=step).isel(batch=row).to_numpy()
            np.testing.assert_array_equal(seen, np.where(run.undecided[row, step, :, None], np.nan, got))


class Token:
    """Feature 0 fires on one token of the embedding, by its likeness; feature 1 never, feature 2 everywhere."""

    def __init__(self, vector):
        self.vector = vector

    def encode(self, x):
        hit = (x - self.vector).abs().amax(dim=-1) < 1e-5
        return torch.stack([3.0 * hit, torch.zeros(len(x)), x.norm(dim=-1)], dim=1)

    def decode(self, features):
        return features.new_zeros(len(features), 24)


@pytest.fixture(scope="module")
def found(worded):
    model = worded()
    run = sinklens.generate(model, PADDED, gen_length=6, steps=6, record_sinks=False)
    token = int(model.to_tokens("w10", prepend_bos=False)[0, -1])
    sae = Token(model.tree.hf.model.embed_tokens.weight[token].detach())
    return model, run, sae, token, summarize_features([run, run], sae, EMBEDDED, [0, 1, -1], top=3)


def test_the_examples_of_a_planted_feature_are_its_token(found):
    _, run, sae, token, (hit, never, always) = found
    for example in hit.examples:
        canvas = run.canvas[example.row, example.step]
        assert (example.value, example.values[example.place]) == (3.0, 3.0)
        assert canvas[example.column] == example.tokens[example.place] == token
        assert example.tokens == canvas[run.real[example.row]].tolist()
    assert {(one.run, one.row, one.column) for one in hit.examples} >= {(0, 1, 2), (1, 1, 2)}  # w8 w9 w10 …
    assert (never.examples, str(never.mean_value)) == ([], "nan")
    lengths = read_features(run, sae, EMBEDDED).to_numpy()[..., 2]
    strongest = np.sort(np.nanmax(lengths, axis=1, initial=0.0).ravel())[::-1]  # of each position, over the steps
    assert [one.value for one in always.examples] == pytest.approx(np.repeat(strongest, 2)[:3].tolist())
    assert always.firing == {"prompt": 1.0, "masked": 1.0, "committed": 1.0}


def test_firing_is_counted_by_state_and_step(found):
    _, run, sae, token, (hit, *_) = found
    values = read_features(run, sae, EMBEDDED).to_numpy()[..., 0]
    prompt = [
        values[row, step, column] > 0
        for row in range(2) for step in range(run.steps_run) for column in range(run.prompt_length)
        if run.real[row, column]
    ]  # fmt: skip
    assert hit.firing["prompt"] == pytest.approx(sum(prompt) / len(prompt))
    assert hit.firing["masked"] == 0.0
    share = [(run.canvas[:, step][run.real] == token).float().mean().item() for step in range(run.steps_run)]
    assert (hit.by_step.tolist(), hit.mean_value) == (pytest.approx(share), 3.0)
    (masked,) = summarize_features(run, sae, EMBEDDED, [2], scope="masked")
    assert {one.state for one in masked.examples} == {"masked"}
    assert (masked.firing["masked"], str(masked.firing["prompt"])) == (1.0, "nan")


def test_the_page_shows_examples_with_step_and_state_and_runs_nothing(found, tmp_path):
    model, *_, summaries = found
    feature_page(model, summaries, tmp_path / "page.html", title="<b>Features</b>")
    text = (tmp_path / "page.html").read_text()
    assert "<h1>&lt;b&gt;Features&lt;/b&gt;</h1>" in text
    assert text.count('<p class="example">') == sum(len(one.examples) for one in summaries) == 5
    assert re.search(r"3, step \d, position 2, prompt:", text)
    assert '<b><span class="a8">w10</span></b>' in text.replace("␣", "").replace(" w10", "w10")
    assert "<script" not in text
    assert "default-src &#39;none&#39;" in text
    assert "http" not in text.replace("http-equiv", "")


@pytest.mark.parametrize(("call", "match"), [
    (lambda run, sae: summarize_features([], sae, EMBEDDED, [0]), "at least one run"),
    (lambda run, sae: summarize_features(run, sae, EMBEDDED, [3]), "feature 3 does not exist; there are 3"),
    (lambda run, sae: summarize_features(run, sae, EMBEDDED, 2.5), "features must be a list of integers"),
    (lambda run, sae: read_features(run, sae, EMBEDDED, steps=[6]), "step 6 does not exist; there are 6"),
])  # fmt: skip
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_read_is_refused(found, call, match):
    with pytest.raises(SettingError, match=match):
        call(found[1], found[2])
