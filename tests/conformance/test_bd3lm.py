"""dLLM's BD3LM: its end tokens, schedule and two samplers, beside the stored runs (test_stored_runs.py)."""

from itertools import pairwise

import pytest
import torch
from building import plain_pass
from stored.folders import largest_difference
from stored.runs import stored_runs

import sinklens
from sinklens.errors import CheckpointError
from sinklens.interventions import MaskSinks
from sinklens.sampling.decisions import linear_schedule

FOLDER = "bd3lm"
TOLERANCE = 1e-4


RUNS = 7
"""Runs of BD3LMSampler; the others are the model card's."""


def model_of(reference, length: int, end: int = 305) -> sinklens.Model:
    return reference.load(changes={"eos_token_id": end}, block_length=length)


def prompts_of(reference, number: int) -> list[list[int]]:
    return [[token for token in row if token >= 0] for row in reference.tensors[f"gen{number}.prompt"].tolist()]


def test_a_row_ends_with_its_own_end_token_and_until_then_equals_the_references(reference):
    """The reference goes on with a row that has ended until all have; the answers are the same."""
    stored, tensors = reference.runs[6], reference.tensors
    model = model_of(reference, stored["block_size"], stored["eos_token_id"])
    both = sinklens.generate(model, prompts_of(reference, 6), gen_length=8, steps=4, stop=False)
    for step in range(4):
        there = (tensors["gen6.canvas"][:, step] >= 0) & both.real[:, : tensors["gen6.canvas"].shape[2]]
        assert torch.equal(both.canvas[:, step, : there.shape[1]][there], tensors["gen6.canvas"][:, step][there])
    run = sinklens.generate(model, prompts_of(reference, 6), gen_length=stored["max_new_tokens"], steps=stored["steps"])
    assert run.steps_run == 4
    assert [answer.tokens for answer in run.answers] == [6, 0]
    assert torch.equal(run.tokens[0, 8:16], tensors["gen6.result"][0, 8:])
    assert torch.equal(run.tokens[1, 8:12], tensors["gen6.result"][1, 8:12])
    assert (run.tokens[1, 12:] == 309).all()


def test_the_schedule_is_the_references_rounding(reference):
    for stored in reference.runs[:RUNS]:
        blocks = -(-stored["max_new_tokens"] // stored["block_size"])
        steps = -(-stored["steps"] // blocks)
        for counts in stored["tokens_per_pass"]:
            assert linear_schedule(sum(counts), steps) == counts
    assert linear_schedule(4, 3) == [1, 1, 2]  # exact arithmetic gives 1, 2, 1
    assert all(sum(linear_schedule(masked, steps)) == masked for masked in range(40) for steps in range(1, 40))


def test_a_row_of_the_model_cards_sampler_does_not_depend_on_its_batch(reference):
    """The reference counts the blocks of a shorter row by the columns of the longest."""
    model, rows = model_of(reference, 8), prompts_of(reference, 9)
    settings = {"sampler": "bd3lm-card", "gen_length": 21, "denoising_steps": 3}
    for guidance in (0.0, 1.5):
        together = sinklens.generate(model, rows, cfg_scale=guidance, **settings)
        for row, prompt in enumerate(rows):
            alone = sinklens.generate(model, [prompt], cfg_scale=guidance, **settings)
            length = alone.canvas.shape[2]
            assert torch.equal(together.canvas[row, : alone.steps_run + 1, -length:], alone.canvas[0])
            ours, theirs = (torch.from_numpy(run.sinks.scores().fillna(0).to_numpy()) for run in (alone, together))
            assert largest_difference(theirs[row, : alone.steps_run, :, :, -length:], ours[0]) < TOLERANCE


def test_the_prompt_sees_no_answer_position_in_its_last_block_until_that_block_is_finished(reference):
    seen = []

    def keep(value, hook):
        seen.append(value[0, :, :13, 13:].amax().item())

    stored = next(run for run in stored_runs(reference) if run.number == 8)
    run = reference.repeat(stored, record_sinks=False, hooks=[("blocks.1.attn.hook_pattern", keep)])
    first = int(run.unmask_step[0, 13:16].max()) + 1
    assert first == 3
    assert seen[:first] == [0.0] * first
    assert min(seen[first:]) > 0
    model = model_of(reference, 8)
    assert model.tree.attention_blocks.start == "column"  # the rule of single passes is the model's again


def test_masked_sinks_are_exact(reference):
    """Patterns under MaskSinks equal plain attention without the strongest key of the step before."""
    model, values = model_of(reference, 8), {}

    def keep(value, hook):
        values.setdefault(hook.step, {})[hook.name] = value.clone()

    hooks = [MaskSinks(top_k=1), (lambda name: name.endswith("hook_pattern"), keep)]
    run = sinklens.generate(model, prompts_of(reference, 0)[:1], gen_length=16, hooks=hooks, record_sinks=False)
    real, names = run.real, [f"blocks.{layer}.attn" for layer in range(3)]
    columns = torch.arange(real.shape[1]) // 8
    later = torch.where(columns[None, :] <= columns[:, None], 0.0, -torch.inf)[None, None]
    for before, step in pairwise([None, *range(run.steps_run)]):
        edits = {}
        for name in names:
            hide = torch.zeros(1, 6, 1, real.shape[1])
            if before is not None:
                strongest = values[before][f"{name}.hook_pattern"].sum(2).argmax(-1)
                hide.scatter_(-1, strongest[:, :, None, None], -torch.inf)
            edits[f"{name}.hook_attn_scores"] = lambda value, hide=hide: value + hide + later
        with torch.no_grad():
            plain = by_columns(model, run.canvas[:, step], real, edits)
        for name in names:
            assert largest_difference(values[step][f"{name}.hook_pattern"], plain[f"{name}.hook_pattern"]) < 2e-4


def by_columns(model, ids, real, edits):
    """`plain_pass` without its own blocks, which count from a row's first token."""
    length = model.config.__dict__.pop("sinklens_block_length")
    try:
        return plain_pass(model, ids, real, edits).values
    finally:
        model.config.sinklens_block_length = length


def test_a_checkpoint_that_does_not_say_its_regime_is_refused_with_the_choices(reference, tmp_path):
    folder = reference.write(tmp_path)
    text = (
        r"model_type 'a2d-qwen3' does not say how the checkpoint was trained.* family='a2d-qwen3', trained by masked "
        r"diffusion .*family='bd3lm-qwen3', trained by block diffusion"
    )
    with pytest.raises(CheckpointError, match=text):
        sinklens.load(folder)
    assert sinklens.load(folder, family="a2d-qwen3").block_length is None
    assert sinklens.load(folder, block_length=4).family == "bd3lm-qwen3"
    with pytest.raises(CheckpointError, match="does not give the block length of this bd3lm-qwen3 checkpoint"):
        sinklens.load(folder, family="bd3lm-qwen3")


def test_the_full_size_config_builds_with_the_published_sizes(reference):
    """Qwen3-0.6B: 596 million parameters, tied."""
    from sinklens.families import family_named, translate
    from sinklens.model.loading import build_empty

    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "layer_types": ["full_attention"] * 28}
    empty = build_empty(translate(reference.config() | sizes, family_named("bd3lm-qwen3"), "0.6B"))
    assert sum(parameter.numel() for parameter in empty.parameters()) == 596_049_920
