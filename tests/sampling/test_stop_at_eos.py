"""Rows that have ended: what `stop_at_eos` writes, which steps it saves, and which rows a pass computes."""

from contextlib import contextmanager
from functools import cache
from unittest import mock

import pytest
import torch
from asked import PROMPTS
from building import random_hf

import sinklens
from sinklens.errors import SettingError
from sinklens.hooks import HookTree

BLOCKS = {"gen_length": 24, "block_length": 8}


@cache
def generated(model, stop=False, **settings):
    """The run of all prompts, shared by the tests that only read it."""
    return generate(model, stop_at_eos=stop, **settings)


def generate(model, prompts=PROMPTS, **settings):
    lengths = {"gen_length": 24, "steps": 24} if model.family == "dream" else BLOCKS
    return sinklens.generate(model, prompts, record_sinks=False, **lengths | settings)


def ending(canvas, start, mask, ends):
    """Index of the end token that ends an answer, by a loop over its tokens; None before that."""
    for place, token in enumerate(canvas.tolist()):
        if token == mask:
            return None
        if place >= start and token in ends:
            return place
    return None


def expected_end(run, row, model):
    """The step after which the row of a run to the last step has ended, and its canvas then, filled by hand."""
    for step in range(run.steps_run + 1):
        canvas = run.canvas[row, step].clone()
        place = ending(canvas, run.prompt_length, model.mask_token_id, model.eos_token_ids)
        if place is not None:
            for later in range(place, len(canvas)):
                if canvas[later] == model.mask_token_id:
                    canvas[later] = canvas[place]
            return step, canvas
    raise AssertionError("the answer has no end token")


@contextmanager
def passes():
    """Collects the number of rows and of positions of each pass."""
    sizes, hidden = [], HookTree.hidden

    def counted(self, ids, *args, **kwargs):
        sizes.append(tuple(ids.shape))
        return hidden(self, ids, *args, **kwargs)

    with mock.patch.object(HookTree, "hidden", counted):
        yield sizes


def rows_per_pass(model, **settings):
    """A run, and the number of rows of each of its passes."""
    with passes() as sizes:
        run = generate(model, **settings)
    return run, [rows for rows, _ in sizes]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "settings"),
    [("tiny-llada", {}), ("tiny-llada", {"temperature": 0.4}), ("tiny-llada", {"cfg_scale": 0.5}), ("tiny-dream", {})],
)
def test_a_row_equals_the_run_without_until_it_ends_and_then_holds_end_tokens(tiny_llada, name, settings):
    model = tiny_llada if name == "tiny-llada" else sinklens.load(name)
    base, run = generated(model, **settings), generated(model, stop=True, **settings)
    ended = []
    for row in range(len(PROMPTS)):
        step, canvas = expected_end(base, row, model)
        before = min(step, run.steps_run)
        assert torch.equal(run.canvas[row, :before], base.canvas[row, :before])
        assert torch.equal(run.canvas[row, -1], canvas)
        ended.append(step)
    assert run.steps_run == max(ended)
    assert min(ended) < base.steps_run or name == "tiny-dream"  # which decides the end last
    assert run.text == base.text


def test_a_row_of_a_batch_equals_a_run_of_it_alone_which_ends_earlier(tiny_llada):
    together = generated(tiny_llada, stop=True)
    fewer = 0
    for row, prompt in enumerate(PROMPTS):
        alone = generate(tiny_llada, prompt, stop_at_eos=True)
        length = alone.canvas.shape[2]
        assert torch.equal(together.canvas[row, : alone.steps_run + 1, -length:], alone.canvas[0])
        assert torch.equal(together.tokens[row, -length:], alone.tokens[0])
        fewer += alone.steps_run < together.steps_run
    assert fewer


def test_ended_rows_leave_the_pass_unless_something_is_watched(tiny_llada):
    run, counts = rows_per_pass(tiny_llada, stop_at_eos=True)
    assert counts == run.undecided[:, :-1].any(dim=2).sum(dim=0).tolist()
    assert counts[-1] < counts[0] == len(PROMPTS)
    seen = []
    hooks = [
        (name, lambda value, hook: seen.append(len(value))) for name in ("blocks.0.attn.hook_z", "denoise.hook_logits")
    ]
    for hook in hooks:
        watched, counts = rows_per_pass(tiny_llada, stop_at_eos=True, hooks=[hook])
        assert set(counts) == set(seen) == {len(PROMPTS)}
        assert torch.equal(watched.canvas, run.canvas)
    with sinklens.trace(tiny_llada, PROMPTS, stop_at_eos=True, record_sinks=False, **BLOCKS) as t:
        for _ in t.steps[-1:]:
            stream = t["blocks.1.hook_resid_post"]
    assert len(stream) == len(PROMPTS)


def test_a_recorded_run_shows_filled_positions_as_written_in_the_step_that_ended_the_row(tiny_llada):
    run = sinklens.generate(tiny_llada, PROMPTS, stop_at_eos=True, **BLOCKS)
    again = sinklens.generate(tiny_llada, PROMPTS, stop_at_eos=True, replay=run, **BLOCKS)
    assert torch.equal(again.canvas, run.canvas)
    assert run.sinks["score"].shape[:2] == (len(PROMPTS), run.steps_run)
    committed = torch.from_numpy(run.sinks["committed"].to_numpy())
    assert torch.equal(committed.int().argmax(dim=1)[run.undecided[:, 0]], run.unmask_step[run.undecided[:, 0]])
    assert (committed.sum(dim=2) > 1).any()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("cache", ["dual", "delayed"])
def test_a_cached_row_ends_as_its_own_canvases_say(tiny_llada, cache):
    run = generate(tiny_llada, stop_at_eos=True, cache=cache)
    for row in range(len(PROMPTS)):
        step, canvas = expected_end(run, row, tiny_llada)
        assert torch.equal(run.canvas[row, -1], canvas)
        assert not run.undecided[row, step].any()


def test_autoregressive_rows_that_have_ended_leave_the_pass_and_the_cache_unless_something_is_watched():
    model = sinklens.load("tiny-llama")
    settings = {"record_sinks": False, "temperature": 0.3, "gen_length": 40}
    with passes() as counts:
        run = sinklens.generate(model, PROMPTS, **settings)
        ends = torch.isin(run.canvas[:, :-1, run.prompt_length :], torch.tensor(model.eos_token_ids)).any(dim=2)
        assert [rows for rows, _ in counts] == (~ends).sum(dim=0).tolist()
        assert [positions for _, positions in counts[1:]] == [1] * (run.steps_run - 1)
        assert counts[-1][0] < len(PROMPTS)
        watched = sinklens.generate(
            model, PROMPTS, hooks=[("denoise.hook_confidence", lambda v, hook: None)], **settings
        )
        assert {rows for rows, _ in counts[run.steps_run :]} == {len(PROMPTS)}
    assert torch.equal(run.canvas, watched.canvas)
    assert torch.equal(run.canvas, sinklens.generate(model, PROMPTS, use_cache=False, **settings).canvas)


@pytest.mark.parametrize(("load", "given", "text"), [
    (
        lambda: sinklens.load("tiny-llada"),
        {"logits_eos_inf": True},
        "logits_eos_inf never proposes the token that stop_at_eos waits for",
    ),
    (
        lambda: sinklens.load(random_hf(eos_token_id=None)),
        {},
        "stop_at_eos needs an end-of-text token, and this model has none",
    ),
])  # fmt: skip
def test_settings_under_which_no_row_could_end_are_refused(load, given, text):
    with pytest.raises(SettingError, match=text):
        sinklens.generate(load(), [[5, 6]], gen_length=4, stop_at_eos=True, **given)
