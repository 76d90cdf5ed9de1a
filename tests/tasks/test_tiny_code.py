"""Small functions: right bodies pass, wrong ones fail, held-out ones are not trained on, and all fit the models."""

import builtins
import re
from collections import Counter

import pytest
from programs import passes, program

from sinklens.tasks.functions import TEMPLATES
from sinklens.tasks.tiny_code import FUNCTION_KINDS, TinyCode, held_out, training
from training.corpus import ANSWER_LENGTH

SWAPS = (
    ("+", "-"), (" - ", " + "), ("* 2", "* 3"), ("//", "%"), ("max", "min"), ("min", "max"), ("<=", "<"), (">", "<"),
    (" < ", " > "), ("==", "!="), ("[0]", "[1]"), ("[-1]", "[0]"), ("[::-1]", "[::1]"), ("[1:]", "[:1]"),
    ("[:-1]", "[-1:]"), ("[::2]", "[::3]"), ("upper", "lower"), ("lower", "upper"), ("len(set(", "sum(set("),
    ("len(", "sum("), ("sum(", "len("), ("abs", "int"), ("sorted", "list"), ("not in", "in"), (" in ", " not in "),
    ("[:", "[1:"), ('"!"', '"?"'), ("return -", "return "), ("* ", "** "), (".count(", ".index("), ("[-", "["),
)  # fmt: skip


def right(sample, text):
    """Whether a completion passes; only those written in this file are run."""
    return passes(program(TinyCode(), sample, text), {"__builtins__": builtins})


def mutants(solution):
    """Wrong bodies similar to the right one: with another operation, or a constant changed by one."""
    for old, new in SWAPS:
        if old in solution:
            yield solution.replace(old, new, 1)
    for match in re.finditer(r"(?<![\w.])\d+", solution):
        yield solution[: match.start()] + str(int(match.group()) + 1) + solution[match.end() :]
    yield " return None"
    yield ""


@pytest.fixture(scope="module")
def samples():
    return TinyCode().samples()


def test_every_canonical_solution_passes_with_or_without_text_after_it(samples):
    for sample in samples:
        assert right(sample, sample.reference), sample.prompt
        assert right(sample, sample.reference + "\nprint(1 / 0)"), sample.prompt


def test_wrong_bodies_fail(samples):
    for sample in samples:
        wrong = set(mutants(sample.reference)) - {sample.reference}
        assert len(wrong) >= 3, sample.reference
        for text in wrong:
            assert not right(sample, text), sample.prompt + text


def test_a_body_of_another_template_fails(samples):
    """Bodies of functions with the same parameter names could be confused."""
    for sample in samples:
        function = sample.prompt.split(":")[0]
        parameters = function[function.index("(") :]
        for other in samples:
            if other.prompt.split(":")[0].endswith(parameters) and other.kind != sample.kind:
                assert not right(sample, other.reference), sample.prompt + other.reference


def test_fields_are_those_of_humaneval(samples):
    assert len(samples) == 3 * len(FUNCTION_KINDS)
    for sample in samples:
        assert sample.prompt == sample.stub
        assert re.fullmatch(rf'def {sample.entry_point}\([a-z, ]+\):\n """[^"]+"""\n', sample.prompt)
        assert sample.reference.startswith(" return ")
        assert sample.test.startswith("def check(candidate):\n    assert candidate(")


def test_all_templates_and_wordings_occur():
    functions = training(9, 5000)
    assert {function.kind for function in functions} == set(FUNCTION_KINDS)
    assert len(FUNCTION_KINDS) > 60
    assert Counter(function.kind for function in held_out()) == dict.fromkeys(FUNCTION_KINDS, 3)
    wordings = {(function.kind, function.entry_point) for function in functions}
    assert wordings == {(kind, name) for kind, template in TEMPLATES.items() for name in template.names}


def test_a_prompt_determines_its_body():
    bodies = {}
    for function in training(2, 30_000):
        assert bodies.setdefault(function.prompt, function.body) == function.body
        assert bodies.setdefault((function.parameters, function.doc), function.kind) == function.kind


@pytest.mark.extended
def test_prompts_and_answers_fit_the_tiny_models(tiny_llada):
    functions = [*held_out(), *training(3, 20_000)]
    prompts = tiny_llada.tokenizer([f.prompt for f in functions]).input_ids
    answers = tiny_llada.tokenizer([f.solution for f in functions], add_special_tokens=False).input_ids
    assert max(map(len, prompts)) <= 48
    assert max(map(len, answers)) < ANSWER_LENGTH
    for function, answer in list(zip(functions, answers, strict=True))[:500]:
        assert tiny_llada.tokenizer.decode(answer) == function.solution
