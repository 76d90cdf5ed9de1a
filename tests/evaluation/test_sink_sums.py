"""Sums over the sinks of a run: equal to a naive count over the complete track, however the steps are divided."""

import numpy as np
import pytest
from tracks import planted

import sinklens
from sinklens.evaluation.sink_sums import SinkSums
from sinklens.sinks import Record, SinkTrack
from sinklens.tasks import find_task

PROMPTS = [sample.prompt for sample in find_task("tiny-gsm").samples(3)]


def naive(score, steps):
    """Sinks per head and step of one row, counted over its leading `steps`, key by key."""
    sinks = []
    for values in score[:steps].reshape(-1, score.shape[-1]):
        values = values[~np.isnan(values)]
        sinks.append(sum(value > np.delete(values, place).mean() + 3 for place, value in enumerate(values)))
    return np.mean(sinks)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["tiny-llada", "tiny-llama"])
@pytest.mark.parametrize("at_once", [0, 10**5, 10**12])
def test_the_sums_of_a_run_equal_a_naive_count(name, at_once, monkeypatch, request):
    """Of an autoregressive run, the steps until each row has ended."""
    monkeypatch.setattr("sinklens.sinks.steps.AT_ONCE", at_once)
    model = request.getfixturevalue(name.replace("-", "_"))
    run = sinklens.generate(model, PROMPTS, progress=False)
    sums, parts = SinkSums(), []

    def reduce(track):
        parts.append(track.steps)
        sums(track)

    again = sinklens.generate(model, PROMPTS, progress=False, record_sinks=Record(reduce=reduce))
    assert (again.sinks, again.tokens.equal(run.tokens)) == (None, True)
    assert sum(parts) == run.steps_run
    assert len(parts) == {0: run.steps_run, 10**12: 1}.get(at_once, len(parts))
    found, score = sums.per_head(), run.sinks.scores().to_numpy()
    for row, answer in enumerate(run.answers):
        steps = answer.tokens + answer.ended if model.causal else run.steps_run
        assert found[row] == pytest.approx(naive(score[row], steps))
    if model.causal:
        assert len({answer.tokens for answer in run.answers}) > 1, "rows end at different steps"


def test_under_a_cache_the_sums_count_as_if_every_position_were_a_query():
    """Every query attends alike, so the sinks do not depend on how many queries a step computes."""
    row = np.array([0.0, 0.0, 0.02, 0.8, 0.03, 0.05, 0.05, 0.05])  # two positions of padding
    real, fresh = np.arange(8) >= 2, np.arange(8) >= 6
    exact = planted([6 * row] * 3, real)
    some = planted([6 * row, 2 * row, 2 * row], real)
    computed = np.stack([real, fresh, fresh])[None, :, None]
    for track in (exact, SinkTrack(some.data.assign(fresh=(("batch", "step", "layer", "pos"), computed)))):
        sums = SinkSums()
        sums(track)
        assert sums.per_head() == 1
