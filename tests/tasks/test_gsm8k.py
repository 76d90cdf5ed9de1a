"""GSM8K: awkward answers are read like the harness reads them, and the prompts equal the harness's."""

import json
import random
import re

import pytest

from sinklens.errors import SinklensError
from sinklens.tasks.gsm8k import Gsm8k


@pytest.fixture
def folder(tmp_path):
    """Three problems and eight examples."""
    answers = ["2 + 3 = <<2+3=5>>5 eggs.\n#### 5", "No cost.\n#### -1,200", "Half.\n#### 0"]
    write(tmp_path / "test.jsonl", [(f"Test {i}?", answer) for i, answer in enumerate(answers)])
    write(tmp_path / "train.jsonl", [(f"Train {i}?", f"Work {i}.\n#### {i}") for i in range(8)])
    return tmp_path


def write(file, pairs):
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in pairs))


@pytest.mark.parametrize(
    ("style", "extractor", "text", "right"),
    [
        ("gsm8k", "strict", " 2 + 3 = 5.\n#### 5", True),
        ("gsm8k", "strict", " The answer is 5.", False),
        ("gsm8k", "flexible", " The answer is 5.", True),
        ("gsm8k", "flexible", " 5 eggs, of which 2 are hers", False),
        ("gsm8k", "flexible", " #### 5\n\nQuestion: Tom has 9 pens.", True),
        ("gsm8k", "strict", " so\nQuestion: x\n#### 5", False),
        ("gsm8k", "strict", " #### 5.0", False),
        ("gsm8k", "strict", " #### $5", False),
        ("gsm8k", "flexible", " #### $5", True),
        ("gsm8k", "strict", "", False),
        ("gsm8k", "strict", " #### 5,", True),
        ("gsm8k", "strict", " #### 5.", True),
        ("gsm8k", "strict", "####5", False),
        ("gsm8k", "strict", " #### 5/4", True),
        ("gsm8k", "flexible", " #### 4/5", True),
        ("gsm8k", "flexible", " between 3 and 5...", False),
        ("gsm8k", "flexible", " minus − 5", True),
        ("gsm8k", "flexible", " 1e5", True),
        ("gsm8k", "flexible", " no idea", False),
        ("gsm8k-cot", "strict", " 2 + 3 = 5. The answer is 5.", True),
        ("gsm8k-cot", "strict", " The answer is 5", False),
        ("gsm8k-cot", "strict", " The answer is 5 eggs", True),
        ("gsm8k-cot", "strict", " #### 5", False),
        ("gsm8k-cot", "flexible", " #### 5\nQ: 7", True),
        ("gsm8k-cot-zeroshot", "strict", " First 2, then 3. The answer is 5.", True),
    ],
)
def test_verdicts_depend_on_style_and_extractor(folder, style, extractor, text, right):
    task = Gsm8k(folder, style, 0, extractor)
    sample = task.samples()[0]
    assert task.verdict(sample, text) is right
    assert task.verdict(sample, sample.reference)


@pytest.mark.parametrize("extractor", ["strict", "flexible"])
def test_a_negative_number_is_right_with_and_without_commas(folder, extractor):
    task = Gsm8k(folder, shots=0, extractor=extractor)
    found = [task.verdict(task.samples()[1], f" #### {text}") for text in ("-1200", "-1,200", "-1,200.", "1200")]
    assert found == [True, True, True, False]


def test_five_examples_are_drawn_for_each_problem_regardless_of_the_limit(folder):
    prompts = [sample.prompt for sample in Gsm8k(folder).samples()]
    rng = random.Random(1234)
    for number, prompt in enumerate(prompts):
        expected = "\n\n".join(f"Question: Train {i}?\nAnswer: Work {i}.\n#### {i}" for i in rng.sample(range(8), 5))
        assert prompt == f"{expected}\n\nQuestion: Test {number}?\nAnswer:"
    assert [sample.prompt for sample in Gsm8k(folder).samples(2)] == prompts[:2]
    assert len({prompt.split("Question: Test")[0] for prompt in prompts}) == 3


def test_without_examples_the_prompt_is_the_question(folder):
    prompts = [Gsm8k(folder, style, 0).samples(1)[0].prompt for style in ("gsm8k", "gsm8k-cot", "gsm8k-cot-zeroshot")]
    assert prompts == ["Question: Test 0?\nAnswer:", "Q: Test 0?\nA:", "Q: Test 0?\nA: Let's think step by step."]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("settings", "limit", "text"),
    [
        (
            {"style": "gsm8k-cot", "shots": 8},
            None,
            "style 'gsm8k-cot' are not included; set shots=0",
        ),
        ({"shots": 20}, None, "shots is 20, but there are only 8 examples; give fewer shots"),
        ({"shots": -1}, None, "shots must be an integer of at least 0 or None; got -1"),
        ({"style": "cot"}, None, "style must be one of gsm8k, gsm8k-cot, gsm8k-cot-zeroshot; got 'cot'"),
        ({}, 0, "limit is 0; give the number of samples, at least 1"),
    ],
)
def test_missing_and_too_many_examples_and_invalid_settings_are_refused(folder, settings, limit, text):
    with pytest.raises(SinklensError, match=text):
        Gsm8k(folder, **settings).samples(limit)


@pytest.mark.parametrize("extractor", ["strict", "flexible"])
@pytest.mark.parametrize("style", ["gsm8k", "gsm8k-cot"])
def test_all_published_answers_are_right_and_altered_ones_wrong(shared, style, extractor):
    task = Gsm8k(shared / "data" / "gsm8k", style, 0, extractor)
    samples = task.samples()
    assert len(samples) == len({sample.id for sample in samples}) == 1319
    assert all(task.verdict(sample, sample.reference) for sample in samples)
    spoiled = [re.sub(r"\d(\.?)$", lambda m: str((int(m[0][0]) + 1) % 10) + m[1], s.reference) for s in samples]
    assert not any(task.verdict(sample, text) for sample, text in zip(samples, spoiled, strict=True))


def test_a_published_prompt_is_as_checked_by_hand(shared):
    samples = Gsm8k(shared / "data" / "gsm8k").samples(2)
    assert samples[0].prompt.count("Question: ") == samples[0].prompt.count("\nAnswer: ") + 1 == 6
    assert samples[0].prompt.endswith("make every day at the farmers' market?\nAnswer:")
    assert samples[0].prompt.startswith("Question: Jen and Tyler are gymnasts practicing flips.")
    assert samples[0].reference.endswith("every day at the farmer’s market.\n#### 18")
