"""Holes are filled and nothing else changes; a span's likelihood is the sum over its masks."""

import pytest
import torch
from likelihood_oracle import all_masks

import sinklens
from sinklens.errors import PromptError
from sinklens.experiments import holes, likelihood
from sinklens.interventions import Suffix

PARTS = ["w7 w12", 2, "w33 w5", 3, "w8"]


@pytest.mark.parametrize("architecture", ["llama", "dream"])
def test_only_holes_are_decided(worded, architecture):
    model = worded(architecture)
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


def test_the_pass_of_the_first_step_sees_all_given_parts(worded):
    model = worded()
    seen = {}
    arguments = holes(model, PARTS)
    hooks = [*arguments.pop("hooks"), ("blocks.0.hook_resid_pre", lambda value, hook: seen.setdefault(0, value))]
    run = sinklens.generate(model, **arguments, hooks=hooks, progress=False)
    mask, start = model.mask_token_id, run.prompt_length
    ids = run.tokens.clone()
    ids[0, [start, start + 1, start + 4, start + 5, start + 6]] = mask
    expected = model.run_with_cache(ids, names_filter="blocks.0.hook_resid_pre")[1]["blocks.0.hook_resid_pre"]
    torch.testing.assert_close(seen[0], expected, atol=1e-5, rtol=1e-4)


def test_the_likelihood_of_a_span_is_the_sum_over_all_its_masks(worded):
    model = worded()
    before, span, after = [5, 9], [13, 7, 20], [31, 8]
    logits = lambda ids: model(torch.cat([ids, torch.tensor([after])], dim=1)).detach()  # noqa: E731
    total = all_masks(logits, model.mask_token_id, before, span)
    found = likelihood(model, before, span, hooks=Suffix(text=after), exact=True)
    assert found.value == pytest.approx(total, abs=1e-4)
    assert found.kind == "bound"
    other = likelihood(model, before, span, hooks=Suffix(text=[40, 41]), exact=True)
    assert abs(other.value - found.value) > 1e-3  # the text after it counts


def test_hooks_act_in_the_likelihood_of_a_span(worded):
    model = worded()
    hook = ("denoise.hook_logits", lambda logits, hook: logits + 50 * (torch.arange(logits.shape[-1]) == 13))
    found = likelihood(model, [5, 9], [13], exact=True, hooks=[hook, Suffix(text=[31, 8])])
    assert found.value == pytest.approx(0.0, abs=1e-3)


def test_texts_without_holes_or_with_masks_are_refused(worded):
    model = worded()
    begins = "begins with text or token ids and has at least one hole"
    for parts, match in [
        ([], begins), (["w1"], begins), ([2, "w1"], begins), (["w1", 0], "a hole has at least one position"),
        (["w1", 1, [model.mask_token_id]], r"contain the mask token \(\d+\); write a hole as its length"),
    ]:  # fmt: skip
        with pytest.raises(PromptError, match=match):
            holes(model, parts)
