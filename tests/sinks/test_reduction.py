"""The reducing store: the parts it hands over are the track, and no step outlives its part."""

import gc
import weakref

import numpy as np
import pytest
import xarray as xr

import sinklens
from sinklens.errors import SettingError
from sinklens.sinks.record import Record

PROMPT = "Question: 20 + 18?\nAnswer:"


def test_the_parts_are_consecutive_pieces_of_the_track(tiny_llada, monkeypatch):
    monkeypatch.setattr("sinklens.sinks.steps.AT_ONCE", 50_000)
    parts = []
    sinklens.generate(tiny_llada, PROMPT, progress=False, record_sinks=Record(["values"], reduce=parts.append))
    run = sinklens.generate(tiny_llada, PROMPT, progress=False, record_sinks=Record(["values"]))
    assert 1 < len(parts) < run.steps_run
    for name in ("score", "value_norm", "token_id", "masked", "committed"):
        joined = np.concatenate([part[name].to_numpy() for part in parts], axis=1)
        np.testing.assert_array_equal(joined, run.sinks[name].to_numpy())
    for part in parts:
        xr.testing.assert_equal(part["is_real"], run.sinks["is_real"])
        assert part.prompt_length == run.sinks.prompt_length


def test_steps_are_dropped_once_they_are_handed_over(tiny_llada, monkeypatch):
    monkeypatch.setattr("sinklens.sinks.steps.AT_ONCE", 0)
    alive, most = [], 0

    def reduce(track):
        nonlocal most
        gc.collect()
        alive.append(weakref.ref(track))
        most = max(most, sum(one() is not None for one in alive))

    run = sinklens.generate(tiny_llada, PROMPT, progress=False, record_sinks=Record(reduce=reduce))
    assert len(alive) == run.steps_run > 2
    assert most <= 2  # the part at hand, and the argument of the call before


def test_a_run_that_reduces_keeps_no_places_either(tiny_llada):
    from sinklens.interventions import MaskSinks

    hooks = MaskSinks(top_k=1)
    kept = sinklens.generate(tiny_llada, PROMPT, hooks=hooks, progress=False)
    reduced = sinklens.generate(
        tiny_llada, PROMPT, hooks=hooks, progress=False, record_sinks=Record(reduce=lambda track: None)
    )
    assert kept.chosen
    assert not reduced.chosen
    assert reduced.tokens.equal(kept.tokens)


def test_reduce_is_a_function_and_excludes_a_folder(tmp_path):
    with pytest.raises(SettingError, match=r"reduce must be a function, without to=; got 3"):
        Record(reduce=3)
    with pytest.raises(SettingError, match=r"without to=; got .* and to='.*run.zarr'"):
        Record(reduce=print, to=str(tmp_path / "run.zarr"))
