"""Fast-dLLM's prefix and dual cache on LLaDA and Dream: every canvas, and which positions every pass computes.

The reference's Dream runs take ``top_k=50`` without naming it: transformers' default for generation is part of the
model's config, and its sampler reads it from there.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from published import Reference, largest_difference

import sinklens
from sinklens.hooks.window_cache import WindowCache
from sinklens.sampling import DualCache, NoCache, PrefixCache
from sinklens.sampling.key_cache import Policy

POLICIES: dict[str, Policy] = {
    "generate": NoCache(), "generate_with_prefix_cache": PrefixCache(), "generate_with_dual_cache": DualCache(),
    "no_cache": NoCache(), "prefix_cache": PrefixCache(), "dual_cache": DualCache(),
}  # fmt: skip
ONE_PASS = 13  # Dream with one pass per block: the reference computes another one and discards its result


@cache
def loaded(folder: Path, place: Path) -> tuple[sinklens.Model, Reference]:
    reference = Reference(folder)
    return sinklens.load(reference.write(place / folder.name)), reference


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("cached")


def llada_settings(stored: dict[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in stored["settings"].items() if key != "mask_id"}
    return given | ({"by_quota": False} if "threshold" in given else {})


def dream_settings(stored: dict[str, Any]) -> dict[str, Any]:
    given = dict(stored["settings"]) | {"top_k": 50}
    given["gen_length"] = given.pop("max_new_tokens")
    if stored["sampler"] != "no_cache":
        given["sampler"] = "dream-blocks"
    if given["alg"] == "confidence_threshold":  # `steps` counts only without a cache, as a limit per step
        limit = {"tokens_per_step": given["gen_length"] // given["steps"]} if stored["sampler"] == "no_cache" else {}
        given |= {"alg": "maskgit_plus", "steps": given["gen_length"]} | limit
    return {key: value for key, value in given.items() if key not in ("mask_token_id", "dual_cache")}


def run_of(model: sinklens.Model, reference: Reference, number: int) -> tuple[sinklens.Generation, list, dict]:
    """A stored run repeated, with what ``hook_fresh`` showed in each step and the logits by step."""
    stored, fresh, logits = reference.runs[number], [], {}
    shifted = model.family_record.shift
    policy = POLICIES[stored["sampler" if shifted else "function"]]
    hooks = [("blocks.2.attn.hook_fresh", lambda value, hook: fresh.append(value.clone()))]
    if not isinstance(policy, NoCache):
        hooks.append(("denoise.hook_logits", lambda value, hook: logits.update({hook.step: value.clone()})))
    settings = (dream_settings if shifted else llada_settings)(stored)
    prompt = reference.tensors[f"gen{number}.prompt"]
    return sinklens.generate(model, prompt, cache=policy, hooks=hooks, **settings), fresh, logits


@pytest.mark.parametrize(
    ("folder", "number"),
    [("llada-cached", n) for n in range(20)] + [("dream-cached", n) for n in range(14)],
)
def test_every_canvas_and_every_set_of_computed_positions_equals_the_references(conformance, place, folder, number):
    model, reference = loaded(conformance / folder, place)
    run, fresh, logits = run_of(model, reference, number)
    canvas, stored = reference.tensors[f"gen{number}.canvas"], reference.tensors[f"gen{number}.fresh"].bool()
    if (folder, number) == ("dream-cached", ONE_PASS):
        canvas, stored = canvas[::2], stored[::2]
    assert torch.equal(run.canvas[:, :-1], canvas.transpose(0, 1))
    assert torch.equal(run.tokens, reference.tensors[f"gen{number}.result"])
    assert torch.equal(torch.stack(fresh), stored[:, None].expand(-1, len(run.tokens), -1))
    for step, value in logits.items():
        kept = reference.tensors.get(f"gen{number}.logits.{step}")
        if kept is not None and not model.family_record.shift:
            assert largest_difference(value, kept) < 1e-4


def test_every_run_of_the_references_is_compared(conformance, place):
    counts = [len(loaded(conformance / f"{name}-cached", place)[1].runs) for name in ("llada", "dream")]
    assert counts == [20, 14]


@pytest.mark.parametrize(("folder", "rows"), [("llada-cached", 2), ("dream-cached", 1)])
@pytest.mark.parametrize(("name", "window"), [("prefix", slice(13, 35)), ("dual", slice(13, 21))])
def test_one_cached_step_has_the_references_logits(conformance, place, folder, rows, name, window):
    """A full pass, then one token is changed and a window computed over the cached keys."""
    model, reference = loaded(conformance / folder, place)
    ids, changed = reference.tensors["input_ids"][:rows], reference.tensors["step.input_ids"]
    everything = torch.ones(rows, model.cfg.n_layers, 35, dtype=torch.bool)
    inside = torch.zeros_like(everything)
    inside[:, :, window] = True
    held = WindowCache(model.tree, torch.ones(rows, 35, dtype=torch.bool))
    with torch.no_grad():
        held.hidden(ids, slice(0, 35), everything, ~everything)
        logits = model.tree.head(held.hidden(changed, window, inside, ~everything))
    assert largest_difference(logits, reference.tensors[f"step.{name}_logits"]) < 1e-4
