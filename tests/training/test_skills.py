"""The four skills: an independent solver confirms the answers, guessing scores the stated chance, all prompts fit."""

import random
import re
from collections import Counter
from itertools import product
from statistics import fmean

import pytest

from sinklens.errors import TaskError
from training.corpus import ANSWER_LENGTH
from training.skills import SKILLS, Skill, held_out, training


def copied(prompt):
    return re.fullmatch(r"Copy: (.+)\nAnswer:", prompt)[1]


def compared(prompt):
    """By trial: an assignment of amounts that satisfies every stated comparison."""
    if match := re.search(r"Is (\d+) (more|less) than (\d+)\?", prompt):
        a, word, b = match.groups()
        return "yes" if (int(a) > int(b)) == (word == "more") else "no"
    comparisons = re.findall(r"(\w+) has more than (\w+)\.", prompt)
    amounts = {name: int(number) for name, number in re.findall(r"(\w+) has (\d+) ", prompt)}
    names = sorted({name for pair in comparisons for name in pair})
    for guess in product(range(3), repeat=len(names)):
        trial = amounts or dict(zip(names, guess, strict=True))
        if all(trial[a] > trial[b] for a, b in comparisons):
            wanted = max if re.search(r"more\?|most\?", prompt) else min
            return wanted(trial, key=trial.get)
    raise AssertionError(prompt)


def planned(prompt):
    """By enumerating every path of two steps."""
    links = re.findall(r"(\w+) to (\w+)[,.]", prompt)
    start, goal = re.search(r"How does (\w+) get to (\w+)\?", prompt).groups()
    found = [(a, b, d) for (a, b), (c, d) in product(links, links) if b == c and (a, d) == (start, goal)]
    assert len(found) == 1
    assert (start, goal) not in links
    return " to ".join(found[0])


def composed(prompt):
    """By applying one operation after the other to indices."""
    words, operations = re.fullmatch(r"Words: (.+)\nDo: (.+)\nAnswer:", prompt).groups()
    words = words.split()
    for operation in operations.split(" then "):
        last = len(words) - 1
        places = {
            "reverse": [last - i for i in range(last + 1)],
            "rotate": [(i + 1) % (last + 1) for i in range(last + 1)],
            "swap": [{0: 1, 1: 0}.get(i, i) for i in range(last + 1)],
            "drop": list(range(1, last + 1)),
            "cut": list(range(last)),
        }[operation]
        words = [words[i] for i in places]
    return " ".join(words)


SOLVE = {"copy": copied, "compare": compared, "plan": planned, "compose": composed}


def guess(exercise, common, rng):
    """The guess that `GUESSES` describes, which does everything except the skill."""
    prompt = exercise.prompt
    if prompt.startswith("Copy"):
        words = copied(prompt).split()
        return " ".join(rng.sample(words, len(words)))
    if prompt.startswith("Words"):
        words = prompt.split("\n")[0].split()[1:]
        return " ".join(words[i] for i in common[len(words)].most_common(1)[0][0])
    if prompt.startswith("Ways"):
        start, goal = re.search(r"How does (\w+) get to (\w+)\?", prompt).groups()
        middle = rng.choice(re.findall(rf"{start} to (\w+)", prompt))
        return f"{start} to {middle} to {goal}"
    allowed = {
        "true": r"yes|no",
        "two": r"(\w+) has \d",
        "three": r"(\w+) has more" if "most?" in prompt else r"more than (\w+)\.",
    }[exercise.kind]
    return rng.choice(re.findall(allowed, "yes no" if exercise.kind == "true" else prompt))


def rearrangements(exercises):
    """Number of words -> how often each rearrangement occurs."""
    common = {}
    for exercise in exercises:
        words = exercise.prompt.split("\n")[0].split()[1:]
        moved = tuple(words.index(word) for word in exercise.answer.split())
        common.setdefault(len(words), Counter())[moved] += 1
    return common


@pytest.fixture(scope="module")
def many():
    return {skill: training(skill, 9, 4000) for skill in SKILLS}


@pytest.mark.parametrize("skill", SKILLS)
def test_an_independent_solver_gives_the_same_answers(many, skill):
    for exercise in [*many[skill], *held_out(skill)]:
        assert exercise.answer == SOLVE[skill](exercise.prompt), exercise.prompt


@pytest.mark.parametrize("skill", SKILLS)
def test_guessing_scores_the_stated_chance(many, skill):
    """The chance of the task is the mean of its samples'."""
    assert Skill(skill).chance == pytest.approx(fmean(one.chance for one in held_out(skill)))
    rng, common = random.Random(5), rearrangements(many["compose"])
    right, stated = {}, {}
    for exercise in many[skill]:
        right.setdefault(exercise.kind, []).append(guess(exercise, common, rng) == exercise.answer)
        stated.setdefault(exercise.kind, []).append(exercise.chance)
    for kind, hits in right.items():
        assert fmean(hits) == pytest.approx(fmean(stated[kind]), abs=0.04), kind


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("skill", SKILLS)
def test_exercises_fit_the_tiny_models(many, skill, tiny_llada):
    tokenizer = tiny_llada.tokenizer
    prompts = tokenizer([exercise.prompt for exercise in many[skill]]).input_ids
    answers = tokenizer([f" {exercise.answer}" for exercise in many[skill]], add_special_tokens=False).input_ids
    assert max(map(len, prompts)) <= 48
    assert max(map(len, answers)) < ANSWER_LENGTH


def test_a_verdict_depends_only_on_the_words_and_their_order():
    task = Skill("compose")
    sample = task.samples()[0]
    words = sample.reference.split()
    assert task.verdict(sample, sample.reference)
    assert task.verdict(sample, "\n" + "  ".join(words) + " ")
    for wrong in (" ".join([*words, "pens"]), " ".join(words[1:]), " ".join(words[::-1]), "", words[0].upper()):
        assert not task.verdict(sample, wrong)


def test_the_error_for_an_unknown_skill_names_it_and_the_nearest():
    with pytest.raises(TaskError, match=r"no skill is called 'compose-two'; .*Nearest: compose"):
        held_out("compose-two")
