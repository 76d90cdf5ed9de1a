"""Autoregressive likelihoods are exact, share the prompt's work, and under hooks are those of a forced run."""

import numpy as np
import pytest
import torch
from building import random_model

import sinklens
from sinklens.errors import PromptError, SettingError
from sinklens.experiments import likelihood
from sinklens.experiments.nll.estimate import likelihoods
from sinklens.experiments.nll.noise import DrawRule
from sinklens.experiments.nll.result import PromptAnswer
from sinklens.interventions import AblateHeads, MaskSinks

PAIRS = [
    PromptAnswer(prompt, answer)
    for prompt, answer in (
        ((5, 9, 3, 2), (7, 11)), ((4,), (1, 8, 3)), ((5, 9, 3, 2), (8, 1, 9)), ((6, 6), (2,)), ((4,), (9,)),
        ((1, 2, 3, 4, 5, 6), (7, 7)),
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return random_model(causal=True)


def naive(model, pair):
    """−log p of each answer token, one text at a time."""
    logits = model.tree.hf(torch.tensor([[*pair.prompt, *pair.answer]])).logits[0].detach().double().log_softmax(-1)
    places = range(len(pair.prompt) - 1, len(pair.prompt) + len(pair.answer) - 1)
    return [-float(logits[place, token]) for place, token in zip(places, pair.answer, strict=True)]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("rows", [None, 1, 2])
@pytest.mark.parametrize("hooks", [(), [("blocks.0.hook_resid_post", lambda value, hook: None)]])
def test_the_likelihood_is_the_product_over_tokens(model, rows, hooks):
    for pair, one in zip(PAIRS, likelihoods(model, PAIRS, DrawRule(), batch_size=rows, hooks=hooks), strict=True):
        np.testing.assert_allclose(one.losses[0], naive(model, pair), rtol=1e-4)
        assert (one.kind, one.standard_error) == ("likelihood", 0.0)
        assert one.value == pytest.approx(-sum(naive(model, pair)), rel=1e-5)


def test_answers_of_one_prompt_share_its_keys_and_values(model, passed):
    likelihood(model, [3] * 20, [[1, 2], [4, 5], [6, 7], [8, 9]])
    assert [ids.numel() for ids in passed] == [19, 8], "not 4 times 22"


@pytest.mark.parametrize(
    "hooks", [MaskSinks(top_k=1), MaskSinks(top_k=2, pick="random"), AblateHeads(layers=[1], heads=[0], steps=[1])]
)
def test_under_hooks_it_is_that_of_a_run_that_writes_the_answer(model, hooks):
    prompt, answer = [5, 9, 3, 2], [7, 11, 2]
    canvas = torch.full((1, 4, 7), -1)
    for step in range(4):
        canvas[0, step, : 4 + step] = torch.tensor([*prompt, *answer])[: 4 + step]
    seen = []
    read = ("denoise.hook_logits", lambda value, hook: seen.append(value[0, 0].log_softmax(-1)))
    sinklens.generate(model, [prompt], hooks=[hooks, read], gen_length=3, replay=canvas, use_cache=False)
    wanted = [-float(logits[token]) for logits, token in zip(seen, answer, strict=True)]
    found = likelihood(model, prompt, answer, hooks=hooks)
    np.testing.assert_allclose(found.losses[0], wanted, rtol=1e-4)
    assert found.value != pytest.approx(likelihood(model, prompt, answer).value, rel=1e-6)


@pytest.mark.parametrize(("prompt", "answer", "given", "error", "text"), [
    ([], [3], {}, PromptError, "prompt 0 is empty.*its first token needs one before it"),
    ([1], [3], {"cfg_scale": 1.0}, SettingError, "is autoregressive and has no mask token to guide with"),
    (
        [9, 8], [0, 7], {"hooks": MaskSinks(top_k=1)}, SettingError,
        "answer 0 holds an end token at position 0, where a run under hooks ends",
    ),
])  # fmt: skip
def test_what_has_no_meaning_is_refused(tiny_llama, prompt, answer, given, error, text):
    assert tiny_llama.eos_token_ids == (0,)
    likelihood(tiny_llama, [9, 8], [7, 0], hooks=MaskSinks(top_k=1))
    with pytest.raises(error, match=text):
        likelihood(tiny_llama, prompt, answer, **given)
