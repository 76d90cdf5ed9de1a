"""The samplers on the trained twins: rows, seeds, thresholds, and edits between the decisions."""

import itertools

import pytest
import torch
from watching import PADDED, SHORT, watch

import sinklens
from sinklens.errors import NotANumberError
from sinklens.sampling.loop import unmask_steps
from sinklens.tasks import held_out

PROMPTS = [problem.prompt for problem in held_out(40)]


def test_unmask_step_is_the_step_that_wrote_the_token(tiny_llada):
    run = sinklens.generate(tiny_llada, PROMPTS[:2], record_sinks=False)
    assert (run.unmask_step[:, : run.prompt_length] == -1).all()
    for row, place in itertools.product(range(2), range(run.prompt_length, run.canvas.shape[2])):
        step = int(run.unmask_step[row, place])
        assert run.canvas[row, step, place] == tiny_llada.mask_token_id
        assert run.canvas[row, step + 1, place] == run.tokens[row, place]


@pytest.mark.parametrize(
    ("canvas", "undecided"),
    [
        ([[5, 9, 9], [5, 9, 2]], [[0, 1, 1], [0, 1, 0]]),  # a mask is left: the number of steps
        ([[5, 7, 8], [5, 7, 3], [5, 7, 3]], [[0, 1, 1], [0, 1, 0], [0, 0, 0]]),  # decided as the token that it held
    ],
)
def test_unmask_step_of_leftover_masks_and_of_unchanged_tokens(canvas, undecided):
    given = torch.tensor([canvas]), torch.tensor([undecided]).bool()
    assert unmask_steps(*given, torch.ones(1, 3, dtype=torch.bool), 1).tolist() == [[-1, 1, 0]]


# --- edits between the decisions ---------------------------------------------------------------------------------


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream"])
def test_confidence_is_computed_for_the_edited_candidate(name):
    """A token that the model finds unlikely gets low confidence, so its position waits."""
    model = sinklens.load(name)
    found = {}

    def force(value, hook):
        if hook.step == 0:
            value = value.clone()
            value[:, -1] = 17
        return value

    def keep(value, hook):
        found.setdefault(hook.step, value.clone())

    settings = {"alg": "maskgit_plus"} if name == "tiny-dream" else {}
    hooks = [("denoise.hook_candidates", force), ("denoise.hook_confidence", keep)]
    sinklens.generate(model, PROMPTS[0], hooks=hooks, record_sinks=False, **settings)
    forced = found.pop(0)
    found.clear()
    sinklens.generate(model, PROMPTS[0], hooks=hooks[1:], record_sinks=False, **settings)
    assert forced[0, -1] < 1e-3 < found[0][0, -1]
    torch.testing.assert_close(forced[:, :-1], found[0][:, :-1])


def test_an_end_token_written_by_a_hook_ends_an_autoregressive_row(tiny_llama):
    """No token follows, whether the hook edits the canvas in place or returns a new one."""

    def written(value, hook):
        if hook.step == 3:
            value[0, -1] = tiny_llama.eos_token_ids[0]

    def returned(value, hook):
        written(value := value.clone(), hook)
        return value

    for hook in (written, returned):
        run = sinklens.generate(tiny_llama, PROMPTS[:2], hooks=[("denoise.hook_canvas", hook)], record_sinks=False)
        assert (
            run.tokens[0, run.prompt_length + 2 : run.prompt_length + run.steps_run] == tiny_llama.eos_token_ids[0]
        ).all()


def test_editing_confidence_changes_the_commit_order(tiny_llada):
    """Confidence that decreases with position unmasks from left to right."""

    def left_first(value, hook):
        order = -torch.arange(value.shape[1], dtype=value.dtype).expand_as(value)
        return torch.where(value > -torch.inf, order, value)

    run = sinklens.generate(tiny_llada, PROMPTS[0], hooks=[("denoise.hook_confidence", left_first)], record_sinks=False)
    assert run.unmask_step[0, run.prompt_length :].tolist() == list(range(24))


def test_a_run_that_commits_nothing_leaves_masks_and_reports_them(tiny_llada):
    hooks = [("denoise.hook_commit", lambda value, hook: torch.zeros_like(value))]
    run = sinklens.generate(tiny_llada, PROMPTS[0], hooks=hooks, record_sinks=False)
    assert run.answers[0].masks == 24
    assert not run.answers[0].ended
    assert "24 positions still masked" in repr(run)
    assert "<|mdm_mask|>" in run.text
    assert set(run.unmask_step[0, run.prompt_length :].tolist()) == {run.steps_run}


# --- left to right -----------------------------------------------------------------------------------------------


def test_greedy_decoding_equals_that_of_transformers(tiny_llama):
    ids, _ = tiny_llama.encode(PROMPTS[0])
    theirs = tiny_llama.tree.hf.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
    ours = sinklens.generate(tiny_llama, PROMPTS[0], record_sinks=False)
    assert ours.tokens[0, : theirs.shape[1]].tolist() == theirs[0].tolist()
    assert (ours.tokens[0, theirs.shape[1] :] == -1).all()


@pytest.mark.parametrize(("architecture", "causal"), [("llama", False), ("dream", False), ("llama", True)])
def test_logits_that_are_nan_end_the_run_with_an_error(worded, architecture, causal):
    def spoil(value, hook):
        if hook.step == 2:
            value[1] = torch.nan

    with pytest.raises(NotANumberError, match=r"in step 2, the logits of \d+ of \d+ positions are NaN\. A hook"):
        sinklens.generate(
            worded(architecture, causal), ["one", "two"], gen_length=4, hooks=[("blocks.1.attn.hook_z", spoil)]
        )


@pytest.mark.parametrize(("architecture", "settings"), [
    ("dream", {}), ("dream", {"cache": "dual"}),
    ("sdar", {"sampler": "bd3lm", "right_shift_logits": True, "gen_length": 8}),
    ("sdar", {"sampler": "bd3lm", "right_shift_logits": True, "gen_length": 8, "use_cache": True}),
])  # fmt: skip
def test_shifted_logits_of_a_padded_row_are_those_of_the_row_alone_from_its_first_token_on(model, settings):
    both, alone = (watch(model, prompts, [], ["hook_logits"], **settings) for prompts in (PADDED, [SHORT]))
    for step, values in alone.values.items():
        if step and "use_cache" in settings:
            break  # the pass of two rows begins at the earlier one of their blocks
        one, other = values["denoise.hook_logits"], both.values[step]["denoise.hook_logits"]
        torch.testing.assert_close(other[:1, -one.shape[1] :], one, atol=1e-4, rtol=1e-3)
