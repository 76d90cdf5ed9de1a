"""The study of undecided sinks on planted readings, and on a run against loops."""

import numpy as np
import pandas
import pytest
import xarray as xr
from scipy.stats import spearmanr

import sinklens
from sinklens.analyses.intervals import bootstrap
from sinklens.analyses.masked_sinks import MEASURES, MaskedSinks, matched_rows, of_prompt
from sinklens.experiments import logit_lens
from sinklens.sinks import Record
from sinklens.tasks.word_problems import held_out

PROMPTS = [problem.prompt for problem in held_out(2)]
STEPS, LENGTH = 6, 20


def prompts_with(sink_chance, named_chance, rows=40, seed=0):
    """Runs of one layer and two heads in which all positions stay undecided.

    `sink_chance` [pos] and `named_chance` (sink [step, pos]) -> [step, pos] are probabilities.
    """
    noise = np.random.default_rng(seed)
    found = []
    for _ in range(rows):
        sinks = noise.random((STEPS, 1, 2, LENGTH)) < sink_chance
        at_sink = sinks.any(axis=(1, 2))
        named = (noise.random((STEPS, LENGTH)) < named_chance(at_sink)).astype(float)[:, None]
        read = {"named": named, "probability": named, "entropy": 1 - named}
        undecided = np.ones((STEPS, LENGTH), dtype=bool)
        found.append(of_prompt(sinks * 5.0 + noise.random(sinks.shape), sinks, np.ones(sinks.shape), undecided, read))
    return xr.concat(found, dim="prompt")


def matched(data):
    return pandas.DataFrame(matched_rows("planted", data, 0)).set_index("measure")


def test_sinks_that_know_their_token_are_found():
    data = prompts_with(np.full(LENGTH, 0.2), lambda sink: np.where(sink, 0.8, 0.3))
    assert float(data["named_difference"].mean()) == pytest.approx(0.5, abs=0.03)
    table = matched(data)
    assert table.loc["named_difference", "estimate"] == pytest.approx(0.5, abs=0.03)
    assert table.loc["named_difference", "low"] > 0.4
    assert table.loc["entropy_difference", "high"] < -0.4
    assert bootstrap(data["partial"].to_numpy()[:, 0]).low > 0.3
    assert float(data["value_ratio"].mean()) == 1


def test_sinks_on_easy_positions_know_no_more_once_the_position_is_matched():
    """Both sinks and easy tokens are on the left; at a given place they are independent."""
    left = np.linspace(0.5, 0.05, LENGTH)
    data = prompts_with(left, lambda sink: np.broadcast_to(2 * left - 0.1, sink.shape).clip(0, 1))
    assert float(data["named_difference"].mean()) > 0.15
    assert float(data["correlation"].mean()) > 0.15
    found = matched(data).loc["named_difference"]
    assert found["low"] < 0 < found["high"]
    assert abs(found["estimate"]) < 0.05
    assert abs(float(data["partial"].mean())) < 0.06


def test_sinks_of_an_easy_template_know_no_more_within_it():
    """In one template, most positions are sinks and most tokens are easy: across templates, sinks seem to know more."""
    parts = [
        prompts_with(np.full(LENGTH, chance), lambda sink, chance=chance: np.full(sink.shape, 1.5 * chance), 20, seed)
        for seed, chance in enumerate((0.5, 0.05) * 4)
    ]
    data = xr.concat(parts, dim="prompt")
    assert matched(data).loc["named_difference", "low"] > 0.1
    data = data.assign_coords(prompt_group=("prompt", np.repeat(np.arange(8), 20).astype(str)))
    found = pandas.DataFrame(matched_rows("planted", data, 0)).set_index(["measure", "matched"])
    within = found.loc[("named_difference", "step, position, group")]
    assert within["low"] < 0 < within["high"]
    assert abs(within["estimate"]) < 0.1


def test_value_ratios_compare_within_a_step_and_head():
    """Head 0 has large values everywhere and no sink; head 1 has small ones, at its sink half of those."""
    sinks = np.zeros((1, 1, 2, 5), dtype=bool)
    sinks[0, 0, 1, 2] = True
    norm = np.stack([np.full(5, 100.0), [2, 2, 1, 2, 9]])[None, None]
    undecided = np.array([[True, True, True, True, False]])
    read = dict.fromkeys(("named", "probability", "entropy"), np.zeros((1, 1, 5)))
    data = of_prompt(sinks * 5.0, sinks, norm, undecided, read)
    assert float(data["value_ratio"][0]) == 0.5
    assert float(data["sinks"][0]) == 1 / 8
    assert np.isnan(data["sink_at"].to_numpy()[0, 0, 4])


def test_a_run_s_measures_equal_loops_over_its_steps(tiny_llada):
    settings = {"gen_length": 10, "steps": 10}
    study = MaskedSinks(settings=settings)
    data = study.measure(tiny_llada, PROMPTS, settings)
    run = sinklens.generate(tiny_llada, PROMPTS, record_sinks=Record(["values"]), **settings)
    sinks, norm, score = (
        run.sinks.detect().to_numpy(),
        run.sinks["value_norm"].to_numpy(),
        run.sinks["score"].to_numpy(),
    )
    for row in range(2):
        lens = logit_lens(tiny_llada, run, row=row, top_k=1)
        column = {int(at): place for place, at in enumerate(lens["column"].to_numpy())}
        for layer in range(tiny_llada.cfg.n_layers):
            differences, ratios, correlations = [], [], []
            for step in range(9):
                places = [
                    pos for pos in range(run.prompt_length, run.canvas.shape[2]) if run.unmask_step[row, pos] > step
                ]  # a position decided by this step is left out
                right = {
                    pos: float(lens["token"][step, layer, column[pos], 0] == run.tokens[row, pos]) for pos in places
                }
                strength = score[row, step, layer][:, places].mean(0)
                if len(places) >= 4 and len(set(right.values())) == 2:
                    correlations.append(spearmanr(strength, list(right.values())).statistic)
                one = [right[pos] for pos in places if sinks[row, step, layer, :, pos].any()]
                other = [right[pos] for pos in places if not sinks[row, step, layer, :, pos].any()]
                if one and other:
                    differences.append(np.mean(one) - np.mean(other))
                for head in range(tiny_llada.cfg.n_heads):
                    at = [norm[row, step, layer, head, pos] for pos in places if sinks[row, step, layer, head, pos]]
                    rest = [norm[row, step, layer, head, p] for p in places if not sinks[row, step, layer, head, p]]
                    ratios += [np.mean(at) / np.mean(rest)] if at and rest else []
            one = data.isel(prompt=row, layer=layer)
            for name, values in (
                ("named_difference", differences), ("value_ratio", ratios), ("correlation", correlations)
            ):  # fmt: skip
                expected = np.mean(values) if values else np.nan
                np.testing.assert_allclose(float(one[name]), expected, rtol=1e-4, atol=1e-6)


def test_an_autoregressive_model_has_no_undecided_sinks(tiny_llama):
    study = MaskedSinks(settings={"gen_length": 3})
    found = study.run([tiny_llama], PROMPTS)
    assert set(found.tables["layers"]["measure"]) == set(MEASURES)
    assert found.tables["layers"]["estimate"].isna().all()
    assert found.tables["matched"]["estimate"].isna().all()
