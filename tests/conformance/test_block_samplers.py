"""BD3LM, SDAR, LLaDA2 and Fast-dLLM v2: schedules, ends, edits and caches, beside the stored runs."""

import pytest
import torch
from building import block_causal, plain_pass
from stored.folders import largest_difference
from stored.runs import open_folder, stored_run

import sinklens
from sinklens.sampling.decisions import linear_schedule

RUNS = 7
"""Runs of BD3LMSampler; the others are the model card's."""


@pytest.fixture
def bd3lm(conformance):
    return open_folder(conformance / "bd3lm")


@pytest.fixture
def sdar(conformance):
    return open_folder(conformance / "sdar")


@pytest.fixture
def llada2(conformance):
    return open_folder(conformance / "llada2-moe")


@pytest.fixture
def fast_dllm(conformance):
    return open_folder(conformance / "fast-dllm-v2")


def prompts_of(reference, number: int) -> list[list[int]]:
    return [[token for token in row if token >= 0] for row in reference.tensors[f"gen{number}.prompt"].tolist()]


# BD3LM


def test_a_row_ends_with_its_own_end_token_and_until_then_equals_the_references(bd3lm):
    """The reference goes on with a row that has ended until all have; the answers are the same."""
    stored, tensors = bd3lm.runs[6], bd3lm.tensors
    model = bd3lm.load(changes={"eos_token_id": stored["eos_token_id"]}, block_length=stored["block_size"])
    both = sinklens.generate(model, prompts_of(bd3lm, 6), gen_length=8, steps=4, stop=False)
    for step in range(4):
        there = (tensors["gen6.canvas"][:, step] >= 0) & both.real[:, : tensors["gen6.canvas"].shape[2]]
        assert torch.equal(both.canvas[:, step, : there.shape[1]][there], tensors["gen6.canvas"][:, step][there])
    run = sinklens.generate(model, prompts_of(bd3lm, 6), gen_length=stored["max_new_tokens"], steps=stored["steps"])
    assert run.steps_run == 4
    assert [answer.tokens for answer in run.answers] == [6, 0]
    assert torch.equal(run.tokens[0, 8:16], tensors["gen6.result"][0, 8:])
    assert torch.equal(run.tokens[1, 8:12], tensors["gen6.result"][1, 8:12])
    assert (run.tokens[1, 12:] == 309).all()


def test_the_schedule_is_the_references_rounding(bd3lm):
    for stored in bd3lm.runs[:RUNS]:
        steps = -(-stored["steps"] // -(-stored["max_new_tokens"] // stored["block_size"]))
        for counts in stored["tokens_per_pass"]:
            assert linear_schedule(sum(counts), steps) == counts
    assert linear_schedule(4, 3) == [1, 1, 2]  # exact arithmetic gives 1, 2, 1
    assert all(sum(linear_schedule(masked, steps)) == masked for masked in range(40) for steps in range(1, 40))


def test_the_prompt_sees_no_answer_position_in_its_last_block_until_that_block_is_finished(bd3lm):
    seen = []
    keep = ("blocks.1.attn.hook_pattern", lambda value, hook: seen.append(value[0, :, :13, 13:].amax().item()))
    run = bd3lm.repeat(stored_run(bd3lm, 8), record_sinks=False, hooks=[keep])
    first = int(run.unmask_step[0, 13:16].max()) + 1
    assert first == 3
    assert seen[:first] == [0.0] * first
    assert min(seen[first:]) > 0
    assert run.model.tree.attention_blocks.start == "column"  # the rule of single passes is the model's again


# SDAR


def test_a_query_gives_nothing_to_later_blocks_and_edits_of_the_mask_reach_it(sdar):
    model, ids = sdar.load(block_length=4), sdar.tensors["input_ids"][:, :10]
    seen = block_causal(torch.ones_like(ids, dtype=torch.bool), 4)
    hide = ("blocks.1.attn.hook_attn_mask", lambda value, hook: value.index_fill(-1, torch.tensor([5]), -torch.inf))
    with torch.no_grad(), model.hooks(fwd_hooks=[hide]):
        _, cache = model.run_with_cache(ids, names_filter=lambda name: name.endswith(("pattern", "sink_scores")))
    for layer in range(3):
        pattern = cache["pattern", layer]
        visible = seen.expand_as(pattern).clone()
        visible[..., 5] &= layer != 1
        assert torch.equal(pattern > 0, visible)
        torch.testing.assert_close(cache[f"blocks.{layer}.attn.hook_sink_scores"], pattern.sum(2))


def test_only_masked_positions_are_written(sdar):
    """generate.py overwrites prompt tokens if fewer masks than the share are left."""
    model, prompt = sdar.load(block_length=8), sdar.tensors["gen1.prompt"]
    settings = {"denoising_steps": 2, "remasking_strategy": "low_confidence_static"}
    run = sinklens.generate(model, prompt[:, :7], gen_length=9, **settings)
    assert torch.equal(run.tokens[:, :7], prompt[:, :7])
    assert run.unmask_step[0, 7] == 0


# LLaDA2


def test_the_track_and_the_points_say_which_tokens_were_edited_in_which_step(llada2):
    """Run 8 edits tokens while masks are left, and after."""
    shown = {"denoise.hook_commit": [], "denoise.hook_edit": []}
    hooks = [(name, lambda value, hook: shown[hook.name].append(value.clone())) for name in shown]
    run = llada2.repeat(stored_run(llada2, 8), hooks=hooks)
    canvas, mask = llada2.tensors["gen8.canvas"], llada2.facts["mask_token_id"]
    commits, edits = (torch.stack(values, 1) for values in shown.values())
    for step in range(run.steps_run - 1):
        before, after = canvas[0, step], canvas[0, step + 1]
        there = (before >= 0) & (after >= 0)
        expected = there & (before != mask) & (before != after)
        assert torch.equal(edits[0, step, : len(there)][there], expected[there])
        assert torch.equal(commits[0, step, : len(there)][there], (there & (before == mask) & (after != mask))[there])
        assert torch.equal(torch.from_numpy(run.sinks.edited.to_numpy())[0, step + 1][there], expected[there])
    assert int(edits.sum()) == llada2.runs[8]["committed_tokens_changed_later"]
    assert run.sinks.edited.isel(step=0).sum() == 0
    assert not run.sinks.renoised.any()


def test_edits_are_hidden_by_a_hook_and_a_replay_repeats_the_run(llada2):
    """Without edits, every position keeps its first token, and each block ends as soon as no mask is left."""
    stored, hidden = stored_run(llada2, 9), [("denoise.hook_edit", lambda value, hook: value & False)]
    base, kept = (llada2.repeat(stored, record_sinks=False, hooks=hooks) for hooks in ([], hidden))
    assert not ((kept.canvas[:, 1:] != kept.canvas[:, :-1]) & ~kept.undecided[:, :-1]).any()
    assert base.steps_run > kept.steps_run
    again = llada2.repeat(stored, replay=base)
    assert torch.equal(again.canvas, base.canvas)
    assert again.sinks.edited.any()


# Fast-dLLM v2


def test_a_step_with_the_sub_block_cache_computes_the_span_that_the_reference_fed(fast_dllm):
    shown, passes = [], []
    fresh = ("blocks.1.attn.hook_fresh", lambda value, hook: shown.append(value[0].nonzero()[:, 0].tolist()))
    run = fast_dllm.repeat(stored_run(fast_dllm, 2), record_sinks=False, hooks=[fresh])
    for step, columns in enumerate(shown):
        decided = (run.unmask_step[0] == step).nonzero()[:, 0].tolist()
        if len(decided) != 1 or decided[0] % 8:
            passes.append([max(columns[0], columns[-1] // 8 * 8), columns[-1] + 1])
        else:  # the finished block, with its final tokens, and the position that is decided
            assert columns == list(range(columns[0], columns[0] + 9))
            assert columns[0] % 8 == 0
    assert passes == fast_dllm.tensors["gen2.span"].tolist()


@pytest.mark.parametrize("number", [4, 6])
def test_the_sub_block_cache_equals_a_naive_one(fast_dllm, number):
    """A plain pass whose stale keys and values are put in by hand, layer by layer."""
    seen, logits, kept = [], [], {}
    hooks = [
        ("blocks.0.attn.hook_fresh", lambda v, hook: seen.append(v[0].clone())),
        ("denoise.hook_logits", lambda v, hook: logits.append(v[0].clone())),
    ]
    run = fast_dllm.repeat(stored_run(fast_dllm, number), record_sinks=False, hooks=hooks, use_block_cache=True)
    points = [f"blocks.{layer}.attn.hook_{what}" for layer in range(3) for what in ("rot_k", "v")]
    for step, fresh in enumerate(seen[:14]):

        def use(value, name, fresh=fresh):
            kept[name] = torch.where(fresh[None, :, None, None], value, kept.get(name, value))
            return kept[name]

        edits = {name: (lambda value, name=name, use=use: use(value, name)) for name in points}
        with torch.no_grad():
            plain = plain_pass(run.model, run.canvas[:, step], run.real, edits).logits[0]
        first, ours = int(fresh.nonzero()[0]), logits[step]
        places = fresh[first : first + len(ours)].nonzero()[:, 0][1:]  # the first one's own predecessor is not computed
        assert largest_difference(ours[places], plain[first + places - 1]) < 1e-3


def test_rows_of_a_batch_equal_the_references_results(fast_dllm):
    stored, model = fast_dllm.runs[8], fast_dllm.load(changes={"eos_token_id": 305}, block_length=8)
    given = {key: stored[key] for key in ("small_block_size", "threshold")}
    differ = []
    for row, prompt in enumerate(prompts_of(fast_dllm, 8)):
        result = fast_dllm.tensors["gen8.result"][row]
        length = int((result >= 0).sum()) - len(prompt)
        alone = sinklens.generate(model, [prompt], gen_length=length, **given)
        assert torch.equal(alone.tokens[0, : len(prompt) + length], result[result >= 0])
        runs = [
            sinklens.generate(
                model, [prompt], gen_length=20, small_block_size=4, threshold=0.4, use_block_cache=cached
            ).tokens
            for cached in (False, True)
        ]
        differ.append(not torch.equal(*runs))
    assert any(differ)  # stale keys change results


def test_a_prompt_of_exactly_one_block_is_seen(fast_dllm):
    """The reference neither prefills nor feeds it (gen 7); here another prompt gives another answer."""
    model, prompt = fast_dllm.load(), fast_dllm.tensors["gen7.prompt"]
    prompts = (prompt, prompt.index_fill(1, torch.tensor([2]), 50))
    first, second = (sinklens.generate(model, ids, gen_length=9, record_sinks=False) for ids in prompts)
    assert not torch.equal(first.tokens[:, 8:], second.tokens[:, 8:])
