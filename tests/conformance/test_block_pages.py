"""Pages, terminals and evaluations of block-causal models."""

import numpy as np
import pytest
from rich.console import Console
from watching import PADDED

import sinklens
from sinklens.errors import TrackError
from sinklens.sinks import SinkTrack
from sinklens.views import report, terminal


@pytest.mark.parametrize("cached", [False, True])
def test_a_run_has_a_page_a_file_and_a_line_per_step(worded, tmp_path, cached):
    model = worded("sdar")
    run = sinklens.generate(model, PADDED, gen_length=10, use_cache=cached, stop=False)
    assert "w33" in report(run, tmp_path / "page.html").read_text()
    saved = SinkTrack.open(run.sinks.save(tmp_path / "sinks.nc"))
    assert saved.data["score"].equals(run.sinks.data["score"])
    assert saved.data.attrs["block_length"] == 4
    console = Console(record=True, width=120)
    terminal.show(model, run, console)
    assert len(console.export_text().splitlines()) >= run.steps_run


def test_units_that_count_queries_are_refused(worded):
    plain, cached = (
        sinklens.generate(worded("sdar"), PADDED, gen_length=6, use_cache=cached).sinks for cached in (False, True)
    )
    assert plain.scores("fraction").notnull().any()
    with pytest.raises(TrackError, match=r"unit 'visible' is not available for this track of a block-causal run: its"):
        plain.scores("visible")
    with pytest.raises(TrackError, match=r"unit 'fraction' is not available .* block-causal run with a cache"):
        cached.scores("fraction")
    mean = plain.scores() / plain.data["is_real"].sum("pos")  # every position is a query
    assert np.allclose(plain.scores("fraction").fillna(0), mean.fillna(0))
