"""lm-evaluation-harness: its verdicts equal ours on the same generations, and unsupported uses are refused."""

import importlib.util
import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from asked import PROMPT
from harness_tasks import evaluated, local_task, offline

import sinklens
from sinklens.cli import main
from sinklens.errors import PromptError, SettingError
from sinklens.evaluation import masking
from sinklens.evaluation.protocols import find_protocol
from sinklens.evaluation.units import Batch, Job
from sinklens.interventions import MaskSinks
from sinklens.sampling import Refresh
from sinklens.tasks import held_out
from sinklens.tasks.base import cut
from sinklens.tasks.gsm8k import Gsm8k
from sinklens.tasks.word_problems import TinyGsm

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from sinklens.evaluation.harness import SinklensLM

SIZE = 8
NUMBER = {"function": "regex", "regex_pattern": r"####\s*(-?\d+)"}
WORDS = {
    "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{result}}",
    "generation_kwargs": {"until": ["Question:"], "do_sample": False},
    "filter_list": [{"name": "number", "filter": [NUMBER, {"function": "take_first"}]}],
    "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip
# Answers to a GSM8K prompt, with {n} for the right number.
AWKWARD = (
    " #### {n}", " #### {n}.", " #### ${n}", " ####{n}", " ####  {n}", " #### {n} dollars", " #### {n}.0",
    " #### {n}.00.", " #### -{n}", " #### +{n}", " #### {n},000", " #### {n}%", " #### {n}/2", " #### 2/{n}",
    " #### 7\n#### {n}", " #### {n}\n#### 7", " #### {n}\n\nQuestion: one more?\nAnswer: #### 7",
    " so\nQuestion: #### {n}", " {n}</s>7", " 7<|im_end|>{n}", " #### {n}\nQ: 7", " The answer is {n}.",
    " The answer is {n}", " The answer is {n} eggs", " The answer is ${n}.", " The answer is -{n}.",
    " The answer is {n}. The answer is 7.", " the answer is {n}.", " It is {n}...", " It is {n}, or 7",
    " 3 + 4 = {n}, 20% off", " ${n}", " -{n}", " {n}!", " {n}e5", " − {n}", "", " ", "..", " $", " no number",
    " {n}\n\n", " \u00a0{n}\u00a0", " ####\n{n}", " #### {n}\t7", " 1,{n}", " {n},", " ({n})", " #### ({n})",
)  # fmt: skip


@pytest.fixture
def words(tmp_path):
    """Runs a model on one task, the first held-out word problems, in the harness's format."""
    documents = [{"prompt": problem.prompt, "result": problem.result} for problem in held_out(SIZE)]
    return partial(evaluated, folder=tmp_path, names=[local_task(tmp_path, "words", {"test": documents}, **WORDS)])


class Canned(LM):
    """Returns prepared answers, cut as by SinklensLM, and keeps the prompts."""

    def __init__(self, texts):
        super().__init__()
        self.texts, self.prompts = texts, []

    def generate_until(self, requests):
        self.prompts = [request.args[0] for request in requests]
        return [cut(text, requests[0].args[1]["until"]) for text in self.texts]

    def loglikelihood(self, requests):
        raise AssertionError("likelihoods are not compared")

    loglikelihood_rolling = loglikelihood


def answers(results):
    return [sample["resps"][0][0] for sample in results["samples"]["words"]]


def request(prompt, **settings):
    return Instance("generate_until", {}, (prompt, settings), 0)


@pytest.mark.parametrize("count", [0, 1])
def test_accuracy_equals_that_of_our_verdicts_on_the_same_generations(words, tiny_llada, count):
    results = words(SinklensLM(tiny_llada, [MaskSinks(top_k=1)] if count else [], batch_size=5))
    task, texts = TinyGsm(), answers(results)
    verdicts = [task.verdict(sample, text) for sample, text in zip(task.samples(SIZE), texts, strict=True)]
    assert results["results"]["words"]["exact_match,number"] == sum(verdicts) / SIZE
    assert [bool(sample["exact_match"]) for sample in results["samples"]["words"]] == verdicts

    condition = masking([0, 1])[count]
    job = Job(tiny_llada, {}, task, find_protocol("tiny-gsm"), 0)
    records = job.carry_out(Batch(condition, tuple(task.samples(SIZE))))
    assert texts == [cut(record["text"], ["Question:"]) for record in records], "evaluate generates different texts"
    assert results["config"]["hooks"] == condition.described()["hooks"]


def test_masking_changes_answers_and_the_batch_size_does_not(tiny_llada):
    requests = [request(problem.prompt) for problem in held_out(5)]
    plain = SinklensLM(tiny_llada, steps=8).generate_until(requests, disable_tqdm=True)
    masked = SinklensLM(tiny_llada, steps=8, mask_sinks=3).generate_until(requests, disable_tqdm=True)
    assert plain != masked
    for size in (1, 3):
        assert SinklensLM(tiny_llada, steps=8, mask_sinks=3, batch_size=size).generate_until(requests, True) == masked


def test_the_registered_name_takes_text_arguments(words):
    results = words(
        "sinklens", model_args="pretrained=tiny-llada,mask_sinks=1,mask_pick=random,steps=12", batch_size="6"
    )
    assert "MaskKeys(" in results["config"]["hooks"][0]
    assert "random" in results["config"]["hooks"][0]
    assert results["config"]["settings"]["steps"] == 12
    assert get_model("hf").__name__ == "HFLM", "the harness's own models are missing"


def test_the_command_line_is_that_of_the_harness(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "lm_eval.__main__.setup_logging", lambda: None
    )  # it would keep a reference to this test's stderr
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))  # thousands of files
    given = ["--model", "sinklens", "--model_args", "pretrained=tiny-llada,mask_sinks=1", "--batch_size", "4"]
    what = ["--tasks", "words", "--include_path", str(tmp_path), "--limit", "2"]
    before = sys.argv
    with offline():
        assert main(["lm-eval", *given, *what]) == 0
    assert sys.argv is before
    assert "exact_match" in capsys.readouterr().out
    assert main(["lm-eval", *given, *what, "--use_cache", str(tmp_path / "cached")]) == 1
    assert "sinklens: the harness's response cache" in capsys.readouterr().err


def test_the_response_cache_is_refused_and_the_cache_of_prompts_is_not(words, tiny_llada, tmp_path, monkeypatch):
    from lm_eval.caching import cache

    monkeypatch.setattr(cache, "PATH", str(tmp_path / "requests"))
    with pytest.raises(SettingError, match=r"response cache \(use_cache\) .* ignores the intervention"):
        words(SinklensLM(tiny_llada), use_cache=str(tmp_path / "cached"))
    requests = [request(problem.prompt, until="Question:") for problem in held_out(SIZE)]
    for count in (0, 3):
        model = SinklensLM(tiny_llada, mask_sinks=count)
        assert answers(words(model, cache_requests=True)) == model.generate_until(requests, True)
        assert list((tmp_path / "requests").iterdir()), "nothing was cached, so the test shows nothing"


def test_a_tasks_length_and_temperature_apply_unless_the_models_arguments_set_them(tiny_llada, monkeypatch):
    from sinklens.evaluation import harness

    used = []
    real = sinklens.generate

    def watched(*args, **kwargs):
        done = real(*args, **kwargs)
        used.append((done.settings.gen_length, done.settings.steps, done.settings.temperature, done.seed))
        return done

    monkeypatch.setattr(harness, "generate", watched)
    sampled = request(PROMPT, max_gen_toks=8, until="####", do_sample=True, temperature=0.7)
    SinklensLM(tiny_llada).generate_until([sampled, sampled], disable_tqdm=True)
    assert used == [(8, 8, 0.7, 0), (8, 8, 0.7, 1)], "a repeat has another seed"
    used.clear()
    SinklensLM(tiny_llada, gen_length=12, temperature=0.2).generate_until([sampled], disable_tqdm=True)
    SinklensLM(tiny_llada).generate_until([request(PROMPT, do_sample=False, temperature=0.7, top_p=0.9)], True)
    assert used == [(12, 12, 0.2, 0), (24, 24, 0.0, 0)], "top_p has no effect without sampling"


def test_answers_are_cut_at_every_stop_text_except_an_empty_one(tiny_llada):
    model = SinklensLM(tiny_llada)
    (uncut,) = model.generate_until([request(PROMPT, until=[])], disable_tqdm=True)
    assert "####" in uncut
    assert model.generate_until([request(PROMPT, until=["", "####"])], True) == [uncut[: uncut.index("####")]]
    assert model.generate_until([request(PROMPT, until="##")], True) == [uncut[: uncut.index("##")]]


def test_the_tokenizers_chat_template_is_applied_without_a_second_start_token(words, monkeypatch):
    model = sinklens.load("tiny-llama")
    lm = SinklensLM(model)
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% if not loop.last %}\n\n{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    text = lm.apply_chat_template([{"role": "user", "content": PROMPT}])
    assert lm.tok_encode(text) == model.encode(PROMPT, chat_template=True)[0][0].tolist()
    assert (lm.tok_encode(PROMPT), lm.chat_template(True)) == (model.encode(PROMPT)[0][0].tolist(), template)
    assert "/" not in lm.tokenizer_name

    results = words(lm, apply_chat_template=True)
    assert results["samples"]["words"][0]["arguments"][0][0] == text
    assert answers(results) == answers(words(SinklensLM("tiny-llama")))


def asked(model, task, **given):
    """Answer a prompt under a task's settings."""
    SinklensLM(model, **given).generate_until([request("Question: 2 + 3?", **task)], disable_tqdm=True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            partial(SinklensLM, "tiny-llada", batch_size="auto"),
            SettingError,
            r"batch_size must be a number of at least 1, and not 'auto'; got 'auto'",
        ),
        (
            partial(SinklensLM, "tiny-llada", batch_size=0),
            SettingError,
            r"batch_size must be a number of at least 1",
        ),
        (
            partial(SinklensLM, "tiny-llada", stpes=3),
            SettingError,
            r"stpes is not a setting of the llada sampler: no sampler has it. Nearest: steps",
        ),
        (
            partial(SinklensLM, "tiny-llada", MaskSinks(top_k=1), mask_sinks=1),
            SettingError,
            r"give hooks or mask_sinks, not both",
        ),
        (partial(SinklensLM, "tiny-llama", cache="dual"), SettingError, "DualCache is for bidirectional models"),
        (
            partial(asked, "tiny-llada", {"do_sample": True, "temperature": 1.0, "top_p": 0.9}),
            SettingError,
            r"top_p is not a setting of the llada sampler.*The task sets .*top_p",
        ),
        (
            partial(asked, "tiny-llada", {"max_gen_toks": 8}, block_length=12),
            SettingError,
            r"block_length 12 does not divide gen_length 8.*model_args\) override these",
        ),
        (
            lambda: SinklensLM("tiny-llama").apply_chat_template([{"role": "user", "content": "x"}]),
            PromptError,
            r"has no chat template; drop --apply_chat_template",
        ),
    ],
)
def test_invalid_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_without_the_harness_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "sinklens.evaluation.harness")
    with pytest.raises(SettingError, match=r"pip install 'sinklens\[lm-eval\]'"):
        importlib.import_module("sinklens.evaluation.harness")


@pytest.fixture(scope="module")
def written(tiny_llada):
    """Texts that a model generates."""
    return SinklensLM(tiny_llada, batch_size=10).generate_until([request(p.prompt) for p in held_out(10)], True)


def generations(task, written, count):
    """Right numbers in awkward texts, worked answers, and texts generated by a model."""
    texts = []
    for number, sample in enumerate(task.samples(count)):
        right = task.extract(sample.reference)
        kinds = [*(text.replace("{n}", right) for text in AWKWARD), sample.reference, *written]
        texts.append(kinds[number % len(kinds)])
    return texts


@pytest.mark.parametrize("style", ["gsm8k", "gsm8k-cot", "gsm8k-cot-zeroshot"])
def test_gsm8k_verdicts_equal_those_of_the_harness(shared, tmp_path, written, style):
    folder = gsm8k(shared, tmp_path, style, shots=0)
    count = 5 * (len(AWKWARD) + 11)
    strict, flexible = (Gsm8k(folder, style, 0, extractor) for extractor in ("strict", "flexible"))
    texts = generations(flexible, written, count)
    results = evaluated(Canned(texts), tmp_path, ["local"], limit=count)["samples"]["local"]
    for task, name in ((strict, "strict-match"), (flexible, "flexible-extract")):
        wanted = [bool(sample["exact_match"]) for sample in results if sample["filter"] == name]
        found = [task.verdict(sample, text) for sample, text in zip(task.samples(count), texts, strict=True)]
        assert not [(texts[i], found[i], wanted[i]) for i in range(count) if found[i] != wanted[i]]
        assert 0.05 < sum(found) / count < 0.95


def test_gsm8k_prompts_with_five_examples_equal_those_of_the_harness(shared, tmp_path):
    folder, canned = gsm8k(shared, tmp_path, "gsm8k", shots=5), Canned([""] * 20)
    evaluated(canned, tmp_path, ["local"], limit=20)
    assert canned.prompts == [sample.prompt for sample in Gsm8k(folder).samples(20)]


def gsm8k(shared, tmp_path, style, shots):
    """The folder of the data, on which the harness's task is "local"."""
    folder = shared / "data" / "gsm8k"
    files = {split: folder / f"{split}.jsonl" for split in ("test", "train")}
    local_task(tmp_path, "local", files, f"gsm8k/{style}", num_fewshot=shots)
    return folder


def test_a_cache_policy_reaches_the_runs_of_the_harness_and_its_results():
    model = SinklensLM("tiny-llada", cache="refresh:3", steps=6)
    request = Instance("generate_until", {}, (PROMPT, {"until": []}), 0)
    run = sinklens.generate(model.model, PROMPT, cache=Refresh(every=3), steps=6)
    seen = []
    model.hooks = [("blocks.0.attn.hook_fresh", lambda fresh, hook: seen.append(int(fresh.sum())))]
    assert model.generate_until([request], disable_tqdm=True) == [run.text]
    assert seen == run.sinks["fresh"].isel(layer=0).sum(("batch", "pos")).to_numpy().tolist()
    assert model.get_model_info()["cache"] == repr(Refresh(every=3))


# Other tasks of the harness


def needs(packages, extra):
    """A mark that skips without `packages`, with the command that installs them."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
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


@pytest.mark.parametrize(("original", "kind", "score", "settings", "cases"), CASES)
def test_right_answers_score_and_wrong_ones_do_not(
    tmp_path, monkeypatch, tiny_llada, original, kind, score, settings, cases
):
    """The answer depends on a number in the prompt."""
    documents, texts = zip(*cases, strict=True)
    keys = ["20" if "20" in json.dumps(document) else "38" for document in documents]
    used = []

    def generate(model, prompts, **given):
        used.append(given)
        asked = [model.to_string(ids) for ids in prompts]
        found = [texts[keys.index(max(keys, key=text.rfind))] for text in asked]
        return SimpleNamespace(answers=[SimpleNamespace(text=text) for text in found])

    monkeypatch.setattr("sinklens.evaluation.harness.generate", generate)
    law = "mmlu_pro" in original
    data = {"test": list(documents), "validation": [EXAMPLE] * 5 if law else list(documents)}
    more = {"test_split": "test"} | ({} if law else {"fewshot_split": None})
    name = local_task(tmp_path, original.rpartition("/")[2], data, original, **more)
    (results,) = evaluated(SinklensLM(tiny_llada), tmp_path, [name])["results"].values()
    assert results[f"{'prompt_level_strict_acc' if 'ifeval' in original else 'exact_match'},{kind}"] == score
    assert {name: used[0].get(name) for name in settings} == settings
