"""Units: a record contains what the run did, whatever its batch."""

import copy
import hashlib
import shutil
from functools import partial
from pathlib import Path

import pytest

import sinklens
from sinklens.errors import PromptError
from sinklens.evaluation import UNMASKED, LedgerRun, evaluate, masking
from sinklens.evaluation.protocols import find_protocol
from sinklens.evaluation.units import Batch, Job, batches, prompt_hash, reference_hash, token_ids
from sinklens.model.files import find_checkpoint
from sinklens.tasks import Sample
from sinklens.tasks.gsm8k import Gsm8k
from sinklens.tasks.prompts import IdSample, Prompts

PLAIN = find_protocol("tiny-gsm")
TASK = PLAIN.make_task()
SAMPLES = tuple(TASK.samples(6))


def carry_out(model, condition, samples, protocol=PLAIN, seed=0):
    return Job(model, {}, TASK, protocol, seed).carry_out(Batch(condition, tuple(samples)))


def reproducible(records):
    return {r["sample"]: {k: v for k, v in r.items() if k not in ("seconds", "batch", "sinks")} for r in records}


CONDITIONS = masking([2], ["random"], of_unmasked=True)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("name", "condition"),
    [
        *(("tiny-llada", condition) for condition in CONDITIONS),
        *(("tiny-llama", condition) for condition in CONDITIONS[:2]),
        *(("tiny-sdar", condition) for condition in (CONDITIONS[0], CONDITIONS[-1])),
    ],
    ids=lambda given: getattr(given, "name", given),
)
def test_records_do_not_depend_on_the_batch(condition, name):
    model, samples = sinklens.load(name), SAMPLES[:3]  # of three lengths
    given = {"block_length": 8, "stop_at_eos": True} if name == "tiny-llada" else {}
    together = carry_out(model, condition, samples, PLAIN.with_settings(given))  # the rows end at different steps
    apart = [carry_out(model, condition, [sample], PLAIN.with_settings(given))[0] for sample in reversed(samples)]
    assert reproducible(together) == reproducible(apart)
    for one, other in zip(together, reversed(apart), strict=True):
        assert one["sinks"] == pytest.approx(other["sinks"], rel=1e-4)
    run = partial(sinklens.generate, model, samples[0].prompt, progress=False, **given)
    assert together[0]["text"] == run(hooks=condition.hooks_for(lambda: run().sinks)).text  # sinks of its own base run


def test_a_record_contains_what_the_run_did(tiny_llada):
    (record,) = carry_out(tiny_llada, UNMASKED, SAMPLES[:1], seed=3)
    run = sinklens.generate(tiny_llada, SAMPLES[0].prompt, seed=3, progress=False)
    answer = run.prompt_length
    expected = {
        "tokens": run.tokens[0, answer:].tolist(), "unmask_step": run.unmask_step[0, answer:].tolist(),
        "steps": run.steps_run, "text": run.text, "empty": False, "ended": True, "masks": 0,
        "verdict": TASK.verdict(SAMPLES[0], run.text),
    }  # fmt: skip
    assert {name: record[name] for name in expected} == expected
    assert sorted(record["unmask_step"]) == list(range(record["steps"]))
    assert record["malformed"] is TASK.malformed(SAMPLES[0], run.text) is False
    assert record["prompt_sha256"] == hashlib.sha256(SAMPLES[0].prompt.encode()).hexdigest()
    assert record["seconds"] > 0
    assert (record["device"], record["versions"]["sinklens"]) == ("cpu", sinklens.__version__)


def test_batches_contain_every_sample_once_and_group_similar_lengths(tiny_llada):
    found = list(batches(UNMASKED, SAMPLES, 4))
    lengths = [len(sample.prompt) for batch in found for sample in batch.samples]
    assert [len(batch.samples) for batch in found] == [4, 2]
    assert lengths == sorted(lengths)
    assert {sample.id for batch in found for sample in batch.samples} == {sample.id for sample in SAMPLES}
    assert list(batches(UNMASKED, SAMPLES[::-1], 4)) == found


def test_everything_that_determines_a_verdict_is_part_of_the_identity(tiny_llada, tiny_llama):
    def named(model=tiny_llada, condition=UNMASKED, task=TASK, protocol=PLAIN, seed=0):
        return str(Job(model, {}, task, protocol, seed).identities([condition]))

    others = [
        named(model=tiny_llama),
        named(condition=masking([1])[1]),
        named(protocol=PLAIN.with_settings({"steps": 12})),
        named(seed=1),
        named(task=Gsm8k(extractor="strict")),
    ]
    assert len({named(), *others}) == 6
    assert named() == named()
    assert named(task=Gsm8k(path=Path("here"))) == named(task=Gsm8k(path=Path("there")))
    assert named(protocol=PLAIN.with_settings({"temperature": 0.0})) == named()  # the default
    other = named(protocol=PLAIN.with_settings({"sampler": "dream", "alg": "topk_margin"}))
    assert "'sampler': 'dream'" in other
    assert "'alg': 'topk_margin'" in other


IDS = (
    IdSample("a", "", "", ids=(2, 287, 28), expected=(5,)),
    IdSample("b", "", "", ids=(2, 287), expected=(5,)),
    IdSample("c", "", "", ids=(2, 287, 28), expected=(6,)),
)
TEXTS = [
    Sample(name, "Question: 2 + 3?" + more, "") for name, more in (("c0", ""), ("c1", ""), ("d", " Say."), ("c2", ""))
]


@pytest.mark.parametrize(
    ("samples", "size", "expected"), [(TEXTS, 4, [["c0", "d"], ["c1"], ["c2"]]), (IDS, 5, [["b", "a"], ["c"]])]
)
def test_equal_prompts_go_into_different_batches_and_others_are_ordered_by_length(samples, size, expected):
    """One batch would draw different random numbers for them; two batches draw the same."""
    assert [[sample.id for sample in batch.samples] for batch in batches(UNMASKED, samples, size)] == expected


def test_equal_prompts_get_equal_answers_in_batches_of_any_size(tiny_llama):
    same = [Sample(f"copy/{number}", SAMPLES[0].prompt, SAMPLES[0].reference) for number in range(2)]
    hot = PLAIN.with_settings({"temperature": 2.0})
    found = [
        {record["sample"]: record["tokens"] for batch in batches(UNMASKED, same, size) for record in
         carry_out(tiny_llama, UNMASKED, batch.samples, hot)}
        for size in (1, 2)
    ]  # fmt: skip
    assert found[0] == found[1]


def test_an_answer_begins_with_the_opening_of_the_sample(tiny_llada):
    sample = Sample("opened", "Question: 2 + 3?", " 5", opening=" Tom has")
    tokenizer = copy.deepcopy(tiny_llada.tokenizer)
    tokenizer.chat_template = "{{ bos_token }}Tom: {{ messages[0]['content'] }} Answer:"
    model = sinklens.load("tiny-llada", tokenizer=tokenizer, check=False)

    def text(ids):
        return model.tokenizer.decode(ids)

    assert text(token_ids(model, sample, False)).endswith("Question: 2 + 3? Tom has")
    assert text(token_ids(model, sample, True)).endswith("Tom: Question: 2 + 3? Answer: Tom has")
    assert token_ids(model, sample, True)[0] == tiny_llada.tokenizer.bos_token_id
    assert tiny_llada.tokenizer.bos_token_id not in token_ids(model, sample, True)[1:]
    plain = Sample("plain", "Question: 2 + 3?", " 5")
    assert token_ids(model, plain, False) == model.encode(plain.prompt)[0][0].tolist()


def test_the_error_for_a_prompt_that_does_not_fit_names_its_samples(tiny_llada):
    long = Sample("long/1", "coins " * 200, "")
    with pytest.raises(PromptError, match=r"sample long/1: .* has \d+ positions, and a pass would need \d+"):
        carry_out(tiny_llada, UNMASKED, [long])


def test_the_identity_of_a_folder_does_not_depend_on_its_path(tmp_path, tiny_llada, monkeypatch):
    folder = tmp_path / "mine"
    shutil.copytree(find_checkpoint("tiny-llada", None), folder)
    monkeypatch.chdir(tmp_path)
    relative, absolute = (Job(name, {}, TASK, PLAIN).identities([UNMASKED]) for name in ("mine", str(folder)))
    assert relative == absolute
    monkeypatch.chdir(folder)
    assert Job(".", {}, TASK, PLAIN).identities([UNMASKED])[0]["model"] == "mine"
    assert (relative[0]["model"], relative[0]["weights"]) == ("mine", tiny_llada.fingerprint)


def test_hashes_of_ids_distinguish_prompts_and_expected_answers():
    assert prompt_hash(IDS[0]) == prompt_hash(IDS[2]) != prompt_hash(IDS[1])
    assert reference_hash(IDS[0]) == reference_hash(IDS[1]) != reference_hash(IDS[2])


def test_a_judge_function_is_part_of_a_runs_identity(tmp_path, tiny_llama):
    file = tmp_path / "asked.jsonl"
    file.write_text('{"prompt": "Question: 1 + 2\\nAnswer:", "expected": "none"}\n')
    task = Prompts(file, by=lambda prompt, answer, expected: (expected not in answer) and prompt.startswith("Question"))
    short = find_protocol("prompts").with_settings({"gen_length": 2})
    for chosen in (task, Prompts(file), task):
        evaluate(tiny_llama, short, [UNMASKED], tmp_path / "out", task=chosen)
    assert sorted(run.records()[0]["verdict"] for run in LedgerRun.all(tmp_path / "out")) == [False, True]


def test_a_chat_template_is_refused_for_ids(tiny_llama):
    assert token_ids(tiny_llama, IDS[0], False) == [2, 287, 28]
    with pytest.raises(PromptError, match=r"a consists of token ids, to which a chat template cannot be applied"):
        token_ids(tiny_llama, IDS[0], True)
