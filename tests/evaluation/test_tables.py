"""Tables: planted numbers are recovered, pairs share their samples, and runs with different settings stay separate."""

import math

import numpy as np
import pytest
from ledgers import HAND, planted_run

from sinklens.errors import ControlWarning, LedgerError, SettingError
from sinklens.evaluation import Condition, LedgerRun, frame, masking, paired, proportion, read_lines, under_caches
from sinklens.evaluation.ledger import Writer
from sinklens.interventions import AblateHeads
from sinklens.utils.estimates import holm

UNMASKED, ONE, ONE_RANDOM, FIVE, FIVE_RANDOM = masking([1, 5], ["random"])


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


def by_condition(lines):
    return {line.condition: line for line in lines}


def test_planted_accuracies_and_rates_are_recovered(ledger):
    lines = read_lines(ledger)
    names = ("condition", "accuracy", "empty", "masks", "per_second", "devices")
    assert [tuple(getattr(line, name) for name in names) for line in lines] == [
        ("unmasked", proportion(8, 10), 1.0, 0.0, 2.0, ("cpu",)),
        ("1 sink", proportion(3, 10), 0.0, 1.0, 2.0, ("cpu",)),
        ("1 random key", proportion(6, 10), 0.0, 0.0, 2.0, ("cpu",)),
        ("5 sinks", proportion(5, 5), 0.0, 0.0, 4.0, ("cpu",)),
    ]


def pairs(found, name):
    """The difference, the answers lost and gained, and the samples, against the unmasked run and the control."""
    of = (found[name].against_unmasked, found[name].against_random)
    return [one and (pytest.approx(one.difference.value), one.lost, one.gained, one.difference.n) for one in of]


def test_differences_are_paired_on_the_samples_that_both_have(ledger):
    found = by_condition(read_lines(ledger))
    assert {name: pairs(found, name) for name in found} == {
        "unmasked": [None, None],
        "1 sink": [(-0.5, 6, 1, 10), (-0.3, 4, 1, 10)],
        "1 random key": [(-0.2, 2, 0, 10), None],
        "5 sinks": [(0.0, 0, 0, 5), None],
    }


def test_a_control_has_the_same_masking_settings(tmp_path):
    """With sets per layer and per head and two seeds of random keys, each is paired with its control's first seed."""
    heads, layers = masking([1], ["random"]), masking([1], ["random"], scope="layer")
    planted_run(tmp_path, verdicts(BASE), UNMASKED)
    for conditions, sinks, control in ((heads, "1100", "1110"), (layers, "1000", "1111")):
        planted_run(tmp_path, verdicts(sinks), conditions[1])
        planted_run(tmp_path, verdicts(control), conditions[2])
    planted_run(tmp_path, verdicts("0000"), masking([1], ["random"], seed=1)[2])
    found = by_condition(read_lines(tmp_path))
    assert found["1 sink"].against_random.difference.value == -0.25
    assert found["1 sink, one set per layer"].against_random.difference.value == -0.75
    assert found["1 random key, seed 1"].accuracy.value == 0


def of_own(**names):
    """Conditions of a user's own: name -> the condition that it is a control of, or ""."""
    return [Condition(name, (AblateHeads(heads=[place]),), control_of=names[name]) for place, name in enumerate(names)]


def test_a_control_of_ones_own_is_paired_with_the_condition_it_names(tmp_path):
    treated, control = under_caches(of_own(mine="", random="mine"), ["dual"])[:2]
    planted_run(tmp_path, verdicts(BASE), UNMASKED)
    planted_run(tmp_path, verdicts(MASKED), treated)
    planted_run(tmp_path, verdicts(RANDOM), control)
    found = by_condition(read_lines(tmp_path))
    expected = paired(*(np.array(list(verdicts(text).values())) for text in (RANDOM, MASKED)))
    pair = found["mine"].against_random
    assert (pair.difference.value, pair.lost, pair.gained, pair.difference.p) == (-0.3, 4, 1, expected.difference.p)
    assert (found["mine"].control, found["mine"].no_random) == ("random", "")
    assert found["random"].against_random is None
    table = frame(read_lines(tmp_path)).set_index("condition")
    assert table.loc["mine", ["against_random_difference", "control"]].tolist() == [-0.3, "random"]


def test_under_a_cache_policy_a_control_belongs_to_the_condition_under_the_same_policy(tmp_path):
    conditions = under_caches(of_own(mine="", random="mine"), ["dual"])
    assert [one.control_of for one in conditions] == ["", "mine", "", "mine, cache dual"]
    for condition, text in zip(conditions, ("1000", "1100", "1110", "1111"), strict=True):
        planted_run(tmp_path, verdicts(text), condition)
    found = by_condition(read_lines(tmp_path))
    assert found["mine, cache dual"].control == "random, cache dual"
    assert pairs(found, "mine, cache dual")[1] == pairs(found, "mine")[1] == (-0.25, 1, 0, 4)


def test_an_empty_comparison_says_why(tmp_path):
    alone, treated, control = of_own(alone="", treated="", control="treated")
    planted_run(tmp_path, verdicts(BASE), alone)
    planted_run(tmp_path, {"other": True}, treated)
    planted_run(tmp_path, verdicts(BASE), control)
    found = by_condition(read_lines(tmp_path))
    assert {line.no_unmasked for line in found.values()} == {"no unmasked run"}
    reasons = {name: line.no_random for name, line in found.items()}
    assert reasons == {"alone": "no control", "treated": "no shared samples", "control": ""}
    planted_run(tmp_path, verdicts(BASE), UNMASKED)
    found = by_condition(read_lines(tmp_path))
    assert (found["unmasked"].no_unmasked, found["unmasked"].no_random, found["alone"].no_unmasked) == ("", "", "")


def test_a_control_without_a_partner_warns(tmp_path):
    planted_run(tmp_path, verdicts(BASE), of_own(mine="", random="mien")[1])
    planted_run(tmp_path, verdicts(BASE), of_own(mine="")[0])
    with pytest.warns(ControlWarning, match=r"'random' is a control of 'mien', which is not evaluated.*Nearest: mine"):
        read_lines(tmp_path)


def test_several_controls_of_one_condition_warn_which_is_compared(tmp_path):
    for condition, text in zip(of_own(mine="", one="mine", two="mine"), ("1000", "1100", "1110"), strict=True):
        planted_run(tmp_path, verdicts(text), condition)
    with pytest.warns(ControlWarning, match=r"'mine' has several controls; it is compared with '(one|two)', not with "):
        (line,) = [line for line in read_lines(tmp_path) if line.condition == "mine"]
    assert line.against_random.difference.value == {"one": -0.25, "two": -0.5}[line.control]


def test_samples_with_the_same_id_but_different_prompts_are_not_paired(tmp_path):
    planted_run(tmp_path, verdicts(BASE), UNMASKED, prompt_sha256="a")
    planted_run(tmp_path, verdicts(MASKED), ONE, prompt_sha256="b")
    with pytest.raises(LedgerError, match=r"got different prompts for s00 under 'unmasked' and '1 sink'"):
        read_lines(tmp_path)


def test_p_values_are_corrected_over_the_conditions_of_a_group(ledger):
    def p(first, second):
        first, second = (np.array(list(verdicts(text).values())) for text in (first, second))
        return paired(first[: len(second)], second).difference.p

    found = by_condition(read_lines(ledger))
    plain = [p(BASE, MASKED), p(BASE, RANDOM), p(BASE, BASE[:5])]
    corrected = [found[name].against_unmasked.difference.p for name in ("1 sink", "1 random key", "5 sinks")]
    assert corrected == holm(plain) != plain


def test_a_run_without_scored_programs_has_shares_but_no_accuracy(tmp_path):
    planted_run(tmp_path, {"a": None, "b": None}, protocol="tiny-code")
    planted_run(tmp_path, {"a": True, "b": None}, ONE, protocol="tiny-code")
    with pytest.warns(UserWarning, match=r"2 of tiny-llada \(unmasked\), 1 of tiny-llada \(1 sink\)|1 of .*, 2 of"):
        unmasked, masked = read_lines(tmp_path)
    assert (unmasked.accuracy.n, unmasked.unscored, unmasked.per_second, unmasked.sinks) == (0, 2, 2.0, 1.0)
    assert (masked.accuracy.value, masked.accuracy.n, masked.unscored) == (1, 1, 1)
    assert masked.against_unmasked is None
    table = frame([unmasked, masked])
    assert table["unscored"].tolist() == [2, 1]
    assert math.isnan(table["estimate"].iloc[0])


def test_the_paper_is_quoted_only_for_the_models_and_tasks_it_covers(tmp_path):
    for model in ("GSAI-ML/LLaDA-8B-Instruct", "/somewhere/LLaDA-8B-Instruct", "GSAI-ML/LLaDA-8B-Base"):
        for condition in (UNMASKED, ONE, ONE_RANDOM, masking([1], scope="layer")[1]):
            planted_run(tmp_path, verdicts("10"), condition, model=model, protocol="llada-gsm8k")
    planted_run(tmp_path, verdicts("10"), ONE, model="GSAI-ML/LLaDA-8B-Instruct", protocol="tiny-gsm")
    quoted = {(line.task, line.model, line.condition): line.paper for line in read_lines(tmp_path) if line.paper}
    assert quoted == {
        ("gsm8k", model, name): {0: 0.76, 1: 0.75}[masked]
        for model in ("GSAI-ML/LLaDA-8B-Instruct", "/somewhere/LLaDA-8B-Instruct")
        for name, masked in (("unmasked", 0), ("1 sink", 1))
    }


def test_other_settings_make_another_group_whose_name_states_them(tmp_path):
    planted_run(tmp_path, verdicts(BASE))
    planted_run(tmp_path, verdicts(MASKED), ONE)
    planted_run(tmp_path, verdicts(RANDOM), settings={"gen_length": 24, "steps": 12})
    planted_run(tmp_path, verdicts(RANDOM), model="tiny-llama")
    lines = read_lines(tmp_path)
    assert {line.model for line in lines} == {"tiny-llada (steps 24)", "tiny-llada (steps 12)", "tiny-llama"}
    assert [line.model for line in lines if line.against_unmasked] == ["tiny-llada (steps 24)"]


def test_runs_on_different_device_types_are_paired_only_on_request(tmp_path):
    planted_run(tmp_path, verdicts(BASE))
    planted_run(tmp_path, verdicts(MASKED), ONE, device="cuda")
    with pytest.raises(SettingError, match=r"ran on cpu and cuda under 'unmasked' and '1 sink'.*--mixed-devices"):
        read_lines(tmp_path)
    found = by_condition(read_lines(tmp_path, mixed_devices=True))
    assert found["1 sink"].against_unmasked.difference.value == -0.5
    assert found["1 sink"].devices == ("cuda",)


def test_a_ledger_without_finished_samples_is_refused_and_runs_without_records_are_skipped(tmp_path, ledger):
    empty = tmp_path / "empty"
    planted_run(empty, {})
    with pytest.raises(LedgerError, match=r"holds no finished sample yet; rerun `sinklens evaluate` to resume"):
        read_lines(empty)
    planted_run(ledger, {}, FIVE_RANDOM)
    assert len(LedgerRun.all(ledger)) == 5
    assert len(read_lines(ledger)) == 4


def test_malformed_answers_are_listed_apart_from_wrong_ones(tmp_path):
    """Of ten answers three are right, two wrong and five malformed: 0.3 right, but 0.6 of those that are answers."""
    planted_run(tmp_path, verdicts("10"), model="tiny-llama")
    with Writer(planted_run(tmp_path, {})) as writer:
        for number in range(10):
            sample = {"sample": f"s{number}", "verdict": number < 3, "malformed": number >= 5, "text": ""}
            writer.add(HAND | sample | {"seconds": 0.5, "sinks": {"per_head": 1.0}})
    line, other = read_lines(tmp_path)
    assert (math.isnan(other.malformed), other.formed) == (True, None)  # a task without a form
    assert (line.accuracy, line.malformed, line.formed) == (proportion(3, 10), 0.5, proportion(3, 5))
    assert frame([line])[["malformed", "right_of_formed"]].to_numpy().tolist() == [[0.5, 0.6]]


def test_the_frame_contains_every_number_and_nan_for_missing_ones(ledger):
    table = frame(read_lines(ledger))
    row = table[table["condition"] == "1 sink"].iloc[0]
    assert (row["right"], row["total"], row["estimate"], row["masked"], row["pick"]) == (3, 10, 0.3, 1, "strongest")
    assert row["low"] == pytest.approx(0.1078, abs=1e-4)  # Wilson's interval of 3 in 10
    assert row["high"] == pytest.approx(0.6032, abs=1e-4)
    assert row["against_unmasked_difference"] == -0.5
    assert math.isnan(table[table["condition"] == "unmasked"].iloc[0]["against_unmasked_difference"])


def test_cached_runs_are_paired_with_the_exact_run_and_timed_on_shared_samples(tmp_path):
    exact, one, random, cached, one_cached, random_cached = under_caches(masking([1], ["random"]), ["dual"])
    for condition, text, seconds in (
        (exact, BASE, 0.6), (one, MASKED, 0.5), (random, RANDOM, 0.5),
        (cached, MASKED[:5], 0.2), (one_cached, RANDOM, 0.3), (random_cached, BASE, 0.3),
    ):  # fmt: skip
        planted_run(tmp_path, verdicts(text), condition, seconds=seconds)
    lines = read_lines(tmp_path)
    assert [line.cache for line in lines] == [""] * 3 + ["DualCache()"] * 3
    found = by_condition(lines)
    assert pairs(found, "cache dual")[0] == (-0.6, 3, 0, 5)
    assert pairs(found, "1 sink, cache dual") == [(-0.2, 2, 0, 10), (-0.2, 2, 0, 10)]  # exact; under the same policy
    assert pairs(found, "1 sink")[1] == (-0.3, 4, 1, 10)
    speeds = {name: line.speed for name, line in found.items()}
    assert math.isnan(speeds["unmasked"])
    assert (speeds["cache dual"], speeds["1 sink, cache dual"]) == pytest.approx((3.0, 2.0))
    assert frame(lines)["speed"].tolist()[1:] == [line.speed for line in lines][1:]
