"""Collected activations are those of single passes at the places in scope; an interrupted collection resumes."""

import numpy as np
import pytest
import torch
import xarray as xr
from layouts import arguments, write_family, write_tokenizer
from planted_saes import POINT
from watching import LONG, PADDED, SHORT, entered

import sinklens
from sinklens.errors import SettingError
from sinklens.features import ActivationStore, collect
from sinklens.features.places import STATES

PROMPTS = [SHORT, LONG, "w3 w4", "w20 w21 w22", "w1"]


def by_hand(run, scope, steps):
    """Every place in scope: (row, step, pos, state) -> (token, activation), from one separate pass per step."""
    found = {}
    for step in steps:
        ids, real = entered(run, step)
        _, cache = run.model.run_with_cache(ids, attention_mask=real, names_filter=POINT)
        for row, column in real.nonzero().tolist():
            state = "prompt" if column < run.prompt_length else "committed"
            state = "masked" if run.undecided[row, step, column] else state
            if scope == "all" or state in scope:
                place = (row, step, column - int((~run.real[row]).sum()), STATES.index(state))
                found[place] = (int(ids[row, column]), cache[POINT][row, column])
    return found


def check(store, expected):
    """The rows of a store are those of `by_hand`, once each."""
    columns = [store.column(name).tolist() for name in ("prompt", "step", "pos", "state")]
    places = list(zip(*columns, strict=True))
    assert sorted(places) == sorted(expected)
    assert store.column("token_id").tolist() == [expected[place][0] for place in places]
    wanted = torch.stack([expected[place][1] for place in places]).detach()
    torch.testing.assert_close(store.read(0, len(store)), wanted, atol=1e-4, rtol=1e-4)
    assert np.all(np.diff(columns[0]) >= 0)


def check_same(store, other):
    """Two stores hold the same places and activations."""
    for name in ("prompt", "step", "pos", "state", "token_id"):
        assert store.column(name).tolist() == other.column(name).tolist(), name
    torch.testing.assert_close(store.read(0, len(store)), other.read(0, len(other)), atol=1e-4, rtol=1e-4)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("architecture", ["llama", "dream"])
@pytest.mark.parametrize(
    ("scope", "steps"), [("all", [0, 1, 2, 3]), ("masked", [1, 3]), (["prompt", "committed"], [2])]
)
def test_every_place_in_scope_is_stored_once_with_its_activation(model, tmp_path, scope, steps):
    store = collect(
        model, PROMPTS, POINT, tmp_path / "a.zarr", scope=scope, only_steps=steps, batch_size=2, gen_length=8
    )
    full = sinklens.generate(model, PROMPTS, gen_length=8, record_sinks=False, progress=False)
    check(store, by_hand(full, scope, steps))


def test_the_newest_tokens_of_an_autoregressive_run_are_stored(worded, tmp_path):
    model = worded("llama", True)
    stores = [
        collect(model, PADDED, POINT, tmp_path / f"{cached}.zarr", gen_length=5, use_cache=cached)
        for cached in (True, False)
    ]
    places = [list(zip(*(store.column(name) for name in ("prompt", "step", "pos")), strict=True)) for store in stores]
    assert places[0] == places[1]
    assert len({(row, pos) for row, _, pos in places[0]}) == len(places[0]) > 11
    torch.testing.assert_close(*(store.read(0, len(store)) for store in stores), atol=1e-4, rtol=1e-4)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("family", "settings"), [
    ("sdar", {"use_cache": True, "denoising_steps": 2}),
    ("fast-dllm-v2", {"use_block_cache": True, "small_block_size": 2}),
])  # fmt: skip
def test_places_of_runs_with_a_cache_do_not_depend_on_the_batch(worded, tmp_path, family, settings):
    if family == "sdar":
        model = worded("sdar")
    else:
        write_family(tmp_path / family, family)
        model = sinklens.load(write_tokenizer(tmp_path / family), **arguments(family))
    alone, together = (
        collect(
            model,
            PROMPTS[:4],
            POINT,
            tmp_path / f"{batch}.zarr",
            batch_size=batch,
            gen_length=8,
            stop=False,
            **settings,
        )
        for batch in (1, 4)
    )
    check_same(together, alone)
    steps = alone.column("step")
    assert 0 < (steps == steps.max()).sum() < (steps == 0).sum()


@pytest.mark.extended
def test_an_interrupted_collection_resumes_to_the_same_rows(worded, tmp_path):
    arguments = {"batch_size": 2, "scope": "masked", "gen_length": 8}
    model, complete = worded(), collect(worded(), PROMPTS, POINT, tmp_path / "complete.zarr", **arguments)

    def stop(done, total):
        if done == 4:
            raise KeyboardInterrupt("stopped")

    with pytest.raises(KeyboardInterrupt, match="stopped"):
        collect(model, PROMPTS, POINT, tmp_path / "a.zarr", progress=stop, **arguments)
    half = ActivationStore(tmp_path / "a.zarr")
    assert (half.prompts_done, half.finished) == (4, False)
    # a batch that was killed before it counted: rows on disk that the attributes do not know
    half.group[f"activation.{POINT}"].resize((len(half) + 3, half.d_in))
    half.group["step"].resize((len(half) + 50,))
    calls = []
    store = collect(model, PROMPTS, POINT, tmp_path / "a.zarr", progress=lambda *done: calls.append(done), **arguments)
    assert calls == [(5, 5)]
    assert torch.equal(store.read(0, len(store)), complete.read(0, len(complete)))
    assert all((store.column(name) == complete.column(name)).all() for name in ("prompt", "step", "pos", "state"))
    data = xr.open_zarr(tmp_path / "a.zarr", consolidated=False, chunks=None)
    assert data[f"activation.{POINT}"].shape == (len(store), store.d_in)
    assert store.dataset().sizes["place"] == len(store)


def test_other_arguments_do_not_continue_a_collection(worded, tmp_path):
    collect(worded(), PROMPTS[:1], POINT, tmp_path / "a.zarr", gen_length=8)
    with pytest.raises(SettingError, match="recorded with other scope, seed; choose another path"):
        collect(worded(), PROMPTS[:1], POINT, tmp_path / "a.zarr", gen_length=8, seed=1, scope="masked")


@pytest.mark.parametrize(("prompts", "points", "given", "match"), [
    ([], POINT, {}, "at least one prompt"),
    (PROMPTS, POINT, {"batch_size": 0}, "batch_size must be an integer of at least 1; got 0"),
    (PROMPTS, POINT, {"only_steps": 0.5}, "only_steps must be a list of integers"),
    (PROMPTS, POINT, {"gen_length": 8}, "is not a store of activations"),
])  # fmt: skip
@pytest.mark.usefixtures("unchecked")
def test_arguments_that_belong_together_are_checked(worded, tmp_path, prompts, points, given, match):
    with pytest.raises(SettingError, match=match):
        collect(worded(), prompts, points, tmp_path, **given)


def test_copies_of_a_prompt_get_the_same_random_numbers_in_every_batch(worded, tmp_path):
    prompts, settings = [SHORT, LONG, SHORT, SHORT], {"gen_length": 8, "temperature": 5.0, "scope": "committed"}
    single, together = (
        collect(worded(), prompts, POINT, tmp_path / f"{batch}.zarr", batch_size=batch, **settings) for batch in (1, 4)
    )
    check_same(single, together)


def test_several_points_share_a_store_and_each_is_read_like_a_store_of_its_own(worded, tmp_path):
    model, points = worded(), [POINT, "blocks.0.attn.hook_z"]
    given = {"scope": "masked", "batch_size": 2, "gen_length": 4, "steps": 4, "block_length": 4}
    both = collect(model, PROMPTS, points, tmp_path / "both.zarr", **given)
    assert both.points == points
    for point in points:
        own = collect(model, PROMPTS, point, tmp_path / f"{point}.zarr", **given)
        part = ActivationStore(tmp_path / "both.zarr", point)
        assert (part.d_in, len(part)) == (own.d_in, len(own))
        check_same(part, own)
    assert both.point == POINT
    with pytest.raises(SettingError, match=r"holds no activations at 'blocks.1.hook_resid_pos', only at .* Nearest"):
        ActivationStore(both.path, "blocks.1.hook_resid_pos")


def test_activations_are_rounded_to_bfloat16(worded, tmp_path):
    given = {"gen_length": 4, "steps": 2, "block_length": 4}
    wide = collect(worded(), PROMPTS, POINT, tmp_path / "wide.zarr", **given)
    narrow = collect(worded(), PROMPTS, POINT, tmp_path / "narrow.zarr", dtype="bfloat16", **given)
    assert torch.equal(narrow.read(0, len(narrow)), wide.read(0, len(wide)).bfloat16().float())
