"""dLLM's BD3LM: sinklens reproduces the reference's logits, patterns and every canvas of its sampler."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from building import plain_pass
from published import assert_same_canvases, assert_same_pass, largest_difference

import sinklens
from sinklens.errors import CheckpointError
from sinklens.interventions import MaskSinks
from sinklens.sampling.decisions import linear_schedule

FOLDER = "bd3lm"
TOLERANCE = 1e-4
RUNS = 7
"""Runs of BD3LMSampler that are compared. Run 7 draws its own padding token, which the reference then hides; runs 8 to
11 are the model card's sampler."""
CARD = [(8, 0), (9, 0), (10, 0), (11, 1)]
"""Runs of the model card's sampler and the longest row of each, which is compared; the reference pads the other."""


def model_of(load, length: int, end: int = 305) -> sinklens.Model:
    return load((("eos_token_id", end),), (("block_length", length),))


def settings_of(stored: dict[str, Any]) -> dict[str, Any]:
    found = {key: stored[key] for key in ("steps", "cfg_scale", "right_shift_logits") if key in stored}
    return found | {"gen_length": stored["max_new_tokens"]}


def prompts_of(reference, number: int) -> list[list[int]]:
    return [[token for token in row if token >= 0] for row in reference.tensors[f"gen{number}.prompt"].tolist()]


def test_every_run_of_the_reference_is_compared_or_listed(reference):
    rest = [stored["sampler"] for stored in reference.runs[RUNS:]]
    assert rest == ["BD3LMSampler.sample"] + ["model card"] * 4


def test_logits_patterns_and_sink_scores_equal_the_references(reference, load):
    assert_same_pass(model_of(load, 8), reference, TOLERANCE)


def test_logits_of_a_padded_batch_equal_the_references_at_real_tokens(reference, load):
    """Blocks are counted by columns, padding included."""
    tensors = reference.tensors
    real = tensors["padded.attention_mask"].diagonal(dim1=1, dim2=2)
    with torch.no_grad():
        logits = model_of(load, 8)(tensors["padded.input_ids"], attention_mask=real.long())
    assert not real.all()
    assert largest_difference(logits[real], tensors["padded.logits"][real]) < TOLERANCE


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5])
def test_every_canvas_equals_the_references_token_for_token(reference, load, number, recording):
    stored, tensors = reference.runs[number], reference.tensors
    run = sinklens.generate(
        model_of(load, stored["block_size"], stored["eos_token_id"]), prompts_of(reference, number),
        record_sinks=recording, **settings_of(stored),
    )  # fmt: skip
    assert_same_canvases(run, *real_only(run, tensors[f"gen{number}.canvas"], tensors[f"gen{number}.result"]))


def real_only(run, canvas, result):
    """The reference's tensors with −1 on padding, whose token differs."""
    hidden = ~run.real[:, : result.shape[1]]
    result = torch.where(hidden, run.tokens[:, : result.shape[1]], result)
    return canvas.masked_fill(hidden[:, None, : canvas.shape[2]], -1), result


def test_a_row_ends_with_its_own_end_token_and_until_then_equals_the_references(reference, load):
    """The reference goes on with a row that has ended until all have; the answers are the same."""
    stored, tensors = reference.runs[6], reference.tensors
    model = model_of(load, stored["block_size"], stored["eos_token_id"])
    both = sinklens.generate(model, prompts_of(reference, 6), gen_length=8, steps=4, stop=False)
    assert_same_canvases(both, *real_only(both, tensors["gen6.canvas"], tensors["gen6.result"]))
    run = sinklens.generate(model, prompts_of(reference, 6), **settings_of(stored))
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


def card_run(reference, load, number, row, **settings):
    """A row of a stored run of the model card's sampler."""
    stored = reference.runs[number]
    blocks = -(-stored["max_new_tokens"] // stored["block_size"])
    settings = {"denoising_steps": -(-stored["steps"] // blocks), "cfg_scale": stored.get("cfg_scale", 0.0)} | settings
    model = model_of(load, stored["block_size"], stored["eos_token_id"])
    prompts = [prompts_of(reference, number)[row]]
    return sinklens.generate(model, prompts, sampler="bd3lm-card", gen_length=stored["max_new_tokens"], **settings)


@pytest.mark.parametrize(("recording", "cached"), [(True, False), (False, True)])
@pytest.mark.parametrize(("number", "row"), CARD)
def test_canvases_of_the_model_cards_sampler_equal_the_references(reference, load, number, row, recording, cached):
    run = card_run(reference, load, number, row, record_sinks=recording, use_cache=cached)
    tensors = reference.tensors
    canvas, result = (tensors[f"gen{number}.{what}"][[row]] for what in ("canvas", "result"))
    assert_same_canvases(run, canvas, result)
    assert run.prompt_length == reference.runs[number]["prompt_lengths"][row]
    assert run.steps_run <= run.settings.steps


def test_a_row_of_the_model_cards_sampler_does_not_depend_on_its_batch(reference, load):
    """The reference counts the blocks of a shorter row by the columns of the longest."""
    model, rows = model_of(load, 8), prompts_of(reference, 9)
    settings = {"sampler": "bd3lm-card", "gen_length": 21, "denoising_steps": 3}
    for guidance in (0.0, 1.5):
        together = sinklens.generate(model, rows, cfg_scale=guidance, **settings)
        for row, prompt in enumerate(rows):
            alone = sinklens.generate(model, [prompt], cfg_scale=guidance, **settings)
            length = alone.canvas.shape[2]
            assert torch.equal(together.canvas[row, : alone.steps_run + 1, -length:], alone.canvas[0])
            ours, theirs = (torch.from_numpy(run.sinks.scores().fillna(0).to_numpy()) for run in (alone, together))
            assert largest_difference(theirs[row, : alone.steps_run, :, :, -length:], ours[0]) < TOLERANCE


def test_the_prompt_sees_no_answer_position_in_its_last_block_until_that_block_is_finished(reference, load):
    seen = []

    def keep(value, hook):
        seen.append(value[0, :, :13, 13:].amax().item())

    run = card_run(reference, load, 8, 0, record_sinks=False, hooks=[("blocks.1.attn.hook_pattern", keep)])
    first = int(run.unmask_step[0, 13:16].max()) + 1
    assert first == 3
    assert seen[:first] == [0.0] * first
    assert min(seen[first:]) > 0
    model = model_of(load, 8)
    assert model.tree.attention_blocks.start == "column"  # the rule of single passes is the model's again


def test_masked_sinks_are_exact(reference, load):
    """Patterns under MaskSinks equal plain attention without the strongest key of the step before."""
    model, values = model_of(load, 8), {}

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
