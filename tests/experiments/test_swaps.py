"""Swap tests on planted attention, of the token and of the place, and on a run against a loop."""

import importlib

import numpy as np
import pytest
import torch
from asked import TWO as PROMPTS

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import swap as swap_of
from sinklens.experiments.swaps import column_sums, kinds_of_vocabulary
from sinklens.sinks.kinds import Kind

module = importlib.import_module("sinklens.experiments.swaps")


@pytest.fixture(scope="module")
def run(tiny_llada):
    return sinklens.generate(tiny_llada, PROMPTS, gen_length=8, steps=4, block_length=8, progress=False)


def planted(monkeypatch, run, of_token):
    """Sinks on digits, or on the places where the run has digits in the first canvas of each row."""
    kinds = kinds_of_vocabulary(run.model)
    places = {len(row): kinds[row.numpy()] == Kind.DIGIT for row in (run.canvas[n, 0][run.real[n]] for n in range(2))}

    def sums(model, canvases, first=None, time=None):
        digit = (
            kinds[canvases.numpy()] == Kind.DIGIT
            if of_token
            else np.tile(places[canvases.shape[1]], (len(canvases), 1))
        )
        return np.where(digit, 9.0, 0.1)[:, None, None, None].repeat(2, axis=3)

    monkeypatch.setattr(module, "column_sums", sums)


def test_sinks_of_a_token_leave_with_it_and_come_with_it(run, monkeypatch):
    planted(monkeypatch, run, of_token=True)
    lost, gained, control = (
        swap_of(run, *pair, steps=[0]) for pair in (("digit", "word"), ("word", "digit"), ("digit",) * 2)
    )
    sinks = [[float(one[f"sinks_{when}"].mean()) for when in ("before", "after")] for one in (lost, gained, control)]
    assert sinks == [[2, 0], [0, 2], [2, 2]]


def test_sinks_of_places_stay_although_they_are_all_on_digits(run, monkeypatch):
    """Compared without a swap, digits have all the sinks in both cases."""
    planted(monkeypatch, run, of_token=False)
    lost = swap_of(run, "digit", "word", steps=[0])
    assert lost["sinks_before"].mean() == lost["sinks_after"].mean() == 2
    assert swap_of(run, "word", "digit", steps=[0])["sinks_after"].mean() == 0


def test_a_swap_equals_a_pass_over_the_edited_canvas(run):
    found = swap_of(run, "digit", "word", steps=[2], count=2, seed=3)
    assert set(found["row"].values) == {0, 1}
    one = {name: found[name].values[-1].item() for name in found}
    row, real = one["row"], run.real[one["row"]]
    ids = run.canvas[row, 2].clone()
    assert ids[one["pos"]] == one["old"] != one["new"]
    scores = []
    for new in (one["old"], one["new"]):
        ids[one["pos"]] = new
        _, cache = run.model.run_with_cache(ids[real][None])
        patterns = [cache[f"blocks.{layer}.attn.hook_pattern"][0] for layer in range(run.model.cfg.n_layers)]
        scores.append(torch.stack(patterns).sum(dim=-2).numpy())  # [layer, head, key]
    place = int(real[: one["pos"]].sum())
    for when, score in zip(("before", "after"), scores, strict=True):
        others = (score.sum(-1) - score[..., place]) / (score.shape[-1] - 1)
        assert one[f"sinks_{when}"] == (score[..., place] - others > 3).sum()
        assert one[f"score_{when}"] == pytest.approx(score[..., place].mean(), abs=1e-4)


def test_sums_over_later_queries_leave_out_the_earlier_ones(run):
    ids = run.canvas[:1, 0][:, run.real[0]]
    every, later = column_sums(run.model, ids, np.array([[0, 5]]))[0]
    _, cache = run.model.run_with_cache(ids)
    pattern = cache["blocks.1.attn.hook_pattern"][0]
    np.testing.assert_allclose(every[1], pattern.sum(-2), atol=1e-4)
    np.testing.assert_allclose(later[1], pattern[:, 5:].sum(-2), atol=1e-4)


def test_a_mask_or_given_ids_can_be_put_in_place_and_draws_repeat(run):
    masks = swap_of(run, "word", "mask", steps=[0], rows=[1], count=3)
    assert (masks.sizes["swap"], set(masks["new"].values)) == (3, {run.model.mask_token_id})
    given = int(np.flatnonzero(kinds_of_vocabulary(run.model) == Kind.DIGIT)[7])
    found = swap_of(run, "word", "digit", among=[given], steps=[0])
    assert set(found["new"].values) == {given}
    assert found.equals(swap_of(run, "word", "digit", among=[given], steps=[0]))


def test_what_cannot_be_swapped_is_refused(run):
    for call, match in [
        (lambda: swap_of(run, "digits", "word"), r"no kind 'digits' can be swapped; known: newline.*Nearest: digit"),
        (lambda: swap_of(run, "word", "digit", among=[run.model.mask_token_id]), r"has no token of the kind digit"),
        (lambda: swap_of(run, "word", "digit", count=0), r"count .* at least 1; got 0"),
    ]:  # fmt: skip
        with pytest.raises(SettingError, match=match):
            call()
