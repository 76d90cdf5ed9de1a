"""Matched comparisons against loops over strata."""

from collections import defaultdict

import numpy as np
import pytest
from planting import planted

from sinklens.analyses.matching import matched_enrichment
from sinklens.sinks import Detector
from sinklens.sinks.kinds import Kind, kinds, states

MASK, WORD = 1, 5
TEXTS = {5: " Tom", 6: "\n", 7: ".", 8: " 12"}


def random_track(seed=0):
    """Two rows of random tokens and scores, 3 steps, 2 layers, 3 heads, 8 positions; row 0 starts with padding."""
    noise = np.random.default_rng(seed)
    real = np.ones((2, 8), dtype=bool)
    real[0, :2] = False
    ids = noise.choice([MASK, 5, 6, 7, 8], (2, 3, 8))
    score = np.where(real[:, None, None, None], noise.exponential(size=(2, 3, 2, 3, 8)) ** 2, np.nan)
    return planted(score, real=real, masked=ids == MASK, token_id=ids, prompt_length=4, words=TEXTS)


class Above(Detector):
    """Scores above 1."""

    def detect(self, track):
        return track.scores() > 1


@pytest.mark.parametrize("matched", [[], ["step"], ["position"], ["step", "position"], ["step", "state", "position"]])
def test_the_ratio_is_mantel_and_haenszel_s_sum_over_strata(matched):
    track = random_track()
    codes, state = kinds(track).to_numpy(), states(track).to_numpy()
    sinks = (track.scores() > 1).sum(("layer", "head")).to_numpy()
    for kind in (Kind.WORD, Kind.DIGIT, Kind.MASK):
        tables = defaultdict(lambda: np.zeros((2, 2)))
        for row, step, pos in np.ndindex(codes.shape):
            if codes[row, step, pos] >= 0:
                label = {"step": step, "state": state[row, step, pos], "position": pos}
                table = tables[tuple(label[name] for name in matched)]
                table[int(codes[row, step, pos] != kind)] += sinks[row, step, pos], 1
        above = sum(t[0, 0] * t[1, 1] / t[:, 1].sum() for t in tables.values())
        below = sum(t[1, 0] * t[0, 1] / t[:, 1].sum() for t in tables.values())
        found = matched_enrichment(track, Above(), matched=matched).sel(kind=kind.name.lower())
        if below == 0 and above == 0:
            assert np.isnan(found["ratio"])
        else:
            assert float(found["ratio"]) == pytest.approx(np.divide(above, below) if below else np.inf)
        assert float(found["sinks"]) == sum(t[0, 0] for t in tables.values())
        shared = [t for t in tables.values() if t[0, 1] and t[1, 1]]
        assert float(found["matched_sinks"]) == sum(t[0, 0] for t in shared)
        assert float(found["matched_positions"]) == sum(t[0, 1] for t in shared)
