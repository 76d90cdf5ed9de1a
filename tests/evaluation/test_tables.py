"""The table: planted numbers are recovered, pairs share their samples, and other settings make another group."""

import math

import numpy as np
import pandas as pd
import pytest
from ledgers import HAND, planted_run

from sinklens.errors import ControlWarning, LedgerError, SettingError
from sinklens.evaluation import Condition, LedgerRun, frame, masking, paired, proportion, under_caches
from sinklens.evaluation.ledger import Writer
from sinklens.interventions import AblateHeads
from sinklens.utils.estimates import holm, unpaired

UNMASKED, ONE, ONE_RANDOM, FIVE, FIVE_RANDOM = masking([1, 5], ["random"])
LLADA = "GSAI-ML/LLaDA-8B-Instruct"


def verdicts(text):
    """'101' is right, wrong, right."""
    return {f"s{number:02d}": letter == "1" for number, letter in enumerate(text)}


BASE = "1111111100"
MASKED = "1100000010"
RANDOM = "1111110000"


@pytest.fixture
def ledger(tmp_path):
    planted_run(tmp_path, verdicts(BASE), UNMASKED, empty=True)
    planted_run(tmp_path, verdicts(MASKED), ONE, masks=2)
    planted_run(tmp_path, verdicts(RANDOM), ONE_RANDOM)
    planted_run(tmp_path, verdicts(BASE[:5]), FIVE, seconds=0.25)
    return tmp_path


def by_condition(ledger, **given):
    return frame(ledger, **given).set_index("condition")


def values(table, *columns):
    """The rows as tuples, with None for NaN."""
    rows = table[list(columns)].itertuples(index=False)
    return [tuple(None if pd.isna(value) else value for value in row) for row in rows]


def test_planted_accuracies_and_rates_are_recovered(ledger):
    columns = ("condition", "right", "total", "estimate", "empty", "masks", "per_second", "devices", "pick")
    found = frame(ledger)
    assert values(found, *columns) == [
        ("unmasked", 8, 10, 0.8, 1.0, 0.0, 2.0, "cpu", ""),
        ("1 sink", 3, 10, 0.3, 0.0, 1.0, 2.0, "cpu", "strongest"),
        ("1 random key", 6, 10, 0.6, 0.0, 0.0, 2.0, "cpu", "random"),
        ("5 sinks", 5, 5, 1.0, 0.0, 0.0, 4.0, "cpu", "strongest"),
    ]
    assert found.loc[1, ["low", "high"]].tolist() == pytest.approx([0.1078, 0.6032], abs=1e-4)  # Wilson, 3 in 10


def pairs(found, name):
    """The difference, the answers lost and gained, and the samples, against the unmasked run and the control."""
    kinds = [[f"against_{kind}_{part}" for part in ("difference", "lost", "gained", "total")]
             for kind in ("unmasked", "random")]  # fmt: skip
    listed = [found.loc[name, columns].tolist() for columns in kinds]
    return [None if math.isnan(one[0]) else (pytest.approx(one[0]), *one[1:]) for one in listed]


def test_differences_are_paired_on_the_samples_that_both_have(ledger):
    found = by_condition(ledger)
    assert {name: pairs(found, name) for name in found.index} == {
        "unmasked": [None, None],
        "1 sink": [(-0.5, 6, 1, 10), (-0.3, 4, 1, 10)],
        "1 random key": [(-0.2, 2, 0, 10), None],
        "5 sinks": [(0.0, 0, 0, 5), None],
    }


def test_a_control_has_the_same_masking_settings(tmp_path):
    """With the newest and all queries and two seeds of random keys, each is paired with its control's first seed."""
    newest, every = (masking([1], ["random", "same_mass"], queries=queries) for queries in ("newest", "all"))
    planted_run(tmp_path, verdicts(BASE), UNMASKED)
    for conditions, sinks, control in ((newest, "1100", "1110"), (every, "1000", "1111")):
        planted_run(tmp_path, verdicts(sinks), conditions[1])
        planted_run(tmp_path, verdicts(control), conditions[2])
        planted_run(tmp_path, verdicts("1111"), conditions[3])
    planted_run(tmp_path, verdicts("0000"), masking([1], ["random"], seed=1)[2])
    found = by_condition(tmp_path)
    rows = ["1 sink", "1 sink, for all queries"]
    assert found.loc[rows, ["against_random_difference", "against_same_mass_difference"]].to_numpy().tolist() == [
        [-0.25, -0.5],
        [-0.75, -0.75],
    ]
    assert found.loc["1 random key, seed 1", "estimate"] == 0


def of_own(**names):
    """Conditions of a user's own: name -> the condition that it is a control of, or ""."""
    return [Condition(name, (AblateHeads(heads=[place]),), control_of=names[name]) for place, name in enumerate(names)]


def test_a_control_of_ones_own_is_paired_with_the_condition_it_names_under_the_same_policy(tmp_path):
    conditions = under_caches(of_own(mine="", random="mine"), ["dual"])
    assert [one.control_of for one in conditions] == ["", "mine", "", "mine, cache dual"]
    planted_run(tmp_path, verdicts(BASE), UNMASKED)
    for condition, text in zip(conditions, (MASKED, RANDOM, "1110", "1111"), strict=True):
        planted_run(tmp_path, verdicts(text), condition)
    found = by_condition(tmp_path)
    assert (pairs(found, "mine")[1], pairs(found, "random")[1]) == ((-0.3, 4, 1, 10), None)
    assert pairs(found, "mine, cache dual")[1] == (-0.25, 1, 0, 4)
    expected = paired(*(np.array(list(verdicts(text).values())) for text in (RANDOM, MASKED)))
    assert found.loc["mine", "against_random_p"] == pytest.approx(
        holm([expected.difference.p, found.loc["mine, cache dual", "against_random_p"]])[0]
    )
    assert found.loc["mine", ["control", "no_random"]].tolist() == ["random", ""]
    assert found.loc["mine, cache dual", "control"] == "random, cache dual"


def test_an_empty_comparison_says_why(tmp_path):
    alone, treated, control = of_own(alone="", treated="", control="treated")
    planted_run(tmp_path, verdicts(BASE), alone)
    planted_run(tmp_path, {"other": True}, treated)
    planted_run(tmp_path, verdicts(BASE), control)
    found = by_condition(tmp_path)
    assert set(found["no_unmasked"]) == {"no unmasked run"}
    assert found["no_random"].to_dict() == {"alone": "no control", "treated": "no shared samples", "control": ""}
    planted_run(tmp_path, verdicts(BASE), UNMASKED)
    found = by_condition(tmp_path)
    assert found.loc[["unmasked", "alone"], "no_unmasked"].tolist() == ["", ""]
    assert found.loc["unmasked", "no_random"] == ""


def test_a_control_without_a_partner_and_several_controls_of_one_condition_warn(tmp_path):
    planted_run(tmp_path / "a", verdicts(BASE), of_own(mine="", random="mien")[1])
    planted_run(tmp_path / "a", verdicts(BASE), of_own(mine="")[0])
    with pytest.warns(ControlWarning, match=r"'random' is a control of 'mien', which is not evaluated.*Nearest: mine"):
        frame(tmp_path / "a")
    for condition, text in zip(of_own(mine="", one="mine", two="mine"), ("1000", "1100", "1110"), strict=True):
        planted_run(tmp_path / "b", verdicts(text), condition)
    with pytest.warns(ControlWarning, match=r"'mine' has several controls; it is compared with '(one|two)', not with "):
        row = by_condition(tmp_path / "b").loc["mine"]
    assert row["against_random_difference"] == {"one": -0.25, "two": -0.5}[row["control"]]


def test_samples_with_the_same_id_but_different_prompts_are_not_paired(tmp_path):
    planted_run(tmp_path, verdicts(BASE), UNMASKED, prompt_sha256="a")
    planted_run(tmp_path, verdicts(MASKED), ONE, prompt_sha256="b")
    with pytest.raises(LedgerError, match=r"got different prompts for s00 under 'unmasked' and '1 sink'"):
        frame(tmp_path)


def test_p_values_are_corrected_over_the_conditions_of_a_group(ledger):
    def p(first, second):
        first, second = (np.array(list(verdicts(text).values())) for text in (first, second))
        return paired(first[: len(second)], second).difference.p

    planted_run(ledger, verdicts(BASE), UNMASKED, model="tiny-llama")
    planted_run(ledger, verdicts(MASKED), ONE, model="tiny-llama")  # another group, corrected alone
    found = frame(ledger).groupby("model")["against_unmasked_p"].agg(list)
    plain = [p(BASE, MASKED), p(BASE, RANDOM), p(BASE, BASE[:5])]
    assert found["tiny-llada"][1:] == holm(plain) != plain
    assert found["tiny-llama"][1:] == plain[:1]


def test_a_run_without_scored_programs_has_shares_but_no_accuracy(tmp_path):
    planted_run(tmp_path, {"a": None, "b": None}, protocol="tiny-code")
    planted_run(tmp_path, {"a": True, "b": None}, ONE, protocol="tiny-code")
    with pytest.warns(UserWarning, match=r"2 of tiny-llada \(unmasked\), 1 of tiny-llada \(1 sink\)|1 of .*, 2 of"):
        found = frame(tmp_path)
    assert values(found, "total", "unscored", "estimate", "per_second", "sinks", "against_unmasked_p") == [
        (0, 2, None, 2.0, 1.0, None),
        (1, 1, 1.0, 2.0, 1.0, None),
    ]


def test_published_scores_stand_beside_the_models_and_conditions_they_cover(tmp_path):
    for model in (LLADA, "/somewhere/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-8B-Base"):
        for condition in (UNMASKED, ONE, ONE_RANDOM, masking([1], queries="all")[1]):
            planted_run(tmp_path, verdicts("10"), condition, model=model, protocol="llada-gsm8k")
    planted_run(tmp_path, verdicts("10"), ONE, model=LLADA, protocol="tiny-gsm")
    assert values(frame(tmp_path).dropna(subset="published"), "task", "model", "condition", "published", "source") == [
        ("gsm8k", model, name, score, "Rulli et al., 2510.15731, Table 1")
        for model in ("/somewhere/LLaDA-8B-Instruct", LLADA)
        for name, score in (("unmasked", 0.76), ("1 sink", 0.75))
    ]


def test_a_run_that_departs_from_its_protocol_is_not_compared_with_the_published_score(tmp_path):
    settings = {"gen_length": 256, "steps": 256, "block_length": 8}
    for steps in (256, 128):
        planted_run(
            tmp_path, verdicts(BASE), model=LLADA, protocol="llada-instruct-gsm8k-blocks",
            settings=settings | {"steps": steps},
        )  # fmt: skip
    departs, as_stated = (row for _, row in frame(tmp_path).iterrows())
    assert departs["model"] == f"{LLADA} (steps 128)"
    assert (departs["departs"], as_stated["departs"]) == ("steps 128, not 256", "")
    assert math.isnan(departs["published_difference"])
    assert departs["published"] == as_stated["published"] == 0.786
    gap = unpaired(proportion(1037, 1319), proportion(8, 10))
    found = as_stated[["published_difference", "published_low", "published_high"]].tolist()
    assert found == [gap.value, gap.low, gap.high]


def test_other_settings_make_another_group_whose_name_states_them(tmp_path):
    planted_run(tmp_path, verdicts(BASE))
    planted_run(tmp_path, verdicts(MASKED), ONE)
    planted_run(tmp_path, verdicts(RANDOM), settings={"gen_length": 24, "steps": 12})
    planted_run(tmp_path, verdicts(RANDOM), model="tiny-llama")
    found = frame(tmp_path)
    assert set(found["model"]) == {"tiny-llada (steps 24)", "tiny-llada (steps 12)", "tiny-llama"}
    assert found["model"][found["against_unmasked_p"].notna()].tolist() == ["tiny-llada (steps 24)"]


def test_runs_on_different_device_types_are_paired_only_on_request(tmp_path):
    planted_run(tmp_path, verdicts(BASE))
    planted_run(tmp_path, verdicts(MASKED), ONE, device="cuda")
    with pytest.raises(SettingError, match=r"ran on cpu and cuda under 'unmasked' and '1 sink'.*--mixed-devices"):
        frame(tmp_path)
    found = by_condition(tmp_path, mixed_devices=True)
    assert found.loc["1 sink", ["against_unmasked_difference", "devices"]].tolist() == [-0.5, "cuda"]


def test_a_ledger_without_finished_samples_is_refused_and_runs_without_records_are_skipped(tmp_path, ledger):
    empty = tmp_path / "empty"
    planted_run(empty, {})
    with pytest.raises(LedgerError, match=r"holds no finished sample yet; rerun `sinklens evaluate` to resume"):
        frame(empty)
    planted_run(ledger, {}, FIVE_RANDOM)
    assert (len(LedgerRun.all(ledger)), len(frame(ledger))) == (5, 4)


def test_malformed_answers_are_listed_apart_from_wrong_ones(tmp_path):
    """Of ten answers three are right, two wrong and five malformed: 0.3 right, but 0.6 of those that are answers."""
    planted_run(tmp_path, verdicts("10"), model="tiny-llama")
    with Writer(planted_run(tmp_path, {})) as writer:
        for number in range(10):
            sample = {"sample": f"s{number}", "verdict": number < 3, "malformed": number >= 5, "text": ""}
            writer.add(HAND | sample | {"seconds": 0.5, "sinks": {"per_head": 1.0}})
    assert values(frame(tmp_path), "estimate", "malformed", "right_of_formed") == [
        (0.3, 0.5, 0.6),
        (0.5, None, None),  # a task without a form
    ]


def test_cached_runs_are_paired_with_the_exact_run_and_timed_on_shared_samples(tmp_path):
    exact, one, random, cached, one_cached, random_cached = under_caches(masking([1], ["random"]), ["dual"])
    for condition, text, seconds in (
        (exact, BASE, 0.6), (one, MASKED, 0.5), (random, RANDOM, 0.5),
        (cached, MASKED[:5], 0.2), (one_cached, RANDOM, 0.3), (random_cached, BASE, 0.3),
    ):  # fmt: skip
        planted_run(tmp_path, verdicts(text), condition, seconds=seconds)
    found = by_condition(tmp_path)
    assert found["cache"].tolist() == [""] * 3 + ["DualCache()"] * 3
    assert pairs(found, "cache dual")[0] == (-0.6, 3, 0, 5)
    assert pairs(found, "1 sink, cache dual") == [(-0.2, 2, 0, 10), (-0.2, 2, 0, 10)]  # exact; under the same policy
    assert pairs(found, "1 sink")[1] == (-0.3, 4, 1, 10)
    assert math.isnan(found.loc["unmasked", "speed"])
    assert found.loc[["cache dual", "1 sink, cache dual"], "speed"].tolist() == pytest.approx([3.0, 2.0])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"masks": "0"}, "masks must be an integer from 0"), ({"masks": 10**4000}, "masks must be an integer from 0"),
        ({"device": 5}, "device must be a text"), ({"seconds": math.nan}, "seconds must be a number"),
        ({"seconds": math.inf}, "seconds must be a number"), ({"seconds": None}, "seconds must be a number"),
        ({"empty": "no"}, "empty must be True or False"), ({"verdict": "yes"}, "verdict must be True, False or None"),
        ({"sinks": {}}, "no field 'per_head'"), ({"sinks": {"per_head": math.inf}}, "per_head must be a number"),
        ({"sinks": [1]}, "sinks must be a dict"), ({"versions": {"torch": 2}}, "'torch' must be a text"),
        ({"tokens": [1, "2"]}, "tokens must hold int only"), ({"malformed": 3}, "malformed must be"),
        ({"seed": -1}, "seed must be"), ({"settings": 3}, "settings must be a dict"),
        ({"sampler": 3}, "sampler must be a text"), ({"model": None}, "model must be a text"),
    ],
)  # fmt: skip
def test_a_mistyped_field_is_refused_with_the_file_and_the_record(tmp_path, changes, text):
    planted_run(tmp_path, verdicts("10"), **changes)
    with pytest.raises(
        LedgerError, match=rf"ledger\.sqlite, run-\w+, (its description|the records of 's00'): .*{text}"
    ):
        frame(tmp_path)
