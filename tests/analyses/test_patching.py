"""The patching study compared with patches made by hand, and values that must be 0 or 1."""

import numpy as np
import pytest
import torch
import xarray as xr

from sinklens.analyses.patching import GROUPS, STARTS, Patching, with_another_number

PROMPT = "Question: Tom has 5 apples. He buys 7 more. How many apples does Tom have now?\nAnswer:"
SETTINGS = {"temperature": 0.0}


@pytest.mark.parametrize(
    ("prompt", "other"),
    [
        ("Tom has 5 pens. He buys 12 more.", "Tom has 5 pens. He buys 11 more."),
        ("1 pen, and 0 more", "1 pen, and 1 more"),
        ("1 pen", "2 pen"),
        ("no number", None),
    ],
)
def test_the_last_number_is_changed(prompt, other):
    assert with_another_number(prompt) == other


@pytest.fixture(scope="module", params=["tiny_llada", "tiny_llama"])
def study(request):
    """A model, its pair of runs, and the measurements of one prompt."""
    model = request.getfixturevalue(request.param)
    given = SETTINGS | ({"use_cache": False} if model.config.is_causal else {})
    pair = Patching()._pair(model, PROMPT, given)
    return model, pair, Patching().measure(model, [PROMPT], {}).isel(prompt=0)


def test_a_pair_differs_in_the_number_and_in_the_answer(study):
    model, pair, _ = study
    assert pair.number.sum() == 1
    assert not (pair.number & pair.differ).any()
    place = pair.number.nonzero().item()
    words = [model.tokenizer.decode([int(run.tokens[0, place])]).strip() for run in (pair.clean, pair.corrupted)]
    assert int(words[0]) - int(words[1]) == 1
    assert pair.differ.sum() >= 2


def gap(pair, logits, canvas):
    """The gap of one step by its definition."""
    total, causal = 0.0, pair.clean.model.config.is_causal
    for place in pair.differ.nonzero()[:, 0].tolist():
        if place != len(canvas) if causal else canvas[place] != pair.clean.model.mask_token_id:
            continue
        row = logits[-1] if causal else logits[place]
        total += float(row[pair.clean.tokens[0, place]] - row[pair.corrupted.tokens[0, place]])
    return total


@pytest.mark.parametrize(("layer", "group"), [(-1, "number"), (0, "number"), (1, "answer"), (1, "prompt")])
def test_a_patch_moves_the_gap_as_much_as_a_pass_patched_by_hand(study, layer, group):
    model, pair, data = study
    point = "hook_embed" if layer < 0 else f"blocks.{layer}.hook_resid_post"
    prompt = pair.clean.prompt_length
    usable = 0
    for step in range(0, pair.corrupted.steps_run, 5 if not model.config.is_causal else 1):
        end = prompt + step if model.config.is_causal else None
        canvas = pair.corrupted.canvas[:, step, :end]
        swapped = canvas.clone()
        swapped[:, :prompt] = pair.clean.canvas[:, 0, :prompt]
        where = {"number": pair.number, "answer": torch.arange(len(pair.number)) >= prompt}
        where["prompt"] = ~where["answer"] & ~pair.number
        chosen = where[group][: canvas.shape[1]]
        _, cache = model.run_with_cache(swapped, names_filter=point)

        def put(value, hook, clean=cache[point], chosen=chosen):
            value[:, chosen] = clean[:, chosen]
            return value

        plain, clean = (model(ids)[0].detach() for ids in (canvas, swapped))
        patched = model.run_with_hooks(canvas, fwd_hooks=[(point, put)])[0].detach()
        base = gap(pair, plain, canvas[0])
        moved = float(data["moved"].sel(group=group, layer=layer, step=step))
        assert moved == pytest.approx(gap(pair, patched, canvas[0]) - base, abs=1e-3)
        assert float(data["gap"].sel(step=step)) == pytest.approx(gap(pair, clean, canvas[0]) - base, abs=1e-3)
        usable += gap(pair, clean, canvas[0]) - base > 1
    assert usable > 1


def test_shares_with_a_known_value_are_zero_or_one(study):
    """The number's embedding restores everything; patches elsewhere in the prompt or after the last layer, nothing."""
    _, pair, data = study
    restored = (data["moved"] / data["gap"]).where(data["gap"] != 0)
    np.testing.assert_allclose(restored.sel(group="number", layer=-1).dropna("step"), 1, atol=1e-4)
    np.testing.assert_allclose(restored.sel(group="answer", layer=3).dropna("step"), 1, atol=1e-3)
    for group, layer in (("number", 3), ("prompt", -1), ("answer", -1)):
        np.testing.assert_allclose(restored.sel(group=group, layer=layer).dropna("step"), 0, atol=1e-3)
    assert (data["gap"].isel(step=slice(pair.corrupted.steps_run, None)) == 0).all()


def test_patching_the_number_from_the_start_gives_the_clean_answer(study):
    _, _, data = study
    flipped = data["flipped"]
    assert flipped.shape == (5, len(STARTS))
    assert float(flipped.sel(layer=-1, start=0.0)) == 1
    assert (flipped.sel(layer=3) == 0).all()  # nothing reads the number's last stream
    assert float(data["usable"]) == 1


def test_unusable_pairs_are_not_counted(tiny_llama):
    found = Patching(settings={"gen_length": 3}).run([tiny_llama], ["Nothing here.", PROMPT])
    assert found.tables["usable"]["estimate"].tolist() == [0]  # three tokens, without a number
    assert found.tables["restored"]["estimate"].isna().all()
    assert found.tables["flipped"]["prompts"].max() == 0


def test_shares_are_ratios_of_sums_over_usable_prompts():
    """Two prompts are usable, with gaps of 1 and 3, of which 1 and 0 are restored: a quarter. The third is not."""
    places = {"group": list(GROUPS), "layer": [-1], "step": [0], "start": [0.0]}
    moved = np.zeros((3, len(GROUPS), 1, 1))
    moved[0, 0] = 1.0
    values = {
        "moved": (("prompt", "group", "layer", "step"), moved),
        "gap": (("prompt", "step"), np.array([[1.0], [3.0], [0.0]])),
        "flipped": (("prompt", "layer", "start"), np.array([[[1.0]], [[0.0]], [[np.nan]]])),
        "usable": ("prompt", np.array([1.0, 1.0, 0.0])),
    }
    tables = Patching().tables({"planted": xr.Dataset(values, places)})
    line = tables["layers"].set_index("group").loc["number"]
    assert (line["estimate"], line["low"], line["high"], line["prompts"]) == (0.25, 0.0, 1.0, 2)
    assert tables["flipped"]["estimate"].tolist() == [0.5]
