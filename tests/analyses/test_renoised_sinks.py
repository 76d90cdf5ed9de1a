"""Renoised sinks, on runs whose sinks are planted on tokens or on places, and on hand-made tracks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
from planting import planted

from sinklens.analyses.kinds import Kinds
from sinklens.analyses.renoised_sinks import (
    CONDITIONS,
    DIFFERENCES,
    GROUPS,
    places,
    renoised_rows,
    renoised_sinks,
    without_canvas,
)
from sinklens.analyses.runs import OwnRun, own_run
from sinklens.errors import SettingError
from sinklens.interventions import FixedNoise
from sinklens.tasks.word_problems import held_out

PROMPTS = [problem.prompt for problem in held_out(2)]
STEPS, LENGTH, SINK = 7, 8, 3
SETTINGS = {"gen_length": LENGTH, "max_denoising_steps": STEPS, "entropy_bound": 34.0, "confidence_threshold": 0.0}


class Planted:
    """Runs in which layer 0 attends only to some keys of the canvas: those with tokens of a kind, or of one place.

    Every step draws the same tokens, of which only that of the place `SINK` is of the kind.
    """

    def __init__(self, model, by):
        self.model, self.by, self.canvas = model, by, None
        self.noise, self.conditioning = {}, []
        drawn = torch.arange(LENGTH) + 16 - SINK
        self.drawn = FixedNoise(sampled=drawn.expand(STEPS, 2, -1))

    def attracts(self, canvas):
        return canvas % 8 == 0 if self.by == "token" else torch.arange(LENGTH).expand_as(canvas) == SINK

    def run(self, more=()):
        self.conditioning.append({})

        def begin(value, hook):
            self.canvas = value[:, -LENGTH:].clone()

        def attend(value, hook):
            bonus = torch.nn.functional.pad(30.0 * self.attracts(self.canvas), (value.shape[-1] - LENGTH, 0))
            return value + bonus[:, None, None]

        def keep(value, hook):
            self.conditioning[-1][hook.step] = value.clone()

        def drawn(value, hook):
            self.noise.setdefault(hook.step, value.clone())

        hooks = [
            ("denoise.hook_canvas", begin), ("blocks.0.attn.hook_attn_scores", attend),
            ("denoise.hook_renoise", drawn), self.drawn, *more, ("denoise.hook_self_conditioning", keep),
        ]  # fmt: skip
        return own_run(self.model, PROMPTS, SETTINGS, hooks=hooks)

    def sinks(self, canvas):
        """Whether each position of a canvas is a sink of layer 0: its share of all queries is above the threshold."""
        attracted = self.attracts(canvas)
        return attracted & (LENGTH / attracted.sum(dim=-1, keepdim=True) > 3.5)


@pytest.mark.parametrize("by", ["token", "place"])
def test_sinks_of_tokens_end_with_their_token_and_sinks_of_places_stay(toy, by):
    world = Planted(toy("tiny-canvas"), by)
    base = world.run()
    start = base.run.prompt_length
    found = renoised_sinks(lambda hooks: world.run(hooks).run.sinks, base, LENGTH, STEPS, 3, seed=0)
    chosen = [one.chosen for one in places(base, LENGTH, 3, seed=0)]
    assert min(map(len, chosen)) > 0
    still = np.zeros((2, len(GROUPS), len(CONDITIONS)))
    for row, group in np.ndindex(2, len(GROUPS)):
        for place in chosen[row]:
            pos = place.positions[group]
            kept = base.run.canvas[row, place.step + 1, start:]
            noisy = kept.clone()
            noisy[pos] = world.noise[place.step][row, pos]
            after = [int(world.sinks(canvas)[pos]) for canvas in (kept, noisy)]
            still[row, group] += [after[0], after[1], after[0], after[1]]
    np.testing.assert_array_equal(found["still_sinks"], still)
    assert found["renoised_sinks"].to_numpy().tolist() == [len(row) for row in chosen]
    rows = {row["group"]: row["estimate"] for row in renoised_rows("m", found, 0)}
    assert rows["sinks: renoised − token kept"] == (0 if by == "place" else pytest.approx(-0.8, abs=0.2))
    assert rows["others: renoised"] < 0.3


def test_the_prediction_of_the_place_is_left_out_in_two_of_four_conditions(toy):
    world = Planted(toy("tiny-canvas"), "place")
    base = world.run()
    renoised_sinks(lambda hooks: world.run(hooks).run.sinks, base, LENGTH, STEPS, 1, seed=0)
    chosen = [one.chosen for one in places(base, LENGTH, 1, seed=0)]
    assert len(world.conditioning) == 1 + 2 * 3
    for number, seen in enumerate(world.conditioning[1:]):
        group, condition = divmod(number, 3)
        zero = {(step, *place) for step in seen for place in (seen[step] == 0).all(dim=2).nonzero().tolist() if step}
        expected = {(row[0].step + 1, at, row[0].positions[group]) for at, row in enumerate(chosen)}
        assert zero == (expected if condition else set())


def hand_made(seed=0):
    """Random sinks of two heads on a canvas of seven positions after a prompt of two, with random decisions."""
    rng = np.random.default_rng(seed)
    sinks, masked = rng.random((3, 6, 1, 2, 7)) < 0.3, rng.random((3, 6, 7)) < 0.1
    token = np.where(rng.random((3, 6, 7)) < 0.2, 6, 5)
    own = np.ones((3, 6), dtype=bool)
    own[1, 4:] = False
    score = np.concatenate([np.full((3, 6, 1, 2, 2), 0.5), np.where(sinks, 90.0, 0.5)], axis=-1)
    track = planted(
        score, masked=np.pad(masked, ((0, 0), (0, 0), (2, 0))),
        token_id=np.pad(token, ((0, 0), (0, 0), (2, 0)), constant_values=5), prompt_length=2,
    )  # fmt: skip
    canvas = torch.arange(3)[:, None, None].expand(3, 7, 9)
    run = SimpleNamespace(sinks=track, prompt_length=2, canvas=canvas, real=torch.ones(3, 9, dtype=torch.bool))
    return OwnRun(run, own), track.detect().to_numpy()[:, :, 0, :, 2:], masked, token, own


def test_places_are_sinks_that_two_steps_accept_and_controls_are_the_nearest_that_are_none():
    base, sinks, masked, token, own = hand_made()
    for row, found in enumerate(places(base, 7, 1000, seed=0)):
        expected, without = [], 0
        for step in range(5):
            kept = [
                own[row, step] and own[row, step + 1] and not masked[row, step, pos] and not masked[row, step + 1, pos]
                and token[row, step, pos] == token[row, step + 1, pos] for pos in range(7)
            ]  # fmt: skip
            for pos in range(7):
                heads = [head for head in range(2) if sinks[row, step, head, pos]]
                if not kept[pos] or not heads:
                    continue
                free = [at for at in range(7) if kept[at] and not any(sinks[row, step, head, at] for head in heads)]
                without += not free
                if free:
                    expected.append((step, pos, min(free, key=lambda at: (abs(at - pos), at)), heads))
        listed = [(p.step, *p.positions, np.flatnonzero(p.heads[0]).tolist()) for p in found.chosen]
        assert listed == expected
        assert len(expected) > 2
        assert found.share == pytest.approx(len(expected) / (len(expected) + without))


def test_a_sample_of_places_is_a_part_of_them_and_depends_on_the_seed():
    base, *_ = hand_made()
    every, some, same, other = (places(base, 7, number, seed) for number, seed in ((1000, 0), (2, 0), (2, 0), (2, 1)))
    steps = [[[(p.step, p.positions) for p in row.chosen] for row in found] for found in (every, some, same, other)]
    assert all(len(part) == 2 and set(part) < set(full) for full, part in zip(steps[0], steps[1], strict=True))
    assert steps[1] == steps[2] != steps[3]


def test_shares_and_their_differences_are_pooled_over_prompts():
    data = without_canvas(3).copy(deep=True)
    data["renoised_sinks"][:] = [10, 30, 0]
    data["still_sinks"][:] = 0
    data["still_sinks"][:2, 0, 0] = [9, 27]
    data["still_sinks"][:2, 0, 1] = [4, 8]
    data["still_sinks"][:2, 1, 1] = [1, 3]
    rows = {row["group"]: row for row in renoised_rows("m", data, 0) if row["measure"] != "control_share"}
    assert rows["sinks: token kept"]["estimate"] == pytest.approx(0.9)
    assert rows["sinks: renoised"]["estimate"] == pytest.approx(12 / 40)
    assert rows["sinks: renoised − token kept"]["estimate"] == pytest.approx(-24 / 40)
    assert rows["renoised: sinks − others"]["estimate"] == pytest.approx(8 / 40)
    assert rows["sinks: renoised − token kept"]["high"] == pytest.approx(-5 / 10)  # the first prompt alone
    assert {row["prompts"] for name, row in rows.items() if name.startswith("sinks: token kept")} <= {2}
    assert rows["sinks: renoised"]["sinks"] == 40
    assert set(DIFFERENCES) < set(rows)


def test_a_model_with_a_mask_token_has_no_rows():
    assert renoised_rows("m", xr.concat([without_canvas(2)] * 2, "prompt"), 0) == []


def test_a_negative_number_of_places_is_refused():
    with pytest.raises(SettingError, match="places is the number of sinks of a prompt to renoise, 0 or more; got -1"):
        Kinds(places=-1)
