"""Likelihood tasks of the harness, by its own YAML, on local data in their published formats."""

import pytest
from harness_tasks import evaluated, local_task

import sinklens
from sinklens.errors import PromptError, SettingError
from sinklens.experiments import likelihood
from sinklens.experiments.nll.estimate import likelihoods
from sinklens.experiments.nll.noise import DrawRule
from sinklens.experiments.nll.result import PromptAnswer
from sinklens.interventions import MaskSinks

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from sinklens.evaluation.harness import SinklensLM

OTHER = {"validation": "test", "val": "test"}  # the split that a task's YAML names and these data do not have
STORY = "Kim has 20 balls. She buys 18 more. "
DATA = {  # YAML of the harness -> split, documents as published
    "arc/arc_easy": ("test", [
        {"id": "1", "question": STORY + "How many?", "choices": {"text": ["38", "28", "12"], "label": ["A", "B", "C"]},
         "answerKey": "A"},
        {"id": "2", "question": STORY * 12, "choices": {"text": ["38 balls", "28"], "label": ["1", "2"]},
         "answerKey": "2"},
    ]),
    "hellaswag/hellaswag": ("validation", [
        {"ind": 4, "activity_label": "Counting", "ctx_a": "Kim has 20 balls.", "ctx_b": "she", "ctx": "",
         "endings": ["buys 18 more.", "loses [step] 3  coins.", "[title] Answer"], "label": "0"},
    ]),
    "piqa/piqa": ("validation", [{"goal": "Count the balls.", "sol1": "Add them.", "sol2": "Drop all.", "label": 1}]),
    "winogrande/default": ("validation", [
        {"sentence": "Kim gave Sam 3 balls, so _ has more now.", "option1": "Kim", "option2": "Sam", "answer": "2"},
    ]),
    "truthfulqa/truthfulqa_mc1": ("validation", [
        {"question": "How many balls?", "mc1_targets": {"choices": ["20", "38 balls.", "3"], "labels": [1, 0, 0]}},
    ]),
    "mmlu/default/_default_template_yaml": ("test", [
        {"question": "How many balls?", "subject": "x", "choices": ["2", "38", "4", "5"], "answer": 1},
    ]),
    "arc/arc_challenge": ("test", [
        {"id": "3", "question": STORY, "choices": {"text": ["3", "38", "8", "2"], "label": ["1", "2", "3", "4"]},
         "answerKey": "2"},
    ]),
    "truthfulqa/truthfulqa_mc2": ("validation", [
        {"question": "How many balls?", "mc1_targets": {"choices": ["38", "20"], "labels": [1, 0]},
         "mc2_targets": {"choices": ["38", "38 balls.", "20", "3"], "labels": [1, 1, 0, 0]}},
    ]),
    "gpqa/zeroshot/_gpqa_zeroshot_yaml": ("train", [
        {"Question": STORY + "How many?", "Correct Answer": "38 balls", "Incorrect Answer 1": "28 [title] balls",
         "Incorrect Answer 2": "12", "Incorrect Answer 3": None},
    ]),
    "cmmlu/_default_template_yaml": ("test", [
        {"Question": "3 + 5 = ?", "A": "2", "B": "8", "C": "5", "D": "9", "Answer": "B"},
    ]),
    "ceval/_default_ceval_yaml": ("val", [
        {"id": 0, "question": "3 + 5 = ?", "A": "2", "B": "8", "C": "5", "D": "9", "answer": "B", "explanation": ""},
    ]),
    "lambada/lambada_openai": ("test", [{"text": STORY + "Answer 38"}, {"text": "Kim has 20 balls"}]),
    "wikitext/wikitext": ("test", [{"page": STORY * 25}, {"page": "Question : 3 ."}]),
}  # fmt: skip


def evaluate(model, folder, originals):
    """Responses of each task, document by document, and the scores."""
    names = []
    for original in originals:
        split, documents = DATA[original]
        training = "train" if split == "train" else None
        splits = {"training_split": training, "fewshot_split": training, "fewshot_config": None}
        splits[f"{OTHER.get(split, 'validation')}_split"] = training
        names.append(local_task(folder, original.replace("/", "-"), {split: documents}, original, **splits))
    found = evaluated(model, folder, names)
    responses = {name: [one[0] for sample in found["samples"][name] for one in sample["resps"]] for name in names}
    return responses, found["results"]


def test_autoregressive_results_equal_those_of_the_harnesss_own_class(tmp_path):
    """In float64, so that the order of sums does not show."""
    model = sinklens.load("tiny-llama", dtype="float64")
    ours, our_scores = evaluate(SinklensLM(model), tmp_path, DATA)
    theirs, their_scores = evaluate(HFLM(model.tree.hf, tokenizer=model.tokenizer, batch_size=4), tmp_path, DATA)
    assert set(ours) == set(theirs)
    for name in ours:
        assert len(ours[name]) == len(theirs[name]) > 0
        for one, other in zip(ours[name], theirs[name], strict=True):
            if isinstance(other, tuple):
                assert one == (pytest.approx(other[0], abs=1e-6), other[1])
            else:
                assert one == pytest.approx(other, abs=1e-6)
        for metric, value in their_scores[name].items():
            assert our_scores[name][metric] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)


def test_bounds_of_a_diffusion_model_reach_the_harness(tmp_path, tiny_llada):
    settings = {"mc_num": 8, "mc_batch": 4}
    found, scores = evaluate(SinklensLM(tiny_llada, seed=3, **settings), tmp_path, ["arc/arc_easy"])
    _, (document, _) = DATA["arc/arc_easy"]
    prompt = f"Question: {document['question']}\nAnswer:"
    wanted = likelihood(
        tiny_llada, prompt, [f" {text}" for text in document["choices"]["text"]], mc_num=8, draws_per_start=4, seed=3
    )  # fmt: skip
    assert found["arc-arc_easy"][:3] == [(pytest.approx(one.value, rel=1e-5), False) for one in wanted]
    assert 0 <= scores["arc-arc_easy"]["acc,none"] <= 1
    masked, _ = evaluate(
        SinklensLM(tiny_llada, mask_sinks=1, mask_same_step=True, seed=3, **settings), tmp_path, ["arc/arc_easy"]
    )  # fmt: skip
    hooks = MaskSinks(top_k=1, same_step=True, seed=3)
    wanted = likelihood(tiny_llada, prompt, " 38", mc_num=8, draws_per_start=4, seed=3, hooks=hooks)
    assert masked["arc-arc_easy"][0][0] == pytest.approx(wanted.value, rel=1e-5)


def request(*arguments):
    return Instance("loglikelihood", {}, arguments, 0)


def test_rolling_bounds_sum_over_windows(tiny_llada):
    model = SinklensLM(tiny_llada, mc_num=4, mc_batch=2)
    (found,) = model.loglikelihood_rolling([request(STORY * 20)], disable_tqdm=True)
    tokens, start = model.tok_encode(STORY * 20), model.prefix_token_id
    size = tiny_llada.cfg.n_ctx - 1  # a window of all positions: one token of context and the tokens that it predicts
    last = PromptAnswer(tuple(tokens[-size - 1 : -(len(tokens) % size)]), tuple(tokens[-(len(tokens) % size) :]))
    assert size < len(tokens) < 2 * size
    windows = [PromptAnswer((start,), tuple(tokens[:size])), last]
    assert found == pytest.approx(sum(one.value for one in likelihoods(tiny_llada, windows, DrawRule(4, 2))), rel=1e-5)


@pytest.mark.parametrize(("name", "given", "answer", "error", "text"), [
    ("tiny-llada", {"mask_sinks": 1}, " 4", SettingError, "MaskKeys acts on the sinks of .*same_step=True"),
    ("tiny-llada", {"cache": "dual"}, " 4", SettingError, "reuses keys of earlier steps, and a likelihood is one pass"),
    ("tiny-llada", {}, STORY * 20, PromptError, r"pair 0 has \d+ tokens, and .* takes at most 128"),
    ("tiny-canvas", {}, " 4", SettingError, "diffusion-gemma models have no likelihood here"),
])  # fmt: skip
def test_what_a_likelihood_does_not_have_is_refused(name, given, answer, error, text):
    with pytest.raises(error, match=text):
        SinklensLM(name, **given).loglikelihood([request("Question: 3?\nAnswer:", answer)], disable_tqdm=True)
