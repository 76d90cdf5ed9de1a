"""Patterns of a finished run: recomputed, taken from the run, or rejected."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from building import random_hf

import sinklens
from sinklens.errors import SettingError, SinklensError, TrackError
from sinklens.sinks import Record
from sinklens.tasks import held_out
from sinklens.views import attention, pattern_at, pattern_map, sink_map, writer_bars
from sinklens.views.patterns import patterns_at

PLACES = [(1, 1), (6, 2)]
SHORT = {"gen_length": 8}


def prompts(count=3):
    return [problem.prompt for problem in held_out(count)]


@pytest.fixture(scope="module")
def padded(tiny_llada):
    """Three prompts of different lengths, with the patterns of two places recorded during the run."""
    return sinklens.generate(tiny_llada, prompts(), record_sinks=Record(patterns=PLACES), **SHORT)


@pytest.mark.parametrize("name", ["tiny_llada", "tiny_llama"])
def test_a_recomputed_pattern_equals_the_one_of_the_run(shipped):
    """Also with a key/value cache, where the run computed only the last row."""
    kept = sinklens.generate(shipped, prompts(2), record_sinks=Record(patterns=PLACES), **SHORT)
    again = sinklens.generate(shipped, prompts(2), **SHORT)
    for step, layer in PLACES:
        for row in range(2):
            real = kept.real[row] & (kept.canvas[row, step] >= 0)
            expected = kept.patterns[step, layer][row]
            expected = expected[:, real[: expected.shape[1]]][:, :, real[: expected.shape[2]]]
            for run in (kept, again):
                pattern = pattern_at(run, step, layer, row)
                torch.testing.assert_close(pattern, expected, atol=2e-6, rtol=0)
                torch.testing.assert_close(pattern.sum(-1), torch.ones(pattern.shape[:2]))


def test_padding_and_positions_not_yet_reached_are_excluded(padded, tiny_llama):
    assert {tuple(pattern_at(padded, 1, 1, row).shape) for row in range(3)} == {
        (6, int(padded.real[row].sum()), int(padded.real[row].sum())) for row in range(3)
    }
    run = sinklens.generate(tiny_llama, prompts(1), **SHORT)
    for step in (0, 5):
        pattern = pattern_at(run, step, 0)
        assert pattern.shape == (6, run.prompt_length + step, run.prompt_length + step)
        assert not pattern.triu(1).any()


def test_a_trace_is_accepted_like_its_generation(tiny_llada):
    with sinklens.trace(tiny_llada, prompts(1)[0], gen_length=2) as t:
        for step in t.steps:
            pass
    torch.testing.assert_close(pattern_at(t, -1, -1), pattern_at(t.generation, 1, 3))


def test_a_run_changed_by_hooks_is_rejected_unless_it_recorded_the_pattern(tiny_llada):
    hooks = [("blocks.1.attn.hook_pattern", lambda pattern, hook: pattern.index_fill(1, torch.tensor(2), 0.0))]
    run = sinklens.generate(tiny_llada, prompts(1), hooks=hooks, **SHORT)
    assert pattern_at(run, 0, 0).shape[0] == 6  # below the change nothing differs
    for layer in (1, 3):
        with pytest.raises(
            TrackError, match=rf"step 4, layer {layer} cannot be recomputed.*Record\(patterns=\[\(4, {layer}\)\]\)"
        ):
            pattern_at(run, 4, layer)
    kept = sinklens.generate(tiny_llada, prompts(1), hooks=hooks, record_sinks=Record(patterns=[(4, 1)]), **SHORT)
    assert not pattern_at(kept, 4, 1)[2].any()
    assert pattern_at(kept, 4, 1)[1].any()


def test_a_pattern_of_reused_keys_is_rejected_and_the_policy_named(tiny_llada):
    run = sinklens.generate(tiny_llada, prompts(1), cache="dual", block_length=8, **SHORT)
    assert pattern_at(run, 0, 3).shape[0] == 6  # the first step of a block computes everything
    with pytest.raises(TrackError, match=r"because the step reused keys under DualCache\(\)\. Record"):
        pattern_at(run, 5, 3)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_masking_one_sink_is_detected_in_every_dtype(dtype):
    """Rounding moves a share of attention below the limit, a masked sink one above it."""
    model = sinklens.load("tiny-llada", dtype=dtype)
    run = sinklens.generate(model, prompts(1), steps=4)
    pattern_at(run, 2, 3)
    layer, head = 0, 4
    sink = int(run.sinks.trajectory(layer, head)[1])

    def masked(mask, hook, head=head, sink=sink):
        mask[:, head, :, sink] = -torch.inf
        return mask

    changed = sinklens.generate(model, prompts(1), steps=4, hooks=[(f"blocks.{layer}.attn.hook_attn_mask", masked)])
    with pytest.raises(TrackError, match=r"of the attention of head 4 differs"):
        pattern_at(changed, 1, layer)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rounding_over_many_layers_is_allowed(dtype):
    model = sinklens.load(random_hf("qwen3", True, dtype, num_hidden_layers=24))
    run = sinklens.generate(model, torch.randint(0, 60, (2, 30)), gen_length=8)
    for step in (0, 7):
        assert len(patterns_at(run, step, range(24))) == 24


REFUSED = [
    (lambda run, bare: pattern_at(run, 8, 0), r"step 8 does not exist; this track has 8"),
    (lambda run, bare: pattern_at(run, 0, 4), r"layer 4 does not exist; this track has 4"),
    (lambda run, bare: pattern_at(run, 0, 0, 3), r"batch 3 does not exist"),
    (lambda run, bare: pattern_at(bare, 0, 0), r"recorded no sink scores .* record_sinks=True"),
    (lambda run, bare: pattern_map(run, ["a"]), r"pattern must be the pattern of one head, .*; got Generation"),
    (lambda run, bare: writer_bars(run), "table must be a table of sinklens.experiments.write_attribution; got Gen"),
    (lambda run, bare: sink_map(run), r"track must be a sink track, .*; got Generation.* Pass its \.sinks\."),
    (lambda run, bare: pattern_at(run, True, 0), "step must be an integer; got True"),
    (lambda run, bare: pattern_at("run", 0, 0), r"run must be a run .* got 'run'"),
]


@pytest.mark.parametrize(("ask", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_a_place_outside_the_run_and_what_is_no_run_with_scores_are_rejected(padded, ask, text, unchecked):
    with pytest.raises(SinklensError, match=text):
        ask(padded, replace(padded, sinks=None))


@pytest.mark.extended
@pytest.mark.parametrize("causal_context", [True, False])
def test_steps_of_a_model_with_modes_are_computed_by_the_rule_of_their_pass(two_modes, causal_context):
    """In a batch whose first row is padded: the prompt's pass, denoise steps of both blocks, and a commit."""
    model = sinklens.load(two_modes)
    places = [(step, 1) for step in (0, 2, 4, 6)]
    given = {"gen_length": 8, "causal_context": causal_context}
    texts = ["Tom has 5.", "Tom has 5 pens and 3 cups."]
    kept = sinklens.generate(model, texts, record_sinks=Record(patterns=places), **given)
    again = sinklens.generate(model, texts, **given)
    assert not bool(kept.real[0].all())
    for step, layer in places:
        for row in range(2):
            expected = pattern_at(kept, step, layer, row)
            torch.testing.assert_close(pattern_at(again, step, layer, row), expected, rtol=0, atol=1e-5)


def test_the_picture_of_a_view_shows_the_pattern_of_its_head_with_the_tokens_of_the_step(padded):
    view = attention(padded, step=6, layer=2, row=1, heads=[3])
    ax = view.picture()
    np.testing.assert_array_equal(ax.images[0].get_array(), pattern_at(padded, 6, 2, 1)[3].numpy())
    shown = [label.get_text() for label in ax.get_xticklabels()]
    assert shown == [label.get_text() for label in ax.get_yticklabels()]
    assert (len(shown), shown[:2], "░" in shown) == (len(view.tokens), ["<|startoftext|>", "Question"], True)
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("key", "query", "tiny-llada, step 6, layer 2, head 3")
    again = view.picture(ax, caption=False)
    assert (again, again.get_title()) == (ax, "")
    with pytest.raises(TrackError, match=r"the view has 6 heads; name one, as in heads=\[0\]"):
        attention(padded, step=6, layer=2).picture()


@pytest.mark.parametrize(("queries", "keys"), [(60, 60), (200, 200), (8, 60), (3, 3)])
def test_labels_of_a_picture_do_not_overlap_and_none_is_left_out_up_to_60_positions(queries, keys):
    pattern = np.random.default_rng(0).dirichlet(np.ones(keys), queries)
    pattern[0] = np.nan
    pattern[1:, keys - 2] = 0.9
    words = [f"${number} wwwwwwwwww_" for number in range(keys)]
    ax = pattern_map(pattern, words, queries=words[keys - queries :])
    ax.figure.draw_without_rendering()
    for axis, side, count in ((ax.xaxis, "x", keys), (ax.yaxis, "y", queries)):
        boxes = [label.get_window_extent() for label in axis.get_ticklabels()]
        edges = sorted((getattr(box, f"{side}0"), getattr(box, f"{side}1")) for box in boxes)
        assert all(before[1] <= after[0] + 0.5 for before, after in itertools.pairwise(edges))
        assert len(boxes) == count if count <= 60 else 30 < len(boxes) <= 60
        assert keys - 2 in ax.get_xticks()  # the strongest key


@pytest.mark.parametrize("shape", [(6, 4, 4), (4, 3), (0, 0)])
def test_a_pattern_that_does_not_fit_its_texts_cannot_be_drawn(shape):
    with pytest.raises(SettingError, match=r"pass the pattern of one head, .query, key., one text in tokens= per key"):
        pattern_map(torch.zeros(shape), ["a"] * min(shape[-1], 4 if shape[0] else 0))
