"""Caches: block diffusion decides the same tokens with one, and Fast-dLLM's policies compute what theirs compute."""

import pytest
import torch
from building import plain_pass
from stored.folders import largest_difference
from stored.runs import open_folder, stored_run

import sinklens
from sinklens.errors import SettingError
from sinklens.hooks.window_cache import WindowCache
from sinklens.interventions import MaskedLogits, MaskSinks
from sinklens.sinks import Record

FOLDERS = ["sdar", "bd3lm", "fast-dllm-v2"]
SETTINGS = [
    ("sdar", {}),
    ("sdar", {"remasking_strategy": "entropy_bounded", "eb_threshold": 4.0, "stop": False}),
    ("sdar", {"temperature": 1.0, "seed": 4, "stop": False}),
    ("bd3lm", {"steps": 11}),
    ("bd3lm", {"cfg_scale": 1.5, "stop": False}),
    ("bd3lm", {"right_shift_logits": True, "stop": False}),
    ("fast-dllm-v2", {"threshold": 0.4}),
    ("fast-dllm-v2", {"small_block_size": 2, "stop": False}),
]


@pytest.fixture(scope="module")
def references(conformance):
    return {name: open_folder(conformance / name) for name in FOLDERS}


@pytest.fixture(scope="module")
def models(references):
    """By folder, with blocks of 4."""
    return {name: reference.load(block_length=4) for name, reference in references.items()}


def rows_of(reference):
    """Prompts of different lengths."""
    ids = reference.tensors["input_ids"][0].tolist()
    return [ids[:10], ids[5:12], ids[3:18]]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_canvases_are_equal_with_and_without_a_cache(references, models, name, settings):
    model, rows = models[name], rows_of(references[name])

    def edit(value, hook):  # of cached tokens, which empties the cache
        return value.index_fill(1, torch.tensor([value.shape[1] - 19]), 17) if hook.step == 7 else value

    for prompts, hooks in (([rows[0]], []), (rows, []), ([rows[0]], [("denoise.hook_canvas", edit)])):
        plain, cached = (
            sinklens.generate(model, prompts, gen_length=13, record_sinks=False, use_cache=use, hooks=hooks, **settings)
            for use in (False, True)
        )
        assert torch.equal(cached.canvas, plain.canvas)
        assert plain.steps_run > 4


@pytest.mark.parametrize("name", FOLDERS)
def test_a_step_computes_only_what_is_new_and_key_positions_say_which_keys_it_attends_to(references, models, name):
    model, seen = models[name], []

    def see(value, hook):
        seen.append((value.shape[2], len(hook.key_positions), value.shape[3]))

    run = sinklens.generate(
        model, rows_of(references[name])[:1], gen_length=12 if name == "bd3lm" else 14, use_cache=True, stop=False,
        record_sinks=False, hooks=[("blocks.1.attn.hook_pattern", see)],
    )  # fmt: skip
    assert len(seen) == run.steps_run
    assert all(keys == positions for _, positions, keys in seen)
    assert {queries for queries, _, _ in seen[1:]} == {4, 8}  # a block, or the finished one before it too
    assert seen[0][0] == seen[0][1] <= 16  # the prompt and the first block
    assert seen[-1][2] == run.canvas.shape[2]


@pytest.mark.parametrize("name", FOLDERS)
def test_recorded_scores_are_the_column_sums_of_the_computed_rows_and_absent_keys_are_nan(references, models, name):
    model, spans = models[name], []

    def span(value, hook):
        spans.append((len(hook.key_positions) - value.shape[2], len(hook.key_positions)))

    run = sinklens.generate(
        model, rows_of(references[name])[:1], gen_length=14, use_cache=True, stop=False,
        record_sinks=Record(["values"]), hooks=[("blocks.0.attn.hook_pattern", span)],
    )  # fmt: skip
    score, norm = (torch.from_numpy(run.sinks[key].to_numpy()) for key in ("score", "value_norm"))
    if name == "bd3lm":
        assert not run.real.all()
    for step, (first, end) in enumerate(spans):
        assert score[:, step, :, :, end:].isnan().all()
        assert norm[:, step, :, :, end:].isnan().all()
        assert norm[:, step, :, :, :first].isnan().all()
        assert not norm[:, step, :, :, first:end].isnan().any()
        if name == "bd3lm":  # plain torch counts blocks from the first token
            continue
        with torch.no_grad():
            plain = plain_pass(model, run.canvas[:, step], run.real).values
        for layer in range(model.cfg.n_layers):
            expected = plain[f"blocks.{layer}.attn.hook_pattern"][:, :, first:end].sum(2)[..., :end]
            assert largest_difference(score[:, step, layer, :, :end], expected) < 1e-4


@pytest.mark.parametrize("name", FOLDERS)
def test_a_replay_and_masked_sinks_work_with_a_cache(references, models, name):
    model, rows = models[name], rows_of(references[name])
    settings = {"gen_length": 13, "stop": False, "use_cache": True}
    base = sinklens.generate(model, rows, record_sinks=False, **settings)
    shown = []
    hooks = [MaskSinks(top_k=1), ("blocks.1.attn.hook_pattern", lambda value, hook: shown.append(value.clone()))]
    run = sinklens.generate(model, rows, replay=base, hooks=hooks, **settings)
    assert torch.equal(run.canvas, base.canvas)
    for step in range(1, run.steps_run):
        before = torch.from_numpy(run.sinks["score"].to_numpy()[:, step - 1, 1]).nan_to_num(-1.0)
        strongest = before.masked_fill(~run.real[:, None], -1.0).argmax(-1)
        assert (shown[step].gather(-1, strongest[:, :, None, None].expand(-1, -1, shown[step].shape[2], 1)) == 0).all()


def test_what_needs_every_position_is_refused_with_a_cache(references, models):
    with pytest.raises(SettingError, match="MaskedLogits needs the logits of all masked positions; run with use_cache"):
        sinklens.generate(
            models["sdar"], rows_of(references["sdar"])[:1], gen_length=13, use_cache=True, hooks=[MaskedLogits()]
        )


# Fast-dLLM's policies on LLaDA and Dream


ONE_PASS = 13  # Dream with one pass per block: the reference computes another one and discards its result


@pytest.mark.parametrize(
    ("folder", "number"),
    [("llada-cached", n) for n in (0, 3, 7, 11, 15, 19)] + [("dream-cached", n) for n in (0, 4, 8, ONE_PASS)],
)
def test_every_set_of_computed_positions_and_the_kept_logits_equal_the_references(conformance, folder, number):
    reference, fresh, logits = open_folder(conformance / folder), [], {}
    run = stored_run(reference, number)
    hooks = [("blocks.2.attn.hook_fresh", lambda value, hook: fresh.append(value.clone()))]
    if folder == "llada-cached":
        hooks.append(("denoise.hook_logits", lambda value, hook: logits.update({hook.step: value.clone()})))
    tokens = reference.repeat(run, hooks=hooks).tokens
    stored = reference.tensors[f"gen{number}.fresh"].bool()[
        :: 2 if (folder, number) == ("dream-cached", ONE_PASS) else 1
    ]
    assert torch.equal(torch.stack(fresh), stored[:, None].expand(-1, len(tokens), -1))
    for step, value in logits.items():
        kept = reference.tensors.get(f"gen{number}.logits.{step}")
        if kept is not None:
            assert largest_difference(value, kept) < 1e-4


@pytest.mark.parametrize(("folder", "rows"), [("llada-cached", 2), ("dream-cached", 1)])
@pytest.mark.parametrize(("name", "window"), [("prefix", slice(13, 35)), ("dual", slice(13, 21))])
def test_one_cached_step_has_the_references_logits(conformance, folder, rows, name, window):
    """A full pass, then one token is changed and a window computed over the cached keys."""
    reference = open_folder(conformance / folder)
    model = reference.load()
    ids, changed = reference.tensors["input_ids"][:rows], reference.tensors["step.input_ids"]
    everything = torch.ones(rows, model.cfg.n_layers, 35, dtype=torch.bool)
    inside = torch.zeros_like(everything)
    inside[:, :, window] = True
    held = WindowCache(model.tree, torch.ones(rows, 35, dtype=torch.bool))
    with torch.no_grad():
        held.hidden(ids, slice(0, 35), everything, ~everything)
        logits = model.tree.head(held.hidden(changed, window, inside, ~everything))
    assert largest_difference(logits, reference.tensors[f"step.{name}_logits"]) < 1e-4
