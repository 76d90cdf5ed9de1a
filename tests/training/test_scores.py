"""Scores of a model card: every task of the recipe, each answer judged by its task's rule."""

from dataclasses import replace

import pytest

import sinklens
from sinklens.utils.estimates import proportion
from training import RECIPES
from training import scores as module
from training.pictures import held_out
from training.scores import scores
from training.skills import SKILLS

FIVE = 5


@pytest.fixture
def answering(monkeypatch):
    """A function that makes the model give planned answers (prompt -> text) and none to other prompts."""

    class Given:
        def __init__(self, texts):
            self.answers = [sinklens.Answer(text, True, 0, 0) for text in texts]

    def plan(answers):
        monkeypatch.setattr(module, "load", lambda checkpoint: None)
        monkeypatch.setattr(
            module, "generate", lambda model, prompts, **_: Given([answers.get(p, "") for p in prompts])
        )

    return plan


def right_answers(*names):
    """Prompt -> reference, for the first samples of tasks."""
    samples = [sample for name in names for sample in sinklens.tasks.find_task(name).samples(FIVE)]
    return {sample.prompt: sample.reference for sample in samples}


def test_exactly_the_tasks_of_the_recipe_are_scored(answering, tmp_path):
    answering({})
    found = {name: [score.what for score in scores(recipe, tmp_path, limit=FIVE)] for name, recipe in RECIPES.items()}
    expected = {
        "tiny-llada": ["word problems"],
        "tiny-llada-skills": ["word problems", *(f"skill-{name}" for name in SKILLS)],
        "tiny-mmada": ["word problems", "captions drawn", "pictures described"],
    }
    assert {name: found[name] for name in expected} == expected


@pytest.mark.usefixtures("isolation")
def test_programs_run_only_on_request_and_count_if_their_tests_pass(answering, tmp_path):
    recipe = replace(RECIPES["tiny-llada"], code=1)
    answers = right_answers("tiny-code")
    answering(answers | {next(iter(answers)): " return 12345"})
    assert [score.what for score in scores(recipe, tmp_path, limit=FIVE)] == ["word problems"]
    found = {score.what: score for score in scores(recipe, tmp_path, run_generated_code=True, limit=FIVE)}
    assert found["tiny-code"].accuracy == proportion(FIVE - 1, FIVE)
    assert found["word problems"].accuracy.value == 0


def test_pictures_count_only_if_every_cell_or_word_is_right(answering, tmp_path):
    shown = held_out(FIVE)
    right = dict([picture.to_draw for picture in shown] + [picture.to_describe for picture in shown])
    wrong_cell, wrong_word = shown[1].to_draw[0], shown[3].to_describe[0]
    answering(right | {wrong_cell: shown[2].to_draw[1], wrong_word: right[wrong_word] + " red"})
    found = {score.what: score.accuracy for score in scores(RECIPES["tiny-mmada"], tmp_path, limit=FIVE)}
    assert found["captions drawn"] == found["pictures described"] == proportion(FIVE - 1, FIVE)


def test_a_shipped_model_gets_its_known_score():
    (score,) = scores(RECIPES["tiny-llama"], sinklens.model.files.find_checkpoint("tiny-llama", None), limit=20)
    assert (score.accuracy.value * score.accuracy.n, score.chance) == (20, 0.0)
