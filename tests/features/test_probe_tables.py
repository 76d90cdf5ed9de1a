"""What is planted is found, with its place and its step; what is absent is not; prompts are never on both sides."""

import numpy as np
import pytest

import sinklens
from sinklens.errors import SettingError
from sinklens.features import ProbeData, probe_data, probe_table, probe_tables
from sinklens.utils.estimates import holm, proportion

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
    assert (table.loc[there, ["score", "low"]] > [0.95, 0.85]).all(axis=None)
    assert (table.loc[there, "p_holm"] < 0.05).all()
    absent = table.drop(there)
    assert (absent["p_holm"] > 0.05).all()
    assert (absent["score"] < 0.65).all()
    assert (table.loc[there, ["majority", "shuffled", "place"]] < 0.65).all(axis=None)
    assert table["bag"].isna().all()
    assert table[["control", "selectivity"]].isna().all(axis=None)  # one token everywhere has one label
    assert table["p_holm"].tolist() == pytest.approx(holm(table["p"].tolist()))


@pytest.mark.parametrize(("kind", "shift"), [("logistic", 0), ("difference", 0), ("ridge", 1)])
def test_what_is_learned_by_heart_for_each_token_has_no_selectivity(kind, shift):
    """The label of the first point is a function of the token, that of the second is written beside the token."""
    rng = np.random.default_rng(2)
    prompt, token = np.repeat(np.arange(40), 12), rng.integers(0, 16, size=480)
    embedded = np.eye(16)[token] * 4 + rng.normal(size=(480, 16)) * 0.1
    own, beside = token % 2 + shift, rng.integers(0, 2, size=480) + shift
    written = np.concatenate([embedded[:, :0], 9.0 * beside[:, None], rng.normal(size=(480, 9))], axis=1)
    data = ProbeData({"x": embedded}, {"prompt": prompt, "token_id": token, "y": own, "beside": beside})
    heart = probe_table(data, "y", kind=kind).loc[0]
    assert abs(heart["selectivity"]) < (0.05 if kind != "difference" else 0.2)
    assert heart["selectivity"] == pytest.approx(heart["score"] - heart["control"])
    assert heart["score"] > 0.95
    assert heart["p"] == pytest.approx(1 / 2000)
    assert probe_table(ProbeData({"x": written}, data.columns), "beside", kind=kind).loc[0]["selectivity"] > 0.35
    del data.columns["token_id"]
    assert np.isnan(probe_table(data, "y", kind=kind).loc[0, "selectivity"])


@pytest.mark.parametrize("places", ["as many", "unequal", "alike within a prompt"])
def test_p_is_uniform_where_activations_say_nothing(places, monkeypatch):
    """Places of a prompt resemble each other, and so do their labels; 400 cases, with limits of their share."""
    monkeypatch.setattr(probe_tables, "RESAMPLES", 200)
    found = []
    for seed in range(400):
        rng = np.random.default_rng(seed)
        size = rng.integers(1, 6, size=15) if places == "unequal" else np.full(15, 3)
        unit = np.repeat(np.arange(15), size)
        x = rng.normal(size=(15, 6))[unit] * 2 + rng.normal(size=(len(unit), 6))
        y = rng.integers(0, 2, size=15)[unit]
        if places == "alike within a prompt":
            y = np.where(rng.random(len(unit)) < 0.2, 1 - y, y)
        fold = rng.permutation(np.arange(15) % 5)[unit]
        found.append(probe_tables._Test(unit, fold, "logistic", 1.0, False).p_value(x, y, seed))
    for level in (0.05, 0.1, 0.25, 0.5):
        share = proportion(sum(p <= level for p in found), 400)
        assert share.low <= level <= share.high, (level, share)


def test_p_is_the_share_of_exchanges_that_fit_as_well(monkeypatch):
    """The rule, written with scikit-learn: labels of whole prompts, at their relative places, and ridge regressions."""
    from sklearn.linear_model import Ridge
    from sklearn.preprocessing import StandardScaler

    monkeypatch.setattr(probe_tables, "RESAMPLES", 30)
    for d, classes, kind in [(3, 2, "logistic"), (70, 3, "centroid"), (30, 3, "logistic"), (5, 2, "ridge")]:
        rng = np.random.default_rng(d)
        unit = np.repeat(np.arange(12), rng.integers(1, 6, size=12))
        x, y = rng.normal(size=(len(unit), d)), rng.integers(0, classes, size=len(unit))
        fold, draws, quality = rng.permutation(np.arange(12) % 3)[unit], np.random.default_rng(5), []
        for draw in range(30):
            giver, moved = np.arange(12) if not draw else draws.permutation(12), y.copy()
            for one in range(12):
                to, given = np.flatnonzero(unit == one), y[unit == giver[one]]
                moved[to] = [given[number * len(given) // len(to)] for number in range(len(to))]
            labels = moved[:, None] if kind == "ridge" else moved[:, None] == np.arange(classes)
            labels, missed, spread = labels.astype(float), 0.0, 0.0
            for number in range(3):
                known, held = fold != number, fold == number
                scaler = StandardScaler().fit(x[known])
                probe = Ridge(alpha=2.0).fit(scaler.transform(x[known]), labels[known])
                predicted = probe.predict(scaler.transform(x[held])).reshape(labels[held].shape)
                missed += ((labels[held] - predicted) ** 2).sum()
                spread += ((labels[held] - labels[known].mean(axis=0)) ** 2).sum()
            quality.append(1 - missed / spread)
        wanted = np.mean([one >= quality[0] - 1e-9 for one in quality])
        assert probe_tables._Test(unit, fold, kind, 2.0, False).p_value(x, y, 5) == pytest.approx(wanted)


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
    # what splitting by the smaller unit would claim
    assert probe_table(data, "y", units="place" if units == "prompt" else "prompt").loc[0, "score"] > 0.95


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
    assert table["p"].isna().all()  # all prompts have the same labels
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
    from planted_model import planted_checkpoint

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
