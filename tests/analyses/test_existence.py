"""The existence study on scores whose histogram and thresholds are known."""

import numpy as np
import pytest

import sinklens
from sinklens.analyses.existence import DETECTORS, sink_shares
from sinklens.sinks import Record
from sinklens.tasks import held_out


@pytest.fixture(scope="module")
def real_track(tiny_llada):
    prompts = [problem.prompt for problem in held_out(2)]
    record = Record(["values", "stream", "outputs"])
    return sinklens.generate(tiny_llada, prompts, record_sinks=record, gen_length=8, steps=4).sinks


def test_histogram_and_thresholds_equal_direct_counts(real_track):
    data = sink_shares(real_track)
    score = real_track.data["score"].to_numpy().astype(np.float64)
    real = real_track.data["is_real"].to_numpy()
    for row in range(2):
        bins, no_sink, total = np.zeros(100), {0: 0, 3: 0}, 0
        for pattern in score[row].reshape(-1, score.shape[-1]):
            values = pattern[real[row]]
            total += len(values)
            for j, value in enumerate(values):
                bins[min(int(value // 0.5), 99)] += 1
                others = (values.sum() - value) / (len(values) - 1)
                for epsilon in no_sink:
                    no_sink[epsilon] += not value > others + epsilon
        np.testing.assert_allclose(data["histogram"].sel(unit="sum")[row], bins / total, atol=2e-3)
        for epsilon, count in no_sink.items():
            assert float(data["no_sink"].sel(unit="sum", epsilon=epsilon)[row]) == pytest.approx(
                count / total, abs=1e-3
            )
    np.testing.assert_allclose(data["histogram"].sum("bin"), 1)


def test_value_norms_stand_beside_every_count(real_track):
    """Value norms at the sinks of each detector, from a loop."""
    data = sink_shares(real_track)
    norm, real = real_track.data["value_norm"].to_numpy(), real_track.data["is_real"].to_numpy()
    for name in ("epsilon-over-mean (sum, 3)", "mean + 2 std, pooled", "no-op"):
        found = DETECTORS[name].detect(real_track).to_numpy()
        for row in range(2):
            ratios = []
            for place in np.ndindex(found.shape[1:4]):
                median = np.median(norm[(row, *place)][real[row]])
                ratios += list(norm[(row, *place)][found[(row, *place)]] / median)
            one = data.sel(detector=name).isel(prompt=row)
            if not ratios:
                assert one[["value_ratio", "no_op"]].to_array().isnull().all()
            else:
                assert float(one["value_ratio"]) == pytest.approx(np.mean(ratios), rel=1e-4)
                assert float(one["no_op"]) == pytest.approx(np.mean(np.array(ratios) < 0.2))
    assert data["value_ratio"].sel(detector="epsilon-over-mean (sum, 3)").notnull().all()
