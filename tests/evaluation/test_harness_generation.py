"""Generative tasks of the harness, by its own YAML, on local data in their published formats.

Answers are prepared, so the scores are known; the harness builds the prompts and judges, and SinklensLM passes on the
task's settings and cuts the answers. What the harness cannot load without a package or a network is skipped by name.
"""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

lm_eval = pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

from lm_eval import evaluator  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from sinklens.evaluation import harness  # noqa: E402
from sinklens.evaluation.harness import SinklensLM  # noqa: E402

TASK = """
include: {original}
task: {name}
dataset_path: json
dataset_name: null
dataset_kwargs:
  data_files: {{test: "{folder}/{name}-test.jsonl", validation: "{folder}/{name}-examples.jsonl"}}
  cache_dir: "{folder}/cache"
test_split: test
{more}
"""


def missing(*packages):
    return [name for name in packages if importlib.util.find_spec(name) is None]


def needs(packages, extra):
    """A mark that skips without `packages`, with the command that installs them."""
    absent = missing(*packages)
    why = f"the harness needs {', '.join(absent)}: pip install 'lm-eval[{extra}]'"
    return pytest.mark.skipif(bool(absent), reason=why)


LAW = {"category": "law", "options": ["3 balls", "8 balls", "none"], "answer": "B", "answer_index": 1, "src": "x"}
EXAMPLE = LAW | {"question": "Kim has 3 balls.", "cot_content": "A: Let's think step by step. The answer is (A)."}
INSTRUCT = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
CASES = [
    pytest.param(
        "bbh/zeroshot/boolean_expressions", "flexible-extract", 0.5, {"temperature": 0.0, "gen_length": None},
        [({"input": "not ( True ) and 20 is", "target": "False"}, " It is False.Q: True"),
         ({"input": "True and not False and 38 is", "target": "True"}, " False Q: True")],
        id="bbh-zeroshot",
    ),
    pytest.param(
        "bbh/cot_fewshot/boolean_expressions", "get-answer", 0.5, {"temperature": 0.0, "gen_length": 1024},
        [({"input": "not ( True ) and 20 is", "target": "False"}, " So the answer is False.\n\nQ: so the answer is 3."),
         ({"input": "True and not False and 38 is", "target": "True"}, " So the answer is False.")],
        id="bbh-cot-fewshot",
    ),
    pytest.param(
        "mmlu_pro/mmlu_pro_law", "custom-extract", 0.5, {"temperature": 0.0, "gen_length": 2048},
        [(LAW | {"question": "Kim has 20 balls", "cot_content": ""}, " Two. The answer is (B).Question: answer is (A)"),
         (LAW | {"question": "Sam has 38 balls", "cot_content": ""}, " I do not know.")],
        id="mmlu-pro",
    ),
    pytest.param(
        "minerva_math/minerva_math_algebra", "none", 0.5, {"temperature": 0.0, "gen_length": None},
        [({"problem": "Kim has 20 + 18 balls.", "solution": "So \\boxed{38}.", "level": "Level 1", "type": "Algebra"},
          " Final Answer: The final answer is $38$. I hope it is correct.Problem: 7"),
         ({"problem": "Sam has 38 balls.", "solution": "So \\boxed{38}.", "level": "Level 1", "type": "Algebra"},
          " Final Answer: The final answer is $28$. I hope it is correct.")],
        id="minerva-math", marks=needs(("math_verify", "antlr4"), "math"),
    ),
    pytest.param(
        "ifeval/ifeval", "none", 0.5, {"temperature": 0.0, "gen_length": 1280},
        [(INSTRUCT | {"key": 1, "prompt": "Kim has 20 balls. Use no comma."}, "She has 20 balls."),
         (INSTRUCT | {"key": 2, "prompt": "Sam has 38 balls. Use no comma."}, "He, Sam, has 38.")],
        id="ifeval", marks=needs(("langdetect", "immutabledict"), "ifeval"),
    ),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """No network, and no slow inspection of the machine for the header of the results."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)


def evaluate(folder, original, documents, model, **given):
    name = original.rpartition("/")[2]
    (folder / f"{name}-test.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))
    examples = [EXAMPLE] * 5 if "mmlu_pro" in original else documents
    (folder / f"{name}-examples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in examples))
    root = Path(next(iter(lm_eval.__path__))) / "tasks"
    more = "fewshot_split: null" if "mmlu_pro" not in original else ""
    (folder / f"{name}.yaml").write_text(
        TASK.format(original=root / f"{original}.yaml", name=name, folder=folder, more=more)
    )
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model, tasks=[name], task_manager=manager, bootstrap_iters=0, log_samples=True, **given
    )


@pytest.fixture
def scripted(monkeypatch, tiny_llada):
    """A model whose answers depend on a text in the prompt; keeps the settings of every run."""
    used = []

    def make(answers):
        def generate(model, prompts, **settings):
            used.append(settings)
            texts = [model.to_string(ids) for ids in prompts]
            found = [max(answers, key=lambda key, text=text: text.rfind(key)) for text in texts]
            return SimpleNamespace(answers=[SimpleNamespace(text=answers[key]) for key in found])

        monkeypatch.setattr(harness, "generate", generate)
        return SinklensLM(tiny_llada), used

    return make


@pytest.mark.parametrize(("original", "kind", "score", "settings", "cases"), CASES)
def test_right_answers_score_and_wrong_ones_do_not(tmp_path, scripted, original, kind, score, settings, cases):
    keys = [next(text for text in ("20", "38") if text in json.dumps(document)) for document, _ in cases]
    model, used = scripted({key: answer for key, (_, answer) in zip(keys, cases, strict=True)})
    found = evaluate(tmp_path, original, [document for document, _ in cases], model)
    (results,) = found["results"].values()
    metric = "prompt_level_strict_acc" if "ifeval" in original else "exact_match"
    assert results[f"{metric},{kind}"] == score
    assert {name: used[0].get(name) for name in settings} == settings
