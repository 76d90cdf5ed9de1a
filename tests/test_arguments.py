"""Arguments of the wrong type: a sentence that says what is allowed, not an error from inside."""

import numpy as np
import pytest

import sinklens
from sinklens.analyses import find
from sinklens.errors import SinklensError
from sinklens.evaluation import Accuracy, Limits, mcnemar, paired, score_interval
from sinklens.experiments import sweep
from sinklens.interventions import AblateHeads, Activations, MaskSinks
from sinklens.sinks import Record
from sinklens.tasks import held_out
from sinklens.tasks.prompts import Prompts, read_prompts

PROMPT = "Question: 1 + 2\nAnswer:"
RIGHT, WRONG = [True, False], np.array([False, False])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda model: sweep(model, PROMPT, [AblateHeads()]), "interventions must be a dict of names"),
        (lambda model: sweep(model, PROMPT, {"a": None}), "hooks= must be a list of"),
        (
            lambda model: sweep(model, PROMPT, {"a": AblateHeads()}, rows=1.5),
            "must be an integer of at least 1; got 1.5",
        ),
        (lambda model: sweep(model, PROMPT, {"a": AblateHeads()}, memory_gb="2"), "memory_gb must be a number"),
        (lambda model: sinklens.generate(model, PROMPT, sampler=3), "sampler must be a name, one of llada"),
        (lambda model: sinklens.generate(model, PROMPT, hooks=Activations(names=3)), "names must be hook points"),
        (lambda model: sinklens.load("tiny-llada", device="meta"), "the device 'meta' holds no values"),
        (lambda model: MaskSinks(top_k=1, only=3), "give a name or a list of names; got 3"),
        (lambda model: AblateHeads(by="mean", reference=3), "reference must be what head_outputs"),
        (lambda model: model.tree.resolve(3), "a hook point is named by a text, such as"),
        (lambda model: Record(3), "quantities must be a list of names"),
        (lambda model: Record(patterns=3), r"patterns must be a list of \(step, layer\) pairs"),
        (lambda model: find(3), "a study is found by its name or file"),
        (lambda model: find("layers")(batch="x"), "batch is the number of prompts per run, at least 1; got 'x'"),
        (
            lambda model: find("layers")().run([model], 3),
            "prompts must be a text, a list of texts, or token ids; got 3",
        ),
        (lambda model: find("layers")(shown="x").run([model], [PROMPT]), "shown is the index of a prompt.*got 'x'"),
        (lambda model: held_out("x"), "give 0 to 500 held-out problems.*got 'x'"),
        (lambda model: paired([0.5], [1.0]), r"lists of True and False; got float64 values of shape \[1\]"),
        (lambda model: paired(None, None), "lists of True and False; got object"),
        (lambda model: mcnemar(-1, 2), "lost and gained must be counts of samples, 0 or more; got -1 and 2"),
        (lambda model: score_interval([1, 2, 3], (0, 1)), r"an entry for each of 2 values; got \[3\]"),
        (lambda model: Accuracy(3, 2), "3 of 2 samples cannot be right"),
        (lambda model: Limits(seconds="x"), r"Limits\(seconds='x'\) is out of range"),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused_with_what_is_allowed(tiny_llada, call, text):
    with pytest.raises(SinklensError, match=text):
        call(tiny_llada)


@pytest.mark.usefixtures("unchecked")
def test_lists_of_verdicts_and_names_of_files_are_accepted(tmp_path):
    assert paired(RIGHT, WRONG) == paired(np.array(RIGHT), WRONG)
    (tmp_path / "p.jsonl").write_text('{"prompt": "one", "expected": "two"}\n')
    assert read_prompts(str(tmp_path / "p.jsonl")) == ["one"]
    assert [sample.prompt for sample in Prompts(str(tmp_path / "p.jsonl")).samples()] == ["one"]


@pytest.mark.parametrize(
    ("text", "error"),
    [("x = (", r"SyntaxError: .*; line 1"), ("y = 1\nimport no_such_module", r"ModuleNotFoundError: .*; line 2")],
)
def test_a_study_file_that_cannot_be_run_names_its_line(tmp_path, text, error):
    (tmp_path / "study.py").write_text(text)
    with pytest.raises(SinklensError, match=rf"study.py could not be run \({error}\)"):
        find(str(tmp_path / "study.py"))
