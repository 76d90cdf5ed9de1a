"""Every check of a verification passes where it should and fails where a failure is planted."""

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tracks import planted

import sinklens
from sinklens.cli import main
from sinklens.errors import SettingError
from sinklens.evaluation import verification
from sinklens.evaluation.protocols import Published
from sinklens.evaluation.verification import (
    KNOWN,
    Check,
    Verification,
    accuracy_check,
    existence_check,
    fingerprint_check,
    known,
    masking_check,
    motion_check,
    prompt_check,
    protocol_for,
    scores_of,
    self_check,
)
from sinklens.utils.estimates import Estimate, paired, proportion, unpaired

LLADA_INSTRUCT = "GSAI-ML/LLaDA-8B-Instruct"


PUBLISHED = Published("m", 0.786, "a table", 1319)
STUDY = tuple(Published(LLADA_INSTRUCT, score, "Table 1", 1319, k) for score, k in ((0.76, 0), (0.55, 10)))


def track_of(places, length=20):
    """A track of one head in which position `places[step]` gets most attention; None for uniform."""
    rows = [np.full(length, 1.0 if place is None else 0.5) for place in places]
    for row, place in zip(rows, places, strict=True):
        row[place] = 1.0 if place is None else length - 0.5 * (length - 1)
    return planted(rows, np.ones(length, dtype=bool))


def verdicts(lost, gained, total=100):
    base = np.arange(total) < 60
    changed = np.where(np.arange(total) < lost, ~base, base) | (np.arange(total) >= total - gained)
    return paired(base, changed).difference


@pytest.fixture
def own(tiny_llada):
    """tiny-llada, to be damaged."""
    return sinklens.load("tiny-llada", check=False)


def test_the_fingerprint_fails_if_one_weight_changed(own):
    assert fingerprint_check(own, KNOWN["tiny-llada"][0]).outcome == "passed"
    with torch.no_grad():
        own.hf.lm_head.weight[3, 5] += 0.01
    assert fingerprint_check(own, KNOWN["tiny-llada"][0]).outcome == "failed"
    assert fingerprint_check(own, "").outcome == "recorded"


def test_the_self_check_fails_if_attention_is_not_what_the_points_show(own):
    assert self_check(own).outcome == "passed"
    with torch.no_grad():
        own.hf.model.layers[1].self_attn.q_proj.weight.fill_(torch.nan)
    found = self_check(own)
    assert (found.outcome, found.statement) == ("failed", False)
    assert "allowed" in found.found


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("text", ["two runs with one seed differ", "24 positions are never decided"])
def test_a_fixed_prompt_fails_if_two_runs_differ_or_a_position_is_never_decided(own, text):
    def changed(module, given, logits):
        if text.startswith("two"):
            return logits + 9 * torch.randn_like(logits)
        return torch.nn.functional.one_hot(torch.tensor(own.mask_token_id), logits.shape[-1]).float().expand_as(logits)

    handle = own.hf.lm_head.register_forward_hook(changed)
    found = prompt_check(own)
    handle.remove()
    assert (found.outcome, text in found.found, prompt_check(own).outcome) == ("failed", True, "passed")


def accuracy(right, published=PUBLISHED, departs=""):
    return accuracy_check(proportion(right, 50), published, departs)


def existence(*places):
    return existence_check([track_of(one) for one in places])


def motion(causal, *places):
    return motion_check([track_of(places)] * 4, causal)


def masking(lost, causal=False, masked=1, published=(None, None)):
    return masking_check(masked, verdicts(lost, 0), causal, *published)


@pytest.mark.parametrize(
    ("check", "outcome"),
    [
        *zip([partial(accuracy, right) for right in (25, 36, 39, 43, 50)],
             ["failed", "passed", "passed", "passed", "failed"], strict=True),
        (partial(accuracy, 0, PUBLISHED, "steps 8, not 256"), "recorded"), (partial(accuracy, 0, None), "recorded"),
        (partial(existence, *[[3, 3]] * 4), "failed"),  # 1 of 20 positions: 5 %
        (partial(existence, [3, None, None], [3, None], [4, None, None]), "passed"),
        (partial(existence, *[[None, None]] * 4), "failed"), (partial(existence, [3, None], [None, None]), "open"),
        (partial(motion, False, 3, 3, 3, 3), "failed"), (partial(motion, True, 3, 3, 3, 3), "passed"),
        (partial(motion, False, 3, 9, 4, 8), "passed"), (partial(motion, True, 3, 9, 4, 8), "failed"),
        (partial(motion, False, None, None), "open"), (partial(motion, True, None, None), "open"),
        (partial(masking, 0), "passed"), (partial(masking, 6), "open"), (partial(masking, 40), "failed"),
        (partial(masking, 0, True), "failed"), (partial(masking, 6, True), "open"),
        (partial(masking, 40, True), "passed"), (partial(masking, 40, masked=10), "recorded"),
        (partial(masking, 0, masked=10, published=STUDY), "failed"),
        (partial(masking, 20, masked=10, published=STUDY), "passed"),
        (partial(masking, 50, masked=10, published=STUDY), "failed"),
    ],
)  # fmt: skip
def test_a_check_passes_where_it_should_and_fails_where_a_failure_is_planted(check, outcome):
    found = check()
    assert (found.outcome, found.statement) == (outcome, check.func is not accuracy)


def test_a_cost_is_positive_where_accuracy_is_lost_and_the_table_says_so():
    lost, gained = masking(20, masked=5), masking_check(5, verdicts(0, 20), True, None, None)
    assert lost.number.value == pytest.approx(0.2) == -gained.number.value
    assert 0 < lost.number.low < lost.number.value < lost.number.high
    assert lost.found.startswith("cost +0.200 [+0.1")
    assert masking(20, masked=10, published=STUDY).expected.startswith("cost +0.21")
    assert "found (a cost is positive if accuracy is lost)" in report(lost).to_markdown()


def test_what_is_known_about_a_model_follows_from_its_name():
    assert known("/models/tiny-llada/") == KNOWN["tiny-llada"]
    assert known("somebody/else") == ("", None)
    named = [protocol_for(name) for name in (LLADA_INSTRUCT, "somebody/else", "tiny-llada", "smollm2-135m-masked")]
    assert named == ["llada-gsm8k", "llada-gsm8k", "tiny-gsm", "tiny-gsm"]
    study = {score.masked: score.score for score in scores_of(LLADA_INSTRUCT, "llada-gsm8k")}
    assert study == {0: 0.76, 1: 0.75, 5: 0.73, 10: 0.55}
    assert [score.accuracy for score in scores_of("tiny-llada", "tiny-gsm")] == [proportion(458, 500)]
    for model, protocol in (("somebody/else", "llada-gsm8k"), ("tiny-llada", "gsm8k-cot-zeroshot")):
        assert scores_of(model, protocol) == ()  # the second one's score is of other problems


def test_what_is_known_about_the_shipped_models_is_true():
    from sinklens.model.fetching import ARMS, BASE
    from sinklens.model.files import shipped_names

    assert sorted(KNOWN) == sorted([BASE, *ARMS, *shipped_names()])
    assert sinklens.load("tiny-sdar").fingerprint == KNOWN["tiny-sdar"][0]


def report(*checks):
    return Verification("a/b", "main", "llada", "torch.bfloat16", "cpu", {"torch": "2"}, "p", 50, checks, "x")


def test_a_report_is_a_table_and_json_and_knows_what_failed():
    good, bad = Check("one", "passed", "a|b", "c\nd"), Check("two", "failed", "e", "f", Estimate(0.5, 0.1, 0.9, 50))
    found = report(good, bad, replace(bad, name="three", statement=True))
    text = found.to_markdown()
    assert "| one | passed | a\\|b | c d |" in text
    assert "| *three* | failed | e | f |" in text
    assert "The runs depart from the protocol: x." in text
    assert found.failed == ["two"]
    assert json.loads(found.to_json())["checks"][1]["number"]["low"] == 0.1


@pytest.mark.extended
def test_the_command_writes_both_reports_and_fails_if_a_check_of_the_checkpoint_does(tmp_path, capsys):
    given = ["verify", "tiny-llada", "--problems", "4", "--batch-size", "4", "--out"]
    main([*given, str(tmp_path / "good")])
    found = json.loads((tmp_path / "good" / "report.json").read_text())
    assert [check["outcome"] for check in found["checks"][:7]] == ["passed"] * 7
    assert [check["name"] for check in found["checks"][7:]] == [
        "sinks exist", "sinks move", "masking 1 sink", "masking 5 sinks", "masking 10 sinks",
    ]  # fmt: skip
    assert (tmp_path / "good" / "report.md").read_text() in capsys.readouterr().out
    assert main([*given, str(tmp_path / "good"), "--fingerprint", "0000"]) == 1
    assert "failed: fingerprint" in capsys.readouterr().err


@pytest.mark.extended
def test_a_failing_self_check_ends_the_verification(own, tmp_path):
    with torch.no_grad():
        own.hf.model.layers[1].self_attn.q_proj.weight.fill_(torch.nan)
    found = verification.verify(own, tmp_path / "runs", problems=2)
    assert [check.name for check in found.checks] == ["fingerprint", "self-check"]
    assert found.failed == ["fingerprint", "self-check"]


# GSM8K from a folder


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """tiny-llada with room for GSM8K's prompts, in a folder of another name."""
    folder = tmp_path_factory.mktemp("models") / "roomy"
    shutil.copytree(Path(sinklens.__file__).parent / "model" / "shipped" / "tiny-llada", folder)
    config = json.loads((folder / "config.json").read_text())
    key = next(name for name in ("max_sequence_length", "max_position_embeddings") if name in config)
    (folder / "config.json").write_text(json.dumps(config | {key: 1024}))
    return folder


@pytest.mark.extended
def test_gsm8k_is_read_from_a_folder_and_compared_with_the_score_that_is_given(shared, roomy, tmp_path, capsys):
    """tiny-llada solves none of these: 0.9 is outside Newcombe's interval of 3 problems, and 0.02 inside."""
    given = ["verify", str(roomy), "--data", str(shared / "data" / "gsm8k"), "--protocol", "gsm8k-cot-zeroshot",
             "--problems", "3", "--gen-length", "8", "--steps", "2", "--block-length", "8",
             "--out", str(tmp_path)]  # fmt: skip
    for score, outcome, code in ((0.9, "failed", 1), (0.02, "passed", 0)):
        assert main([*given, "--score", str(score)]) == code
        found = json.loads((tmp_path / "report.json").read_text())
        (check,) = (one for one in found["checks"] if one["name"] == "accuracy")
        assert (check["outcome"], check["number"]["value"], found["problems"]) == (outcome, 0.0, 3)
        assert check["expected"] == f"{score:.3f} (as given)"
        gap = unpaired(proportion(round(score * 1319), 1319), proportion(0, 3))
        assert f"[{gap.low:+.3f}, {gap.high:+.3f}]" in check["found"]
    assert "failed: accuracy" in capsys.readouterr().err
    with closing(sqlite3.connect(tmp_path / "runs" / "ledger.sqlite")) as ledger:
        asked = {sample for (sample,) in ledger.execute("SELECT sample FROM records WHERE kind = 'records'")}
    assert asked == {f"gsm8k-cot-zeroshot/{number}" for number in range(3)}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"data": "somewhere"}, r"problems of tiny-gsm ship with sinklens and are not read from somewhere.*zeroshot"),
        ({"score": 76}, "score must be a number from 0 to 1 or None; got 76"),
    ],
)
def test_data_for_word_problems_that_ship_and_shares_above_1_are_refused(tiny_llada, tmp_path, given, text):
    with pytest.raises(SettingError, match=text):
        verification.verify(tiny_llada, tmp_path, **given)
