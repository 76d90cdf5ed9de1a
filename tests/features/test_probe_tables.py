"""What is planted is found, with its place and its step; what is absent is not; prompts are never on both sides."""

import numpy as np
import pytest

import sinklens
from sinklens.errors import SettingError
from sinklens.features import ProbeData, probe_data, probe_table
from sinklens.utils.estimates import holm

D = 12


def planted_data(prompts=30, steps=3, positions=4, read_from=1, strength=3.0, seed=0):
    """A label of each place that "late" has along one direction from step `read_from` on, and "early" never."""
    rng = np.random.default_rng(seed)
    prompt, step, pos = (axis.ravel() for axis in np.indices((prompts, steps, positions)))
    y, direction = rng.integers(0, 2, size=len(prompt)), rng.normal(size=D)
    noise = rng.normal(size=(2, len(prompt), D))
    signal = strength * (step >= read_from)[:, None] * np.outer(2 * y - 1, direction / np.linalg.norm(direction))
    columns = {"prompt": prompt, "step": step, "pos": pos, "token_id": np.zeros(len(prompt), dtype=int), "y": y}
    return ProbeData({"early": noise[0], "late": noise[1] + signal}, columns | {"number": 2.0 * y + 1})


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("kind", ["mass_mean", "logistic", "difference", "centroid"])
def test_a_planted_label_is_found_where_it_is_and_only_there(kind):
    table = probe_table(planted_data(), "y", "step", kind=kind).set_index(["point", "step"])
    there = [("late", 1), ("late", 2)]
    assert (table.loc[there, "score"] > 0.95).all()
    assert (table.loc[there, "low"] > 0.85).all()
    assert (table.loc[there, "p_holm"] < 0.05).all()
    absent = table.drop(there)
    assert (absent["p_holm"] > 0.05).all()
    assert (absent["score"] < 0.65).all()
    controls = table[["majority", "shuffled", "bag", "place"]].loc[there].drop(columns="bag")
    assert (controls < 0.65).all(axis=None)
    assert table["bag"].isna().all()
    np.testing.assert_allclose(table["selectivity"], table["score"] - table["shuffled"])
    assert table["p_holm"].tolist() == pytest.approx(holm(table["p"].tolist()))


def test_a_planted_number_is_found_by_a_regression():
    table = probe_table(planted_data(), "number", kind="ridge").set_index("point")
    assert table.loc["late", "score"] > 0.4
    assert table.loc["early", "score"] < 0.05
    assert table["majority"].abs().max() < 1e-9
    assert table.loc["late", "low"] < table.loc["late", "score"] < table.loc["late", "high"]


@pytest.mark.parametrize(("units", "each"), [("prompt", 1), ("template", 3)])
def test_what_identifies_a_unit_does_not_help_on_other_units(units, each):
    """Every unit has its own direction and its own label, as what is learned by heart would."""
    rng = np.random.default_rng(3)
    place = np.arange(240)
    unit = place // 12
    own, y = rng.normal(size=(20, 40)) * 4, rng.integers(0, 2, size=20)
    columns = {"prompt": place // (12 // each), "template": unit, "place": place, "y": y[unit]}
    data = ProbeData({"x": own[unit] + rng.normal(size=(240, 40))}, columns)
    row = probe_table(data, "y", units=units).loc[0]
    assert (row["units"], row["p"] > 0.05) == (20, True)
    smaller = "place" if units == "prompt" else "prompt"
    assert probe_table(data, "y", units=smaller).loc[0, "score"] > 0.95  # what splitting by it would claim


def test_a_label_that_the_tokens_give_away_is_marked_by_the_bag():
    rng = np.random.default_rng(5)
    prompt = np.repeat(np.arange(24), 5)
    canvases = rng.integers(0, 9, size=(24, 6))
    y = (canvases == 4).any(axis=1)[prompt]
    columns = {"prompt": prompt, "canvas": prompt, "token_id": np.full(120, 8), "y": y, "pos": np.arange(120) % 5}
    table = probe_table(ProbeData({"x": rng.normal(size=(120, 4))}, columns, canvases), "y")
    assert table.loc[0, "bag"] > table.loc[0, "majority"] + 0.1
    assert table.loc[0, "place"] < table.loc[0, "bag"] - 0.1


def test_a_label_that_the_position_gives_away_is_marked_by_the_place():
    data = planted_data().with_label("third", planted_data().column("pos") == 3)
    table = probe_table(data, "third", balanced=True)
    assert (table["place"] > 0.99).all()
    assert (table["score"] < 0.65).all()
    assert table["majority"].tolist() == pytest.approx([0.5, 0.5])  # every class counts alike
    assert probe_table(data, "third", repeats=1).loc[0, "majority"] == pytest.approx(0.75)


def test_intervals_keep_a_width_where_every_prompt_is_right():
    data = planted_data(positions=1, strength=40.0, read_from=0)
    row = probe_table(data.where(step=0), "y").set_index("point").loc["late"]
    assert (row["score"], row["high"]) == (1.0, 1.0)
    assert row["low"] == pytest.approx(30 / (30 + 1.96**2), abs=1e-3)


def test_noise_is_divided_into_quarters_and_a_single_class_has_no_score():
    data = planted_data().with_label("noise", np.linspace(1, 0, 360))
    assert probe_table(data, "y", "noise")["noise"].unique().tolist() == [0.25, 0.5, 0.75, 1.0]
    alone = probe_table(data.with_label("y", data.column("step") == 0), "y", "step")
    assert alone[["score", "p", "p_holm"]].isna().all(axis=None)


@pytest.mark.parametrize(("given", "match"), [
    ({"folds": 31}, "there are 30 values of 'prompt', too few for 31 folds"),
    ({"penalty": True}, "penalty must be a finite number above 0; got True"),
    ({"folds": 1}, "folds must be 2 or more and repeats 1 or more; got 1 and 3"),
])  # fmt: skip
def test_too_few_prompts_and_senseless_settings_are_refused(given, match):
    with pytest.raises(SettingError, match=match):
        probe_table(planted_data(), "y", **given)


@pytest.mark.extended
def test_the_planted_checkpoint_writes_the_neighbor_in_layer_0(tmp_path):
    """Head *previous* writes whether the token before is a mask, which the embedding of a mask does not say."""
    from planted import planted_checkpoint

    from sinklens.tasks.word_problems import training

    model = sinklens.load(planted_checkpoint(tmp_path / "planted"))
    prompts = [problem.prompt for problem in training(seed=3, size=10)]
    run = sinklens.generate(model, prompts, remasking="random", progress=False)
    data = probe_data(run, ["blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"], scope="masked", steps=[8, 12])
    before = run.undecided[:, :-1].roll(1, dims=2).numpy()
    table = probe_table(data.with_label("previous", before), "previous", "step", balanced=True)
    found = table.set_index(["point", "step"])["score"]
    assert (found["blocks.0.hook_resid_post"] == 1).all()
    assert found["blocks.0.hook_resid_pre"].tolist() == pytest.approx([0.5, 0.5])
