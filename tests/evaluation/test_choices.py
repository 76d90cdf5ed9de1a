"""Multiple choice by likelihood: questions, verdicts, paired comparisons, and the conditions of sinks and controls."""

import json

import numpy as np
import pytest

from sinklens.cli import main
from sinklens.cli.likelihood import lines
from sinklens.errors import ControlWarning, SettingError, TaskError
from sinklens.evaluation import UNMASKED, Condition, masking, under_caches
from sinklens.evaluation.choices import (
    ChoiceResult,
    Question,
    answer_questions,
    read_choices,
    treatment_of,
    word_problem_choices,
)
from sinklens.experiments import Likelihood, likelihood, likelihood_difference
from sinklens.experiments.nll.estimate import LikelihoodRequest
from sinklens.experiments.nll.noise import DrawRule
from sinklens.interventions import AblateHeads, MaskSinks
from sinklens.tasks import held_out, read_answer

RULE = DrawRule(mc_num=4, batch=2)
SHORT = [Question("Question: 3?\nAnswer:", (" 3", " 4 pens"), 1), Question("Question: 5?\nAnswer:", (" 6", " 7"), 0)]


def planted(values, names=(0, 1), right=(0, 1), pick="", masked=None):
    """A result whose choices have these log-likelihoods."""

    def one(value):
        ones, blocks = np.ones((1, 1)), np.zeros(1, dtype=int)
        return Likelihood.of("likelihood", (1,), np.array([[-value]]), ones, ones, blocks)

    found = tuple(tuple(one(value) for value in choices) for choices in values)
    return ChoiceResult(Condition(f"c{pick}{masked}", (), masked, pick), found, tuple(right))


def test_the_questions_are_the_held_out_problems_with_other_results():
    questions = word_problem_choices()
    for question, problem in zip(questions, held_out(), strict=True):
        assert question.prompt == problem.prompt
        assert question.choices[question.right] == f" {problem.answer}"
        results = [read_answer(choice) for choice in question.choices]
        assert len(set(results)) == 4
        assert min(results) >= 0
        assert all(f"= {result}" in choice for result, choice in zip(results, question.choices, strict=True))


def test_the_most_probable_choice_is_the_answer():
    result = planted([[-1.0, -2.0], [-1.0, -3.0], [-5.0, -4.0]], right=(0, 1, 1))
    assert result.verdicts.tolist() == [True, False, True]
    assert (result.accuracy.value, result.accuracy.n) == (pytest.approx(2 / 3), 3)
    assert [one.value for one in result.of_right] == [-1.0, -3.0, -4.0]


def test_conditions_are_compared_question_by_question():
    base = planted([[-1.0, -2.0], [-4.0, -3.0], [-5.0, -4.0]], right=(0, 1, 1))
    masked = planted([[-3.0, -2.0], [-4.0, -3.5], [-5.0, -4.0]], right=(0, 1, 1), pick="strongest", masked=1)
    control = planted([[-1.5, -2.0], [-4.0, -3.0], [-5.0, -4.0]], right=(0, 1, 1), pick="random", masked=1)
    unmasked, treated, controlled = lines("m", [base, masked, control])
    assert unmasked["accuracy"] == 1.0
    assert treated["accuracy_vs_unmasked"] == pytest.approx(-1 / 3)
    assert treated["nats_vs_unmasked"] == pytest.approx(-2.5 / 3)
    assert controlled["nats_vs_control"] == pytest.approx(-2.0 / 3), "the treatment minus the control"
    assert controlled["accuracy_vs_control"] == pytest.approx(-1 / 3)
    assert "nats_vs_control" not in treated


def test_every_condition_has_the_same_draws_and_masks_sinks_of_the_pass_itself(tiny_llada):
    plain, masked, control = answer_questions(
        tiny_llada, SHORT, masking([1], ["random"]), LikelihoodRequest(rule=RULE), False
    )
    likelihood_difference(plain.of_right, masked.of_right)  # refuses other draws
    likelihood_difference(control.of_right, masked.of_right)
    for hooks, result in (((), plain), (MaskSinks(top_k=1, same_step=True), masked)):
        wanted = likelihood(tiny_llada, SHORT[0].prompt, list(SHORT[0].choices), mc_num=4, batch=2, hooks=hooks)
        assert [one.value for one in result.likelihoods[0]] == pytest.approx([one.value for one in wanted], rel=1e-5)


def test_an_autoregressive_model_masks_the_sinks_of_the_token_before(tiny_llama):
    _, masked = answer_questions(tiny_llama, SHORT, masking([1]), LikelihoodRequest(rule=RULE), False)
    wanted = likelihood(tiny_llama, SHORT[0].prompt, list(SHORT[0].choices), hooks=MaskSinks(top_k=1))
    assert [one.value for one in masked.likelihoods[0]] == pytest.approx([one.value for one in wanted], rel=1e-5)


def test_conditions_that_need_earlier_steps_are_refused(tiny_llada):
    for condition in (under_caches([UNMASKED], "dual")[1], masking([1], of_unmasked=True)[2]):
        with pytest.raises(SettingError, match=r"needs earlier steps or another run"):
            answer_questions(tiny_llada, SHORT, [condition], LikelihoodRequest(rule=RULE), False)


def test_a_file_of_choices_is_read_and_checked(tmp_path):
    file = tmp_path / "choices.jsonl"
    given = {"prompt": "2 + 3 =", "choices": ["5", " 6"], "answer": 0}
    file.write_text(json.dumps(given) + "\n\n" + json.dumps(given | {"answer": 1}) + "\n")
    assert read_choices(file) == [Question("2 + 3 =", (" 5", " 6"), 0), Question("2 + 3 =", (" 5", " 6"), 1)]
    assert len(read_choices(file, 1)) == 1
    for wrong in ({"answer": 2}, {"answer": True}, {"choices": ["5"]}, {"choices": ["5", ""]}, {"prompt": 3}):
        file.write_text(json.dumps(given | wrong))
        with pytest.raises(TaskError, match=r"line 1 must have prompt, a text; choices, two or more texts; and answer"):
            read_choices(file)


def test_the_command_prints_and_writes_the_table(tmp_path, capsys):
    file, out = tmp_path / "choices.jsonl", tmp_path / "table.csv"
    file.write_text("".join(
        json.dumps({"prompt": one.prompt, "choices": list(one.choices), "answer": one.right}) + "\n" for one in SHORT
    ))  # fmt: skip
    flags = ["--choices", file, "--mc-num", 2, "--batch", 1, "--mask-sinks", 0, 1, "--controls", "random"]
    assert main([str(one) for one in ["likelihood", "tiny-llada", "tiny-llama", *flags, "--out", out]]) == 0
    printed = capsys.readouterr().out
    for text in ("1 sink", "1 random key", "nats vs control", "Student's t over questions"):
        assert text in printed
    written = out.read_text().splitlines()
    assert len(written) == 7
    assert written[0].startswith("model,condition,accuracy,low,high,total,nats")
    assert main(["likelihood", "tiny-llada", "--mc-num", "10", "--batch", "4"]) == 1
    assert "mc_num 10 is not a multiple of batch 4" in capsys.readouterr().err


@pytest.mark.extended
def test_a_control_is_compared_with_the_condition_that_it_names_and_warns_without_one(tiny_llada):
    head = Condition("head 3", (AblateHeads(layers=[2], heads=[3]),))
    other = Condition("another head", (AblateHeads(layers=[2], heads=[0]),), control_of="head 3")
    request = LikelihoodRequest(rule=DrawRule(4, 2))
    questions = word_problem_choices(2)
    found = answer_questions(tiny_llada, questions, [UNMASKED, head, other], request)
    rows = lines("tiny-llada", found)
    wanted = found[1].likelihood_against(found[2])
    assert rows[2]["nats_vs_control"] == wanted.value
    assert "nats_vs_control" not in rows[1]
    with pytest.warns(ControlWarning, match=r"'another head' is a control of 'head 3', which is not evaluated"):
        alone = answer_questions(tiny_llada, questions, [UNMASKED, other], request)
    assert treatment_of(alone[1], alone) is None
    masked = answer_questions(tiny_llada, questions, masking([1], ["random"]), request)
    assert [treatment_of(one, masked) for one in masked] == [None, None, masked[1]]
