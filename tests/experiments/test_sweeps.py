"""Sweeps: stacked runs equal single runs."""

import numpy as np
import pytest
import torch
from asked import PROMPTS
from building import random_hf

import sinklens
from sinklens.errors import SinklensError
from sinklens.experiments import compare, donors, stacking, sweep, sweeps
from sinklens.interventions import (
    AblateHeads,
    ForceTokens,
    MaskedLogits,
    MaskKeys,
    MaskSinks,
    SinkToken,
)

SHORT = {"gen_length": 6}
BY_STEP = ("kl", "top1_agreement", "confidence", "confidence_changed")
BY_ROW = ("order", "edit_distance", "same_answer")


def halve(value, hook):
    """Edits its value in place and returns None, as TransformerLens functions may."""
    if hook.step != 1:
        value.mul_(0.5)


MIXED = {
    "random keys": MaskSinks(top_k=2, pick="random_any"),
    "a head": AblateHeads(layers=[1], heads=[2]),
    "nothing": [],
    "window": MaskKeys(keep=True, window=4, positions=[0]),  # its additive mask has a row for each query
    "functions": [
        ("blocks.2.attn.hook_z", halve),
        (lambda name: name.endswith("mlp.hook_post"), lambda value, hook: value * 2),
    ],
    "token": ForceTokens(tokens={-5: 40}),
    "two": [MaskSinks(top_k=1, layers=[0]), MaskKeys(keep=True, window=8, positions=[0], layers=[1])],
    "resampled": None,  # filled in by `mixed`
}


POLICY = {"gen_length": 8, "block_length": 4}
MODES = {
    "greedy": {}, "drawn": {"temperature": 0.7}, "replay": {"replay": True}, "dual": POLICY | {"cache": "dual"},
    "dual replay": POLICY | {"cache": "dual", "replay": True},
    "keep replay": POLICY | {"cache": "keep-sinks:2", "replay": True},
}  # fmt: skip


@pytest.fixture(scope="module", params=["tiny_llada", "tiny_llama"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def mixed(model):
    reference = donors(model, PROMPTS[:1], "blocks.3.attn.hook_z", gen_length=4)
    return MIXED | {"resampled": AblateHeads(by="resample", reference=reference, layers=[3])}


@pytest.mark.parametrize("mode", MODES)
def test_a_sweep_equals_its_runs_one_at_a_time(model, mixed, mode):
    """Three prompts of different lengths, three interventions a pass, the last pass half empty."""
    settings = SHORT | MODES[mode]
    if model.causal and "cache" in settings:
        pytest.skip("an autoregressive model has no cache policy")
    replay, kept, different = settings.pop("replay", False), MaskedLogits(), 0
    base = sinklens.generate(model, PROMPTS, hooks=[kept], record_sinks=False, **settings)
    swept = sweep(model, PROMPTS, mixed, batch_size=9, replay=replay, **settings)
    assert swept["intervention"].to_numpy().tolist() == list(mixed)
    assert swept.sizes["prompt"] == 3
    assert (set(BY_STEP) <= set(swept.data_vars)) is replay
    for name, hooks in mixed.items():
        changed = MaskedLogits()
        listed = [*(hooks if isinstance(hooks, list) else [hooks]), changed]
        again = {"replay": base if replay else None, "record_sinks": False}
        run = sinklens.generate(model, PROMPTS, hooks=listed, **again, **settings)
        found, got = compare(base, run, kept.kept, changed.kept), swept.sel(intervention=name)
        assert got["answer"].to_numpy().tolist() == [answer.text for answer in run.answers], name
        for measure in (*BY_ROW, "first_divergent_step"):
            np.testing.assert_array_equal(got[measure], found[measure], err_msg=f"{name}: {measure}")
        for measure in BY_STEP if replay else ():
            np.testing.assert_allclose(got[measure], found[measure], atol=1e-4, err_msg=f"{name}: {measure}")
        different += float(found["kl"].max()) > 1e-3 if replay else int((~found["same_answer"]).sum())
    assert different > 3


def test_random_numbers_of_a_prompt_are_the_same_in_every_copy(tiny_llada):
    """Also in a run that samples tokens, two interventions that do nothing reproduce the base run."""
    swept = sweep(tiny_llada, PROMPTS, {"once": [], "again": []}, temperature=3.0, seed=3, **SHORT)
    assert swept["same_answer"].all()
    base = sinklens.generate(tiny_llada, PROMPTS, temperature=3.0, seed=3, record_sinks=False, **SHORT)
    assert swept["answer"].sel(intervention="again").to_numpy().tolist() == base.text
    other = sinklens.generate(tiny_llada, PROMPTS, temperature=3.0, seed=4, record_sinks=False, **SHORT)
    assert other.text != base.text


def test_an_intervention_that_lengthens_the_canvas_runs_separately_and_its_answers_are_compared(model):
    swept = sweep(
        model,
        PROMPTS,
        {"window": MaskKeys(keep=True, window=4, positions=[0]), "longer": SinkToken(), "none": []},
        **SHORT,
    )
    base = sinklens.generate(model, PROMPTS, record_sinks=False, **SHORT)
    changed = sinklens.generate(model, PROMPTS, hooks=[SinkToken()], record_sinks=False, **SHORT)
    longer = swept.sel(intervention="longer")
    assert longer["answer"].to_numpy().tolist() == changed.text
    for measure, values in compare(base, changed, edited=True).items():
        np.testing.assert_array_equal(longer[measure], values)
    assert longer["first_divergent_step"].isnull().all()
    assert swept.sel(intervention="none")["first_divergent_step"].to_numpy().tolist() == [-1] * 3


def test_a_token_of_the_prompt_can_be_changed(tiny_llada):
    """The edited prompts differ from those of the base run, but the runs still count as runs of one prompt."""
    swept = sweep(tiny_llada, PROMPTS[:1], {"corrupted": ForceTokens(tokens={5: 77}), "none": []}, replay=True, **SHORT)
    assert float(swept["kl"].sel(intervention="corrupted").max()) > 1e-3
    assert swept["first_divergent_step"].to_numpy().ravel().tolist() == [0, -1]


def test_batches_that_end_at_different_steps_are_concatenated(tiny_llama):
    swept = sweep(
        tiny_llama, PROMPTS, {"head": AblateHeads(layers=[1], heads=[0])}, replay=True, batch_size=1, gen_length=24
    )
    steps = [sinklens.generate(tiny_llama, prompt, record_sinks=False, gen_length=24).steps_run for prompt in PROMPTS]
    assert len(set(steps)) > 1
    assert swept["kl"].notnull().sum("step").to_numpy()[0].tolist() == steps
    assert swept["step"].to_numpy().tolist() == list(range(max(steps)))


@pytest.fixture
def rows(monkeypatch):
    """The number of rows of each run of a sweep."""
    seen, real = [], sweeps.Denoising

    def noted(*args, **kwargs):
        made = real(*args, **kwargs)
        seen.append(made.rows)
        return made

    monkeypatch.setattr(sweeps, "Denoising", noted)
    return seen


HEADS = {str(head): AblateHeads(layers=[0], heads=[head]) for head in range(5)}


@pytest.mark.parametrize(("most", "expected"), [(6, [3, 6, 6, 3]), (3, [3] * 6), (1, [1, 1, 1, 1, 1, 1] * 3)])
def test_no_pass_has_more_rows_than_asked(tiny_llada, rows, most, expected):
    swept = sweep(tiny_llada, PROMPTS, HEADS, batch_size=most, gen_length=4)
    assert (rows, swept["answer"].shape) == (expected, (5, 3))


def test_answers_without_a_tokenizer_are_ids():
    model, ids = sinklens.load(random_hf()), torch.tensor([[3, 4, 5], [6, 7, 8]])
    swept = sweep(model, ids, {"none": []}, gen_length=4)
    run = sinklens.generate(model, ids, gen_length=4)
    assert swept["answer"].to_numpy()[0].tolist() == [str(row.tolist()) for row in run.tokens[:, 3:]]


@pytest.mark.parametrize("given", [list, torch.tensor, None])
def test_one_prompt_is_a_text_or_token_ids(tiny_llada, given):
    """With and without a chat template."""
    ids = PROMPTS[0] if given is None else given(tiny_llada.encode(PROMPTS[0])[0][0].tolist())
    swept = sweep(tiny_llada, ids, {"none": []}, batch_size=1, **SHORT)
    assert swept["answer"].to_numpy().tolist() == [[sinklens.generate(tiny_llada, PROMPTS[0], **SHORT).text]]
    asked = {"chat_template": "Question: {{ messages[0]['content'] }}\nAnswer:"} | SHORT
    swept = sweep(tiny_llada, ["Tom has 5 pens. How many pens does he have?"], {"none": []}, **asked)
    run = sinklens.generate(tiny_llada, ["Tom has 5 pens. How many pens does he have?"], **asked)
    assert swept["answer"].to_numpy().tolist() == [run.text]


def test_what_cannot_be_swept_is_refused(tiny_llada):
    def first_row(value, hook):
        return value[:1]

    bad, none, size = [("blocks.0.hook_mlp_out", first_row)], {"none": []}, {"metric": lambda step: step.logits}
    two = stacking.Stacked([[], []])
    for call, match in [
        (lambda: sweep(tiny_llada, [], none), "at least one intervention and one prompt"),
        (lambda: sweep(tiny_llada, PROMPTS, {}), "at least one intervention and one prompt"),
        (lambda: sweep(tiny_llada, PROMPTS, HEADS, batch_size=0, gen_length=4), "at least 1; got 0"),
        (lambda: sweep(tiny_llada, PROMPTS, {"longer": SinkToken()}, replay=True), "longer makes the canvas longer"),
        (lambda: sweep(tiny_llada, PROMPTS, {"bad": bad}, **SHORT), r"first_row returned at .*hook_mlp_out \(step 0\)"),
        (lambda: sinklens.generate(tiny_llada, PROMPTS, hooks=[two], **SHORT), "2 stacked .* a multiple of 2 rows"),
        (lambda: sweep(tiny_llada, PROMPTS, none, cache="dual", **size), r"metric= runs single steps, and a step"),
    ]:  # fmt: skip
        with pytest.raises(SinklensError, match=match):
            call()
