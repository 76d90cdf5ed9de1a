"""Fast-dLLM v2: the sub-block cache, batches and endings, beside the stored runs (test_stored_runs.py)."""

import pytest
import torch
from building import plain_pass
from stored.folders import largest_difference
from stored.runs import stored_runs

import sinklens

FOLDER = "fast-dllm-v2"
TOLERANCE = 1e-4


def stored_run(reference, number):
    return next(run for run in stored_runs(reference) if run.number == number)


def first_of_a_block(run: sinklens.Generation, step: int, size: int) -> bool:
    """Whether a step decided the first token of a block, which the reference draws while it writes keys."""
    decided = (run.unmask_step[0] == step).nonzero()[:, 0].tolist()
    return len(decided) == 1 and decided[0] % size == 0


def test_the_block_length_is_that_of_the_config(reference):
    assert reference.load().block_length == reference.config()["bd_size"] == 8


def test_a_step_with_the_sub_block_cache_computes_the_span_that_the_reference_fed(reference):
    shown, passes = [], []

    def fresh(value, hook):
        shown.append(value[0].nonzero()[:, 0].tolist())

    run = reference.repeat(stored_run(reference, 2), record_sinks=False, hooks=[("blocks.1.attn.hook_fresh", fresh)])
    for step, columns in enumerate(shown):
        if not first_of_a_block(run, step, 8):
            passes.append([max(columns[0], columns[-1] // 8 * 8), columns[-1] + 1])
        else:  # the finished block, with its final tokens, and the position that is decided
            assert columns == list(range(columns[0], columns[0] + 9))
            assert columns[0] % 8 == 0
    assert passes == reference.tensors["gen2.span"].tolist()


@pytest.mark.parametrize("number", [4, 6])
def test_the_sub_block_cache_equals_a_naive_one(reference, number):
    """A plain pass whose stale keys and values are put in by hand, layer by layer."""
    seen, logits = [], []
    hooks = [
        ("blocks.0.attn.hook_fresh", lambda v, hook: seen.append(v[0].clone())),
        ("denoise.hook_logits", lambda v, hook: logits.append(v[0].clone())),
    ]
    run = reference.repeat(stored_run(reference, number), record_sinks=False, hooks=hooks, use_block_cache=True)
    kept = {}
    for step in range(min(run.steps_run, 14)):
        now, fresh = {}, seen[step]

        def use(value, name, now=now, fresh=fresh):
            kept[name] = torch.where(fresh[None, :, None, None], value, kept.get(name, value))
            return kept[name]

        points = [f"blocks.{layer}.attn.hook_{what}" for layer in range(3) for what in ("rot_k", "v")]
        edits = {name: (lambda value, name=name: use(value, name)) for name in points}
        with torch.no_grad():
            plain = plain_pass(run.model, run.canvas[:, step], run.real, edits).logits[0]
        first = int(fresh.nonzero()[0])
        ours = logits[step]
        places = fresh[first : first + len(ours)].nonzero()[:, 0][1:]  # the first one's own predecessor is not computed
        assert largest_difference(ours[places], plain[first + places - 1]) < 1e-3


def test_rows_of_a_batch_with_the_sub_block_cache_equal_runs_of_them_alone(reference):
    model = reference.load(changes={"eos_token_id": 305}, block_length=8)
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


def test_rows_of_a_batch_equal_the_references_results_and_runs_of_them_alone(reference):
    stored, model = reference.runs[8], reference.load(changes={"eos_token_id": 305}, block_length=8)
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


def test_a_prompt_of_exactly_one_block_is_seen(reference):
    """The reference neither prefills nor feeds it (gen 7); here another prompt gives another answer."""
    model, prompt = reference.load(), reference.tensors["gen7.prompt"]
    other = prompt.clone()
    other[0, 2] = 50
    first, second = (sinklens.generate(model, ids, gen_length=9, record_sinks=False) for ids in (prompt, other))
    assert not torch.equal(first.tokens[:, 8:], second.tokens[:, 8:])


def test_a_proposed_mask_token_does_not_keep_the_run_from_ending(reference):
    """The reference loops for ever."""

    def propose(value, hook):
        value = value.clone()
        value[:, 20] = 309
        return value

    run = sinklens.generate(
        reference.load(), reference.tensors["gen0.prompt"], gen_length=20, hooks=[("denoise.hook_candidates", propose)]
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
