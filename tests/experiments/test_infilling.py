"""Holes are filled and nothing else changes; a span's likelihood is the sum over its masks."""

import pytest
import torch

import sinklens
from sinklens.errors import PromptError, SettingError
from sinklens.experiments import holes

PARTS = ["w7 w12", 2, "w33 w5", 3, "w8"]


@pytest.mark.parametrize("architecture", ["llama", "dream"])
def test_only_holes_are_decided(model):
    run = sinklens.generate(model, **holes(model, PARTS), progress=False)
    words = [model.encode(f"w{number}", prepend_bos=False).ids[0].tolist()[0] for number in (7, 12, 33, 5, 8)]
    start = run.prompt_length
    given = {start - 2: words[0], start - 1: words[1], start + 2: words[2], start + 3: words[3], start + 7: words[4]}
    assert {place: int(run.tokens[0, place]) for place in given} == given
    for step in range(run.steps_run):
        assert not run.undecided[0, step + 1, list(given)].any()
    assert not (run.tokens[0] == model.mask_token_id).any()
    decided = [place for place in range(start, start + 7) if place not in given]
    assert run.canvas.shape[2] == start + 8
    assert (run.unmask_step[0, decided] >= 0).all()


def test_the_pass_of_the_first_step_sees_all_given_parts(model):
    seen = {}
    arguments = holes(model, PARTS)
    hooks = [*arguments.pop("hooks"), ("blocks.0.hook_resid_pre", lambda value, hook: seen.setdefault(0, value))]
    run = sinklens.generate(model, **arguments, hooks=hooks, progress=False)
    mask, start = model.mask_token_id, run.prompt_length
    ids = run.tokens.clone()
    ids[0, [start, start + 1, start + 4, start + 5, start + 6]] = mask
    expected = model.run_with_cache(ids, names_filter="blocks.0.hook_resid_pre")[1]["blocks.0.hook_resid_pre"]
    torch.testing.assert_close(seen[0], expected, atol=1e-5, rtol=1e-4)


def test_texts_without_holes_or_with_masks_are_refused(model, unchecked):
    begins = "has text or token ids and at least one hole"
    for parts, match in [
        (None, r"parts is a list of texts, .* got None"), ("w1", r"parts is a list"),
        ([], begins), (["w1"], begins), ([2, 3], begins), ([[5, 6], [7]], begins),
        (["w1", 0], "a hole has at least one position"),
        ([["w1", 1], ["w1", True]], "a hole has at least one position"),
        (["w1", 1, [model.mask_token_id]], r"contain the mask token \(\d+\); write a hole as its length"),
        ([["w1", 1], ["w1", 2]], r"these have 1 and 0, 2 and 0\. Run them one by one"),
        ([["w1", 1, "w2"], ["w1", 1]], r"these have 1 and 0, 1 and 1\. Run them one by one"),
    ]:  # fmt: skip
        with pytest.raises(PromptError, match=match):
            holes(model, parts)


def alone(model, parts, **settings):
    """The row of a run of one text, without padding."""
    run = sinklens.generate(model, **holes(model, parts), progress=False, record_sinks=False, **settings)
    return run.tokens[0, run.real[0]].tolist(), run.canvas[0][:, run.real[0]]


BATCHES = {
    "other prompts": [PARTS, ["w1", 2, "w3 w4", 3, "w9"]],
    "holes at other places": [PARTS, ["w1 w2 w3", 1, "w3 w4 w6", 3, "w9"], ["w5", 7, "w9"]],
    "a hole first": [[3, "w8 w2"], ["w1 w4 w3", 3, "w3 w9"], [1, "w3", 1, "w4 w5"]],
    "ids": [[[5, 6], 1, [7]], [[9], 1, [8]]],
}


@pytest.mark.parametrize("architecture", ["llama", "dream"])
@pytest.mark.parametrize("texts", BATCHES.values(), ids=BATCHES)
def test_rows_of_a_batch_are_those_of_texts_alone(model, texts):
    run = sinklens.generate(model, **holes(model, texts), progress=False, record_sinks=False)
    for row, parts in enumerate(texts):
        tokens, canvas = alone(model, parts)
        assert run.tokens[row, run.real[row]].tolist() == tokens
        found = run.canvas[row][:, run.real[row]]
        assert torch.equal(found[: len(canvas)], canvas)
        assert (found[len(canvas) :] == canvas[-1]).all()  # the row waits for the others


@pytest.mark.parametrize("architecture", ["llama", "dream"])
@pytest.mark.parametrize("start", [True, False])
def test_a_text_may_begin_with_a_hole(model, start, monkeypatch):
    """The start token is the prompt, if there is one, else no token is."""
    monkeypatch.setattr(type(model.tokenizer), "bos_token_id", 4 if start else None, raising=False)
    first = [4] if start else []
    tokens, _ = alone(model, [2, [7, 9], 1, [8]])
    assert (tokens[: len(first)], tokens[len(first) + 2 :][:2], tokens[-1]) == (first, [7, 9], 8)
    assert len(tokens) == len(first) + 6
    assert model.mask_token_id not in tokens
    if not start:
        with pytest.raises(PromptError, match="has no start token, so a text that begins with a hole has no prompt"):
            holes(model, [[1, [7]], [[7], 1, [8]]])


def test_text_for_each_prompt_needs_as_many_rows(worded):
    arguments = holes(worded(), [["w1", 1, "w2", 1, "w3"], ["w1", 1, "w4", 1, "w3"]])
    for hook, name in zip(arguments["hooks"], ("ForceTokens.tokens", "Suffix.text"), strict=True):
        with pytest.raises(SettingError, match=f"{name} is for 2 prompts, and the run has 1 rows"):
            sinklens.generate(worded(), "w1", hooks=hook, gen_length=3, progress=False)
