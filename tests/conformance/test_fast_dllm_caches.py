"""Fast-dLLM's prefix and dual cache on LLaDA and Dream: which positions every pass computes, and one cached step."""

import pytest
import torch
from stored.folders import largest_difference
from stored.runs import open_folder, stored_runs

from sinklens.hooks.window_cache import WindowCache

ONE_PASS = 13  # Dream with one pass per block: the reference computes another one and discards its result


@pytest.mark.parametrize(
    ("folder", "number"),
    [("llada-cached", n) for n in range(20)] + [("dream-cached", n) for n in range(14)],
)
def test_every_set_of_computed_positions_and_the_kept_logits_equal_the_references(conformance, folder, number):
    reference, fresh, logits = open_folder(conformance / folder), [], {}
    run = next(run for run in stored_runs(reference) if run.number == number)
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
