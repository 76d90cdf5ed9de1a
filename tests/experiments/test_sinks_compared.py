"""What a cache policy changes: logits on the exact run's canvases, tokens, and sinks."""

import numpy as np
import pytest
import torch

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import effect, sinks_compared
from sinklens.interventions import MaskedLogits
from sinklens.sampling import DualCache

PROMPTS = ["one two three four five six", "seven eight nine"]
SETTINGS = {"gen_length": 12, "block_length": 6}


@pytest.fixture(scope="module")
def found(worded):
    return effect(worded("llama"), PROMPTS, cache=DualCache(), **SETTINGS)


def test_the_first_run_is_exact_and_the_others_follow_the_policy(found):
    assert "fresh" not in found.base.sinks
    assert "fresh" in found.free.sinks
    assert torch.equal(found.replayed.canvas, found.base.canvas)


def test_kl_under_replay_is_that_of_the_computed_masked_positions(worded, found):
    exact, cached = MaskedLogits(), MaskedLogits()
    base = sinklens.generate(worded("llama"), PROMPTS, hooks=[exact], **SETTINGS)
    run = sinklens.generate(worded("llama"), PROMPTS, hooks=[cached], replay=base, cache=DualCache(), **SETTINGS)
    kl = found.under_replay["kl"].to_numpy()
    assert kl[:, [0, 6]] == pytest.approx(0, abs=1e-9)  # complete steps
    for step in (2, 8):
        places = run.undecided[:, step].nonzero().tolist()
        block = range(run.prompt_length + step // 6 * 6, run.prompt_length + step // 6 * 6 + 6)
        for row in range(2):
            values = []
            for n, (at, position) in enumerate(places):
                if at == row and position in block:
                    p, q = (logits.kept[step][n].double().softmax(0) for logits in (exact, cached))
                    values.append(float((p * (p / q).log()).sum()))
                assert bool(cached.kept[step][n].isnan().all()) == (position not in block)
            assert kl[row, step] == pytest.approx(np.mean(values), rel=1e-4)
            assert kl[row, step] > 1e-6


def test_sinks_that_were_lost_added_and_moved_are_counted(found):
    data = sinks_compared(found.base, found.replayed)
    scores = [run.sinks["score"].to_numpy() for run in (found.base, found.replayed)]
    real = found.base.real.numpy()
    for row in range(2):
        for step in (0, 3, 7):
            sets, tops = [], []
            for score in scores:
                at = score[row, step][..., real[row]]
                at = at / at.mean(-1, keepdims=True)
                rest = (at.sum(-1, keepdims=True) - at) / (at.shape[-1] - 1)
                sets.append(set(zip(*np.nonzero(at > rest + 3.0), strict=True)))
                tops.append(at.argmax(-1))
            here = data.isel(batch=row, step=step)
            assert int(here["sinks"]) == len(sets[0])
            assert int(here["sinks_lost"]) == len(sets[0] - sets[1])
            assert int(here["sinks_added"]) == len(sets[1] - sets[0])
            assert int(here["sinks_moved"]) == int((tops[0] != tops[1]).sum())
    assert int(data["sinks_moved"].sum()) > 0


def test_an_effect_compares_sums_over_the_queries_that_the_policy_computed(found):
    queries = found.replayed.sinks["fresh"].any("layer")
    assert (found.same_queries.sinks["computed"] == queries).all()
    assert int(queries.isel(step=2).sum()) == 12  # the block of both rows
    data = sinks_compared(found.same_queries, found.replayed)
    for name in ("sinks", "sinks_lost", "sinks_added", "sinks_moved"):
        assert (found.under_replay[name] == data[name]).all()
        assert name not in found.free_running
    complete = [0, 6]
    assert int(data["sinks_moved"].isel(step=complete).sum()) == 0
    everywhere = sinks_compared(found.base, found.replayed)
    assert int(data["sinks_moved"].sum()) < int(everywhere["sinks_moved"].sum())
    assert int(data["sinks_moved"].sum()) > 0


def test_sinks_of_runs_without_them_are_refused(worded, found):
    run = sinklens.generate(worded("llama"), PROMPTS, record_sinks=False, **SETTINGS)
    with pytest.raises(SettingError, match="sinks_compared needs the sinks of both runs; run them with record_sinks"):
        sinks_compared(found.base, run)
