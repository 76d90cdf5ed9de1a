"""Matched comparisons against loops over strata and a planted Simpson's paradox."""

from collections import defaultdict

import numpy as np
import pytest
from planting import planted

from sinklens.analyses.matching import matched_enrichment
from sinklens.sinks import Detector
from sinklens.sinks.kinds import Kind, enrichment, kinds, states

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


def paradox(rows=400, seed=0):
    """Prompt positions 0–3 are sinks half of the time; answer positions rarely, but masks twice as often as the others.

    Before each of 8 steps but the first, one more of 12 answer positions is decided, in a random order.
    """
    noise = np.random.default_rng(seed)
    ids = np.full((rows, 8, 16), WORD)
    for row in range(rows):
        order = noise.permutation(12)
        for step in range(8):
            ids[row, step, 4 + order[step:]] = MASK
    chance = np.where(np.arange(16) < 4, 0.5, np.where(ids == MASK, 0.1, 0.05))
    score = (noise.random((rows, 8, 16)) < chance) * 6.0
    return planted(score[:, :, None, None], masked=ids == MASK, token_id=ids, prompt_length=4, words=TEXTS)


def test_masks_that_look_avoided_are_sought_at_matched_positions():
    """Simpson's paradox: 0.1 against a mean of 0.22 overall, against 0.05 in the same places."""
    track = paradox()
    crude = matched_enrichment(track, Above(), matched=[])["ratio"].sel(kind="mask")
    by_step = matched_enrichment(track, Above(), matched=["step"])["ratio"].sel(kind="mask")
    matched = matched_enrichment(track, Above(), matched=["step", "position"])["ratio"].sel(kind="mask")
    assert float(crude) < 0.5
    assert float(by_step) < 0.5
    assert 1.6 < float(matched) < 2.4
    assert float(enrichment(track, Above())["matched"].mean("batch").sel(kind="mask")) < 1  # by step alone: avoided
    by_state = matched_enrichment(track, Above(), by="state", matched=["step", "position"])
    assert float(by_state["ratio"].sel(state="masked")) == pytest.approx(float(matched))
    assert float(by_state["ratio"].sel(state="committed")) == pytest.approx(1 / float(matched))
    assert np.isnan(by_state["ratio"].sel(state="prompt"))  # no prompt position is ever anything else
    assert float(by_state["matched_positions"].sel(state="prompt")) == 0


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
