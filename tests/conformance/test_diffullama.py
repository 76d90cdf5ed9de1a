"""DiffuLLaMA and DiffuGPT: training masks, rules of a step, gaps and batches, beside the stored runs."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from stored.folders import largest_difference
from stored.runs import open_folder, stored_runs

import sinklens
from sinklens.errors import CheckpointError
from sinklens.families import FAMILIES
from sinklens.families.translate import translate
from sinklens.interventions import MaskSinks, Suffix
from sinklens.model.loading import build_empty

TOLERANCE = 1e-4
FULL_SIZE = {
    "diffullama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000,
    },
    "diffugpt": {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257},
}  # fmt: skip
PARAMETERS = {"diffullama": 6_738_415_616, "diffugpt": 124_439_808}


@pytest.mark.parametrize("name", PARAMETERS)
def test_masks_of_its_training_give_the_references_logits(conformance, name):
    reference = open_folder(conformance / name)
    model, tensors = reference.load(), reference.tensors
    masks = [key.partition(".")[0] for key in tensors if key.startswith("anneal") and key.endswith(".mask")]
    assert masks
    for key in masks:
        hidden = torch.where(tensors[f"{key}.mask"].bool(), 0.0, -torch.inf)
        hooks = [(lambda point: point.endswith("hook_attn_mask"), lambda value, hook, hidden=hidden: value + hidden)]
        with torch.no_grad():
            found = model.run_with_hooks(tensors["input_ids"][:1], fwd_hooks=hooks)
        assert largest_difference(found, tensors[f"{key}.logits"]) < TOLERANCE


def test_a_drawn_mask_token_is_decided(conformance):
    """With the mask token proposed everywhere, positions are decided one after another and then keep it."""
    model = open_folder(conformance / "diffullama").load()
    hooks = [("denoise.hook_candidates", lambda value, hook: torch.full_like(value, model.mask_token_id))]
    run = sinklens.generate(model, [[5, 6]], gen_length=6, steps=6, hooks=hooks, seed=1)
    assert bool((run.canvas[0, -1, 2:] == model.mask_token_id).all())
    left = run.undecided[0].sum(dim=-1).tolist()
    assert left[0] == 6
    assert left[-1] == 0
    assert left == sorted(left, reverse=True)
    assert len(set(left)) > 2


def test_a_suffix_is_filled_like_stored_tokens_behind_a_gap(conformance):
    reference = open_folder(conformance / "diffullama")
    stored = next(run for run in stored_runs(reference) if run.number == 2)
    run = reference.repeat(stored)
    given = reference.tensors["gen2.src_mask"][0].bool()
    behind = len(given) - int((~given).nonzero().max()) - 1
    _, uniform, first = stored.settings["hooks"]
    hooks = [Suffix(text=reference.tensors["gen2.input_ids"][0, -behind:].tolist()), uniform, first]
    settings = stored.settings | {"gen_length": stored.settings["gen_length"] - behind, "hooks": hooks}
    other = sinklens.generate(reference.load(), stored.prompt, **settings)
    assert torch.equal(other.canvas[0, -1], run.canvas[0, -1])


def kept_by_rule(confidence, undecided, competing, left, steps):
    """The published rule for one row: which undecided positions stay undecided."""
    count = int(np.float32(sum(competing)) * np.float32(left / steps))
    cutoff = sorted(value for value, one in zip(confidence, competing, strict=True) if one)[count]
    return [one and value < cutoff for one, value in zip(undecided, confidence, strict=True)]


@pytest.mark.parametrize("seed", range(6))
def test_steps_follow_the_published_rules_at_drawn_settings(conformance, seed):
    noise = np.random.default_rng(seed)
    model, steps = open_folder(conformance / "diffugpt").load(), int(noise.integers(1, 12))
    order = ["random", "confidence"][seed % 2]
    settings = {"order": order, "steps": steps, "temperature": float(noise.uniform(0.3, 1.5)), "greedy": seed == 5}
    settings["top_p"] = [1.0, 0.6, 0.9][seed % 3]
    rows = [noise.integers(0, 100, size=size).tolist() for size in (3, 5)]
    seen: dict[str, list[torch.Tensor]] = {}

    def keep(value, hook):
        seen.setdefault(hook.name.rpartition("_")[2], []).append(value.clone())

    points = ("uniform", "confidence", "commit", "candidates", "logits")
    hooks = [(f"denoise.hook_{point}", keep) for point in points]
    run = sinklens.generate(model, rows, gen_length=9, hooks=hooks, seed=seed, record_sinks=False, **settings)
    competing = run.undecided[:, 0].tolist()
    for step in range(run.steps_run):
        before, left = run.undecided[:, step].tolist(), steps - 1 - step
        for row in range(2):
            if order == "confidence":
                confidence = seen["confidence"][step][row].tolist()
                stay = kept_by_rule(confidence, before[row], competing[row], left, steps) if any(before[row]) else None
            else:
                stay = [float(u) >= 1 / (left + 1) for u in seen["uniform"][step][row, :, 1]]
            if stay is None:
                continue
            expected = [one and not waits for one, waits in zip(before[row], stay, strict=True)]
            assert seen["commit"][step][row].tolist() == expected
            for place in [place for place, one in enumerate(expected) if one]:
                assert int(seen["candidates"][step][row, place]) == drawn(seen, step, row, place, settings)


def drawn(seen, step, row, place, settings):
    """The token of the published draw: softmax of the divided logits, the nucleus, and the inverse of their sums."""
    logits = seen["logits"][step][row, place].double() / settings["temperature"]
    probs = logits.softmax(-1).tolist()
    if settings["greedy"]:
        return max(range(len(probs)), key=probs.__getitem__)
    kept, before = [0.0] * len(probs), 0.0
    for token in sorted(range(len(probs)), key=lambda token: -probs[token]):
        if before <= settings["top_p"]:
            kept[token] = probs[token]
        before += probs[token]
    number, total = float(seen["uniform"][step][row, place, 0]) * sum(kept), 0.0
    for token, prob in enumerate(kept):
        total += prob
        if total > number:
            return token
    raise AssertionError("the numbers are below 1")


def test_rows_do_not_depend_on_their_batch(conformance):
    model, settings = open_folder(conformance / "diffugpt").load(), {"gen_length": 8, "steps": 5, "seed": 4}
    for order in ("random", "confidence"):
        together = sinklens.generate(model, [[5, 6, 7], [9]], order=order, **settings)
        for row, prompt in enumerate([[5, 6, 7], [9]]):
            alone = sinklens.generate(model, [prompt], order=order, **settings)
            assert torch.equal(together.canvas[row, -1, -8:], alone.canvas[0, -1, -8:])


def test_masked_sinks_are_exact(conformance):
    """Under MaskSinks, the first layer's pattern is the plain one without the strongest key of the step before."""
    model, at, seen = open_folder(conformance / "diffullama").load(), "blocks.0.attn.hook_pattern", {}
    hooks = [MaskSinks(top_k=1), (at, lambda value, hook: seen.__setitem__(hook.step, value.clone()))]
    run = sinklens.generate(model, [[5, 9, 3]], gen_length=8, steps=8, seed=1, hooks=hooks)
    assert run.steps_run > 3
    for step in range(1, run.steps_run):
        with torch.no_grad():
            _, plain = model.run_with_cache(run.canvas[:, step], names_filter=at)
        strongest = seen[step - 1].sum(2).argmax(-1)
        left = plain[at].scatter(-1, strongest[:, :, None, None].expand(-1, -1, plain[at].shape[2], 1), 0.0)
        assert largest_difference(seen[step], left / left.sum(-1, keepdim=True)) < 1e-5


def test_without_its_family_it_is_an_autoregressive_model(conformance):
    """Nothing in config.json says otherwise, which docs/models.md warns of."""
    model = sinklens.load(conformance / "diffullama")
    assert (model.family, model.causal) == ("llama", True)


def test_more_stored_rows_than_the_config_names_are_tokens(conformance, tmp_path):
    """DiffuGPT-m: a mask token was added to the embedding, while config.json kept its vocab_size."""
    reference = open_folder(conformance / "diffugpt")
    weights = load_file(reference.path / "model.safetensors")
    wide = torch.cat([weights["embed_tokens.weight"], torch.randn(2, 42, generator=torch.Generator().manual_seed(0))])
    save_file(weights | {"embed_tokens.weight": wide, "lm_head.weight": wide.clone()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(reference.config()))
    model = sinklens.load(tmp_path, family="diffugpt", mask_token_id=len(wide) - 1)
    assert model.cfg.d_vocab == len(wide) == reference.config()["vocab_size"] + 2
    with torch.no_grad():
        logits = model(reference.tensors["input_ids"])
    assert largest_difference(logits[..., :-2], reference.tensors["logits"]) < TOLERANCE


def test_diffugpt_needs_a_mask_token(conformance):
    with pytest.raises(
        CheckpointError, match=r"no usable mask token \(found None, vocabulary 287\); pass mask_token_id="
    ):
        sinklens.load(conformance / "diffugpt", family="diffugpt")


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_full_size_has_the_published_number_of_parameters(conformance, name):
    family = FAMILIES[name]
    empty = build_empty(translate(open_folder(conformance / name).config() | FULL_SIZE[name], family, name))
    assert sum(parameter.numel() for parameter in empty.parameters()) == PARAMETERS[name]
