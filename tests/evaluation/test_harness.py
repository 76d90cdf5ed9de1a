"""lm-evaluation-harness: its verdicts equal ours on the same generations, and unsupported uses are refused."""

import importlib
import json
import sys
from functools import partial

import pytest

import sinklens
from sinklens.errors import PromptError, SettingError
from sinklens.evaluation import masking
from sinklens.evaluation.protocols import find_protocol
from sinklens.evaluation.runner import InProcess, Job
from sinklens.evaluation.units import Batch
from sinklens.interventions import MaskSinks
from sinklens.sampling import Evict
from sinklens.tasks import held_out
from sinklens.tasks.base import cut
from sinklens.tasks.gsm8k import Gsm8k
from sinklens.tasks.word_problems import TinyGsm

lm_eval = pytest.importorskip("lm_eval")

from lm_eval import evaluator  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from sinklens.evaluation.harness import SinklensLM  # noqa: E402

SIZE = 8
TASK = """
task: words
dataset_path: json
dataset_kwargs:
  data_files: {{test: "{data}"}}
  cache_dir: "{cache}"
test_split: test
output_type: {kind}
doc_to_text: "{{{{prompt}}}}"
{more}
"""
GENERATING = """
doc_to_target: "{{result}}"
generation_kwargs:
  until: ["Question:"]
  do_sample: false
filter_list:
  - name: number
    filter:
      - {function: regex, regex_pattern: '####\\s*(-?\\d+)'}
      - {function: take_first}
metric_list:
  - metric: exact_match
"""
# The harness's own task, except that its data are replaced by local copies.
HARNESS_TASK = """
include: {original}
task: {name}
dataset_path: json
dataset_name: null
dataset_kwargs:
  data_files: {{test: "{folder}/test.jsonl", train: "{folder}/train.jsonl"}}
  cache_dir: "{cache}"
num_fewshot: {shots}
"""
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


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """No network, and no slow inspection of the machine for the header of the results."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)


@pytest.fixture
def words(tmp_path):
    """A manager of one task, the first held-out word problems, in the harness's format."""

    def make(kind="generate_until", more=GENERATING):
        data = tmp_path / "words.jsonl"
        data.write_text("".join(json.dumps({"prompt": p.prompt, "result": p.result}) + "\n" for p in held_out(SIZE)))
        (tmp_path / "words.yaml").write_text(TASK.format(data=data, cache=tmp_path / "cache", kind=kind, more=more))
        return TaskManager(include_path=tmp_path, include_defaults=False)

    return make


class Canned(LM):
    """Returns prepared answers, cut as by SinklensLM, and keeps the prompts."""

    def __init__(self, texts):
        super().__init__()
        self.texts, self.prompts = texts, []

    def generate_until(self, requests):
        self.prompts = [request.args[0] for request in requests]
        until = requests[0].args[1]["until"]
        return [cut(text, until) for text in self.texts]

    def loglikelihood(self, requests):
        raise AssertionError("likelihoods are not compared")

    loglikelihood_rolling = loglikelihood


def run(model, manager, tasks=("words",), **given):
    return lm_eval.simple_evaluate(
        model=model, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, log_samples=True, **given
    )


def answers(results):
    return [sample["resps"][0][0] for sample in results["samples"]["words"]]


def request(prompt, **settings):
    return Instance("generate_until", {}, (prompt, settings), 0)


@pytest.mark.parametrize("count", [0, 1])
def test_accuracy_equals_that_of_our_verdicts_on_the_same_generations(words, tiny_llada, count):
    model = SinklensLM(tiny_llada, [MaskSinks(top_k=1)] if count else [], batch_size=5)
    results = run(model, words())
    task, texts = TinyGsm(), answers(results)
    verdicts = [task.verdict(sample, text) for sample, text in zip(task.samples(SIZE), texts, strict=True)]
    assert results["results"]["words"]["exact_match,number"] == sum(verdicts) / SIZE
    assert [bool(sample["exact_match"]) for sample in results["samples"]["words"]] == verdicts

    condition = masking([0, 1])[count]
    job = Job(tiny_llada, {}, task, find_protocol("tiny-gsm"), 0)
    ((_, records),) = InProcess().carry_out(job, [Batch(condition, tuple(task.samples(SIZE)))])
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
    results = run(
        "sinklens", words(), model_args="pretrained=tiny-llada,mask_sinks=1,mask_pick=random,steps=12", batch_size="6"
    )
    assert "MaskKeys(" in results["config"]["hooks"][0]
    assert "random" in results["config"]["hooks"][0]
    assert results["config"]["settings"]["steps"] == 12
    assert get_model("hf").__name__ == "HFLM", "the harness's own models are missing"


def test_the_command_line_is_that_of_the_harness(words, tmp_path, monkeypatch, capsys):
    from sinklens.evaluation import harness

    words()
    monkeypatch.setattr(
        "lm_eval.__main__.setup_logging", lambda: None
    )  # it would keep a reference to this test's stderr
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))  # thousands of files
    given = ["--model", "sinklens", "--model_args", "pretrained=tiny-llada,mask_sinks=1", "--batch_size", "4"]
    what = ["--tasks", "words", "--include_path", str(tmp_path), "--limit", "2"]
    monkeypatch.setattr(sys, "argv", ["harness", *given, *what])
    harness.main()
    assert "exact_match" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["harness", *given, *what, "--use_cache", str(tmp_path / "cached")])
    with pytest.raises(SystemExit, match=r"sinklens: the harness's response cache"):
        harness.main()


def test_the_response_cache_is_refused_and_the_cache_of_prompts_is_not(words, tiny_llada, tmp_path, monkeypatch):
    from lm_eval.caching import cache

    monkeypatch.setattr(cache, "PATH", str(tmp_path / "requests"))
    with pytest.raises(SettingError, match=r"response cache \(use_cache\) .* ignores the intervention"):
        run(SinklensLM(tiny_llada), words(), use_cache=str(tmp_path / "cached"))
    requests = [request(problem.prompt, until="Question:") for problem in held_out(SIZE)]
    for count in (0, 3):
        model = SinklensLM(tiny_llada, mask_sinks=count)
        assert answers(run(model, words(), cache_requests=True)) == model.generate_until(requests, True)
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
    prompt = held_out(1)[0].prompt
    sampled = request(prompt, max_gen_toks=8, until="####", do_sample=True, temperature=0.7)
    SinklensLM(tiny_llada).generate_until([sampled, sampled], disable_tqdm=True)
    assert used == [(8, 8, 0.7, 0), (8, 8, 0.7, 1)], "a repeat has another seed"
    used.clear()
    SinklensLM(tiny_llada, gen_length=12, temperature=0.2).generate_until([sampled], disable_tqdm=True)
    SinklensLM(tiny_llada).generate_until([request(prompt, do_sample=False, temperature=0.7, top_p=0.9)], True)
    assert used == [(12, 12, 0.2, 0), (24, 24, 0.0, 0)], "top_p has no effect without sampling"
    with pytest.raises(SettingError, match=r"top_p is not a setting of the llada sampler.*The task sets .*top_p"):
        SinklensLM(tiny_llada).generate_until([request(prompt, do_sample=True, temperature=1.0, top_p=0.9)], True)
    with pytest.raises(
        SettingError, match=r"block_length 12 does not divide gen_length 8.*model_args\) override these"
    ):
        SinklensLM(tiny_llada, block_length=12).generate_until([sampled], True)


def test_answers_are_cut_at_every_stop_text_except_an_empty_one(tiny_llada):
    prompt = held_out(1)[0].prompt
    model = SinklensLM(tiny_llada)
    (uncut,) = model.generate_until([request(prompt, until=[])], disable_tqdm=True)
    assert "####" in uncut
    assert model.generate_until([request(prompt, until=["", "####"])], True) == [uncut[: uncut.index("####")]]
    assert model.generate_until([request(prompt, until="##")], True) == [uncut[: uncut.index("##")]]


def test_the_tokenizers_chat_template_is_applied_without_a_second_start_token(words, monkeypatch):
    model = sinklens.load("tiny-llama")
    lm = SinklensLM(model)
    with pytest.raises(PromptError, match=r"has no chat template; drop --apply_chat_template"):
        lm.apply_chat_template([{"role": "user", "content": "x"}])
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% if not loop.last %}\n\n{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    prompt = held_out(1)[0].prompt
    text = lm.apply_chat_template([{"role": "user", "content": prompt}])
    assert lm.tok_encode(text) == model.encode(prompt, chat_template=True)[0][0].tolist()
    assert lm.tok_encode(prompt) == model.encode(prompt)[0][0].tolist()
    assert lm.chat_template(True) == template
    assert "/" not in lm.tokenizer_name

    results = run(lm, words(), apply_chat_template=True)
    assert results["samples"]["words"][0]["arguments"][0][0] == text
    assert answers(results) == answers(run(SinklensLM("tiny-llama"), words()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": "auto"}, r"batch_size must be a number of at least 1 \('auto' is not supported\); got 'auto'"),
        ({"batch_size": 0}, r"batch_size must be a number of at least 1"),
        ({"stpes": 3}, r"stpes is not a setting of the llada sampler: no sampler has it. Nearest: steps"),
        ({"hooks": MaskSinks(top_k=1), "mask_sinks": 1}, r"give hooks or mask_sinks, not both"),
    ],
)
def test_invalid_arguments_are_refused(tiny_llada, given, message):
    with pytest.raises(SettingError, match=message):
        SinklensLM(tiny_llada, **given)


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
    manager = harness_task(shared, tmp_path, style, shots=0)
    folder = shared / "data" / "gsm8k"
    count = 5 * (len(AWKWARD) + 11)
    strict, flexible = (Gsm8k(folder, style, 0, extractor) for extractor in ("strict", "flexible"))
    texts = generations(flexible, written, count)
    results = run(Canned(texts), manager, ["local"], limit=count)["samples"]["local"]
    for task, name in ((strict, "strict-match"), (flexible, "flexible-extract")):
        wanted = [bool(sample["exact_match"]) for sample in results if sample["filter"] == name]
        found = [task.verdict(sample, text) for sample, text in zip(task.samples(count), texts, strict=True)]
        differing = [(texts[i], found[i], wanted[i]) for i in range(count) if found[i] != wanted[i]]
        assert not differing
        assert 0.05 < sum(found) / count < 0.95


def test_gsm8k_prompts_with_five_examples_equal_those_of_the_harness(shared, tmp_path):
    manager = harness_task(shared, tmp_path, "gsm8k", shots=5)
    canned = Canned([""] * 20)
    run(canned, manager, ["local"], limit=20)
    assert canned.prompts == [sample.prompt for sample in Gsm8k(shared / "data" / "gsm8k").samples(20)]


def harness_task(shared, tmp_path, style, shots):
    file = next(iter(lm_eval.__path__)) + f"/tasks/gsm8k/{style}.yaml"
    given = {"original": file, "name": "local", "folder": shared / "data" / "gsm8k", "cache": tmp_path / "cache"}
    (tmp_path / "local.yaml").write_text(HARNESS_TASK.format(shots=shots, **given))
    return TaskManager(include_path=tmp_path, include_defaults=False)


def test_a_cache_policy_reaches_the_runs_of_the_harness_and_its_results():
    prompt = held_out(1)[0].prompt
    model = SinklensLM("tiny-llada", cache="evict:0.1", steps=6)
    request = Instance("generate_until", {}, (prompt, {"until": []}), 0)
    run = sinklens.generate(model.model, prompt, cache=Evict(keep=0.1), steps=6)
    seen = []
    model.hooks = [("blocks.0.attn.hook_fresh", lambda fresh, hook: seen.append(int(fresh.sum())))]
    assert model.generate_until([request], disable_tqdm=True) == [run.text]
    assert seen == run.sinks["fresh"].isel(layer=0).sum(("batch", "pos")).to_numpy().tolist()
    assert model.get_model_info()["cache"] == repr(Evict(keep=0.1))
    with pytest.raises(SettingError, match="DualCache is for bidirectional models"):
        SinklensLM("tiny-llama", cache="dual")
