"""DiffuLLaMA and DiffuGPT: sinklens reproduces the reference's passes and, given its random numbers, every canvas."""

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from published import Reference, assert_same_pass, largest_difference
from safetensors.torch import load_file, save_file

import sinklens
from sinklens.errors import CheckpointError
from sinklens.families import FAMILIES
from sinklens.families.translate import translate
from sinklens.interventions import MaskSinks, Suffix
from sinklens.model.loading import build_empty

TOLERANCE = 1e-4
RUNS = {"diffullama": 8, "diffugpt": 7}
NUMBERED = [(name, number) for name, count in RUNS.items() for number in range(count)]
FULL_SIZE = {
    "diffullama": {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000,
    },
    "diffugpt": {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257},
}  # fmt: skip
PARAMETERS = {"diffullama": 6_738_415_616, "diffugpt": 124_439_808}


@cache
def _reference(folder):
    return Reference(folder)


@cache
def _model(folder):
    return sinklens.load(folder, family=folder.name, mask_token_id=_reference(folder).facts["mask_token_id"])


class Stored:
    """One row of a stored run: what it was given, the random numbers and the canvases."""

    def __init__(self, reference: Reference, number: int, row: int) -> None:
        self.run, name = reference.runs[number], f"gen{number}"
        of = {key: reference.tensors[f"{name}.{key}"][row] for key in ("input_ids", "src_mask", "canvas", "result")}
        self.ids, self.given = of["input_ids"].long(), of["src_mask"].bool()
        self.canvas, self.result = of["canvas"].long(), of["result"].long()
        self.prefix = int((~self.given).float().argmax())
        shape = (self.run["passes"], len(self.ids))
        self.numbers = torch.zeros(*shape, 2, dtype=torch.float64)
        for place, key in enumerate(("draws", "keep_draws")):
            if f"{name}.{key}" in reference.tensors:
                drawn = (reference.tensors[f"{name}.{key}"][row].double() + 0.5) / 65536
                self.numbers[: len(drawn), :, place] = drawn
        self.numbers[:, 1:, 0] = self.numbers[:, :-1, 0].clone()  # the draw at i proposes the token of i + 1

    @property
    def settings(self) -> dict[str, Any]:
        found = {"steps": self.run["diffusion_steps"], "temperature": self.run["logits_temp"]}
        if self.run["sampler"] == "model.py":
            return found | {"top_p": self.run["topp_temp"]}
        return found | {"order": "confidence", "top_p": 1.0, "greedy": self.run["greedy"]}

    def fill(self, value, hook):
        """At the first canvas: the tokens that are given after a gap."""
        if hook.step == 0:
            value[0, self.given] = self.ids[self.given]
        return value

    def propose_first(self, value, hook):
        """Nothing predicts position 0; the reference proposes the first id of its input."""
        if not self.prefix:
            value[:, 0] = self.ids[0]
        return value


def written(folder, number, row, **more):
    stored = Stored(_reference(folder), number, row)
    hooks = [
        ("denoise.hook_canvas", stored.fill),
        ("denoise.hook_uniform", lambda value, hook: stored.numbers[hook.step][None]),
        ("denoise.hook_candidates", stored.propose_first),
        *more.pop("hooks", []),
    ]
    prompt, length = stored.ids[: stored.prefix].tolist(), len(stored.ids) - stored.prefix
    run = sinklens.generate(_model(folder), [prompt], gen_length=length, hooks=hooks, **stored.settings, **more)
    return run, stored


@pytest.mark.parametrize("name", RUNS)
def test_every_run_of_the_references_is_compared(conformance, name):
    assert len(_reference(conformance / name).runs) == RUNS[name]


@pytest.mark.parametrize("name", RUNS)
def test_logits_patterns_and_stream_equal_the_references(conformance, name):
    folder = conformance / name
    model, reference = _model(folder), _reference(folder)
    assert_same_pass(model, reference, TOLERANCE)
    with torch.no_grad():
        _, kept = model.run_with_cache(reference.tensors["input_ids"])
    stream = [kept[f"blocks.{layer}.hook_resid_post"] for layer in range(model.cfg.n_layers)]
    for ours, theirs in zip([kept["blocks.0.hook_resid_pre"], *stream], reference.tensors["resid"], strict=True):
        assert largest_difference(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("name", RUNS)
def test_masks_of_its_training_give_the_references_logits(conformance, name):
    folder = conformance / name
    model, tensors = _model(folder), _reference(folder).tensors
    masks = [key.partition(".")[0] for key in tensors if key.startswith("anneal") and key.endswith(".mask")]
    assert masks
    for key in masks:
        hidden = torch.where(tensors[f"{key}.mask"].bool(), 0.0, -torch.inf)
        hooks = [(lambda point: point.endswith("hook_attn_mask"), lambda value, hook, hidden=hidden: value + hidden)]
        with torch.no_grad():
            found = model.run_with_hooks(tensors["input_ids"][:1], fwd_hooks=hooks)
        assert largest_difference(found, tensors[f"{key}.logits"]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, count in RUNS.items() for number in range(count)]
)
def test_every_canvas_equals_the_references(conformance, name, number):
    folder = conformance / name
    for row in range(_reference(folder).runs[number]["batch"]):
        run, stored = written(folder, number, row, record_sinks=row == 0)
        steps = run.steps_run
        assert torch.equal(run.canvas[0, 1:steps], stored.canvas[1:steps])
        assert torch.equal(run.canvas[0, -1, 1:], stored.result)
        assert torch.equal(stored.canvas[steps:, 1:], stored.result.expand(len(stored.canvas) - steps, -1))
        assert not bool(run.undecided[0, -1].any())


def test_a_drawn_mask_token_is_decided(conformance):
    """With the mask token proposed everywhere, positions are decided one after another and then keep it."""
    model = _model(conformance / "diffullama")
    hooks = [("denoise.hook_candidates", lambda value, hook: torch.full_like(value, model.mask_token_id))]
    run = sinklens.generate(model, [[5, 6]], gen_length=6, steps=6, hooks=hooks, seed=1)
    assert bool((run.canvas[0, -1, 2:] == model.mask_token_id).all())
    left = run.undecided[0].sum(dim=-1).tolist()
    assert left[0] == 6
    assert left[-1] == 0
    assert left == sorted(left, reverse=True)
    assert len(set(left)) > 2


def test_a_suffix_is_filled_like_stored_tokens_behind_a_gap(conformance):
    folder = conformance / "diffullama"
    run, stored = written(folder, 2, 0)
    behind = len(stored.ids) - int((~stored.given).nonzero().max()) - 1
    hooks = [
        Suffix(text=stored.ids[-behind:].tolist()),
        ("denoise.hook_uniform", lambda value, hook: stored.numbers[hook.step][None]),
    ]
    length = len(stored.ids) - stored.prefix - behind
    other = sinklens.generate(
        _model(folder), [stored.ids[: stored.prefix].tolist()], gen_length=length, hooks=hooks, **stored.settings
    )
    assert torch.equal(other.canvas[0, -1], run.canvas[0, -1])


def kept_by_rule(confidence, undecided, competing, left, steps):
    """The published rule for one row: which undecided positions stay undecided."""
    count = int(np.float32(sum(competing)) * np.float32(left / steps))
    cutoff = sorted(value for value, one in zip(confidence, competing, strict=True) if one)[count]
    return [one and value < cutoff for one, value in zip(undecided, confidence, strict=True)]


@pytest.mark.parametrize("seed", range(6))
def test_steps_follow_the_published_rules_at_drawn_settings(conformance, seed):
    noise = np.random.default_rng(seed)
    model, steps = _model(conformance / "diffugpt"), int(noise.integers(1, 12))
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
    model, settings = _model(conformance / "diffugpt"), {"gen_length": 8, "steps": 5, "seed": 4}
    for order in ("random", "confidence"):
        together = sinklens.generate(model, [[5, 6, 7], [9]], order=order, **settings)
        for row, prompt in enumerate([[5, 6, 7], [9]]):
            alone = sinklens.generate(model, [prompt], order=order, **settings)
            assert torch.equal(together.canvas[row, -1, -8:], alone.canvas[0, -1, -8:])


def test_masked_sinks_are_exact(conformance):
    """Under MaskSinks, the first layer's pattern is the plain one without the strongest key of the step before."""
    model, at, seen = _model(conformance / "diffullama"), "blocks.0.attn.hook_pattern", {}
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
    reference = _reference(conformance / "diffugpt")
    weights = load_file(reference.folder / "model.safetensors")
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


@pytest.mark.parametrize("name", RUNS)
def test_the_full_size_has_the_published_number_of_parameters(conformance, name):
    family = FAMILIES[name]
    empty = build_empty(translate(_reference(conformance / name).config() | FULL_SIZE[name], family, name))
    assert sum(parameter.numel() for parameter in empty.parameters()) == PARAMETERS[name]
