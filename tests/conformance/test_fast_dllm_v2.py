"""Fast-dLLM v2: sinklens reproduces the reference's logits, patterns and every canvas."""

from typing import Any

import pytest
import torch
from building import plain_pass
from published import assert_same_pass, largest_difference

import sinklens

FOLDER = "fast-dllm-v2"
TOLERANCE = 1e-4
COMPARED = [0, 1, 2, 3, 4, 5, 6]
"""Run 2 used the sub-block cache. Run 7 shows a defect of the
reference, run 8 is its batched sampler, which is compared by its results."""


def model_of(load, length: int, end: int = 305) -> sinklens.Model:
    return load((("eos_token_id", end),), (("block_length", length),))


def settings_of(stored: dict[str, Any], prompt: int) -> dict[str, Any]:
    """The reference decodes max_new_tokens // block_size blocks, the first one from the prompt's end, and one token."""
    blocks, size = stored["max_new_tokens"] // stored["block_size"], stored["block_size"]
    found = {"small_block_size": stored["small_block_size"], "threshold": float(stored["threshold"])}
    found |= {"use_block_cache": True} if stored.get("use_block_cache") else {}
    return found | {"gen_length": (prompt // size + blocks) * size + 1 - prompt}


def first_of_a_block(run: sinklens.Generation, step: int, size: int) -> bool:
    """Whether a step decided the first token of a block, which the reference draws while it writes keys."""
    decided = (run.unmask_step[0] == step).nonzero()[:, 0].tolist()
    return len(decided) == 1 and decided[0] % size == 0


def test_every_run_of_the_reference_is_compared_or_listed(reference):
    assert [stored["sampler"] for stored in reference.runs] == ["generate"] * 8 + ["batch_sample"]


def test_the_block_length_is_that_of_the_config(reference, load):
    assert load().block_length == reference.config()["bd_size"] == 8


def test_logits_patterns_and_sink_scores_equal_the_references(reference, load):
    assert_same_pass(load(), reference, TOLERANCE)


@pytest.mark.parametrize("recording", [True, False])
@pytest.mark.parametrize("number", COMPARED)
def test_every_canvas_equals_the_references_token_for_token(reference, load, number, recording):
    stored, prompt = reference.runs[number], reference.tensors[f"gen{number}.prompt"]
    size = stored["block_size"]
    run = sinklens.generate(
        model_of(load, size, stored["stop_token"]), prompt, record_sinks=recording,
        **settings_of(stored, prompt.shape[1]),
    )  # fmt: skip
    passes = [step for step in range(run.steps_run) if not first_of_a_block(run, step, size)]
    canvas, result = reference.tensors[f"gen{number}.canvas"], reference.tensors[f"gen{number}.result"]
    assert len(passes) == canvas.shape[1]
    for step, stored_canvas in zip(passes, canvas[0], strict=True):
        there = stored_canvas >= 0
        assert torch.equal(run.canvas[0, step, : len(there)][there], stored_canvas[there]), f"step {step}"
    assert torch.equal(run.tokens[:, : result.shape[1]], result)


def test_a_step_with_the_sub_block_cache_computes_the_span_that_the_reference_fed(reference, load):
    stored, tensors = reference.runs[2], reference.tensors
    shown, passes = [], []

    def fresh(value, hook):
        shown.append(value[0].nonzero()[:, 0].tolist())

    run = sinklens.generate(
        model_of(load, 8), tensors["gen2.prompt"], record_sinks=False, hooks=[("blocks.1.attn.hook_fresh", fresh)],
        **settings_of(stored, 13),
    )  # fmt: skip
    for step, columns in enumerate(shown):
        if not first_of_a_block(run, step, 8):
            passes.append([max(columns[0], columns[-1] // 8 * 8), columns[-1] + 1])
        else:  # the finished block, with its final tokens, and the position that is decided
            assert columns == list(range(columns[0], columns[0] + 9))
            assert columns[0] % 8 == 0
    assert passes == tensors["gen2.span"].tolist()


@pytest.mark.parametrize("number", [4, 6])
def test_the_sub_block_cache_equals_a_naive_one(reference, load, number):
    """A plain pass whose stale keys and values are put in by hand, layer by layer."""
    stored, prompt = reference.runs[number], reference.tensors[f"gen{number}.prompt"]
    model = model_of(load, stored["block_size"])
    settings = settings_of(stored, prompt.shape[1]) | {"use_block_cache": True}
    seen, logits = [], []
    hooks = [
        ("blocks.0.attn.hook_fresh", lambda v, hook: seen.append(v[0].clone())),
        ("denoise.hook_logits", lambda v, hook: logits.append(v[0].clone())),
    ]
    run = sinklens.generate(model, prompt, record_sinks=False, hooks=hooks, **settings)
    kept = {}
    for step in range(min(run.steps_run, 14)):
        now, fresh = {}, seen[step]

        def use(value, name, now=now, fresh=fresh):
            kept[name] = torch.where(fresh[None, :, None, None], value, kept.get(name, value))
            return kept[name]

        points = [f"blocks.{layer}.attn.hook_{what}" for layer in range(3) for what in ("rot_k", "v")]
        edits = {name: (lambda value, name=name: use(value, name)) for name in points}
        with torch.no_grad():
            plain = plain_pass(model, run.canvas[:, step], run.real, edits).logits[0]
        first = int(fresh.nonzero()[0])
        ours = logits[step]
        places = fresh[first : first + len(ours)].nonzero()[:, 0][1:]  # the first one's own predecessor is not computed
        assert largest_difference(ours[places], plain[first + places - 1]) < 1e-3


def test_rows_of_a_batch_with_the_sub_block_cache_equal_runs_of_them_alone(reference, load):
    model = model_of(load, 8)
    rows = [[token for token in row if token >= 0] for row in reference.tensors["gen8.prompt"].tolist()]
    given = {"small_block_size": 4, "threshold": 0.4, "use_block_cache": True, "gen_length": 20}
    together, plain = sinklens.generate(model, rows, **given), {}
    for row, prompt in enumerate(rows):
        alone = sinklens.generate(model, [prompt], **given)
        places = slice(len(rows[1]) - len(prompt), len(rows[1]) - len(prompt) + alone.canvas.shape[2])
        assert torch.equal(together.canvas[row, : alone.steps_run + 1, places], alone.canvas[0])
        plain[row] = torch.equal(
            sinklens.generate(model, [prompt], **given | {"use_block_cache": False}).tokens, alone.tokens
        )
    assert not all(plain.values())  # stale keys change results


def test_rows_of_a_batch_equal_the_references_results_and_runs_of_them_alone(reference, load):
    stored, model = reference.runs[8], model_of(load, 8)
    rows = [[token for token in row if token >= 0] for row in reference.tensors["gen8.prompt"].tolist()]
    assert {len(row) % 8 for row in rows} == {5, 3}
    given = {key: stored[key] for key in ("small_block_size", "threshold")}
    for row, prompt in enumerate(rows):
        result = reference.tensors["gen8.result"][row]
        length = int((result >= 0).sum()) - len(prompt)
        alone = sinklens.generate(model, [prompt], gen_length=length, **given)
        assert torch.equal(alone.tokens[0, : len(prompt) + length], result[result >= 0])
    together = sinklens.generate(model, rows, gen_length=20, **given)
    for row, prompt in enumerate(rows):
        alone = sinklens.generate(model, [prompt], gen_length=20, **given)
        places = slice(len(rows[1]) - len(prompt), len(rows[1]) - len(prompt) + alone.canvas.shape[2])
        assert torch.equal(together.canvas[row, : alone.steps_run + 1, places], alone.canvas[0])


def test_a_prompt_of_exactly_one_block_is_seen(reference, load):
    """The reference neither prefills nor feeds it (gen 7); here another prompt gives another answer."""
    model, prompt = load(), reference.tensors["gen7.prompt"]
    other = prompt.clone()
    other[0, 2] = 50
    first, second = (sinklens.generate(model, ids, gen_length=9, record_sinks=False) for ids in (prompt, other))
    assert not torch.equal(first.tokens[:, 8:], second.tokens[:, 8:])


def test_a_proposed_mask_token_does_not_keep_the_run_from_ending(reference, load):
    """The reference loops for ever."""

    def propose(value, hook):
        value = value.clone()
        value[:, 20] = 309
        return value

    run = sinklens.generate(
        load(), reference.tensors["gen0.prompt"], gen_length=20, hooks=[("denoise.hook_candidates", propose)]
    )
    assert (run.tokens[0] == 309).nonzero()[:, 0].tolist()[0] == 20
    assert run.steps_run <= run.settings.steps


def test_the_full_size_configs_build_with_the_published_sizes(reference):
    """Qwen2.5-1.5B, tied: 1.54 billion parameters; 7B: 7.62."""
    from sinklens.families import family_named, translate
    from sinklens.model.loading import build_empty

    small = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    small |= {"num_key_value_heads": 2, "vocab_size": 151936, "layer_types": ["full_attention"] * 28}
    large = small | {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28}
    large |= {"num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}
    for sizes, expected in ((small, 1_543_714_304), (large, 7_615_616_512)):
        empty = build_empty(translate(reference.config() | sizes, family_named("fast-dllm-v2"), "here"))
        assert sum(parameter.numel() for parameter in empty.parameters()) == expected
