"""Bounds equal the published script and the sum over all masks, in every family, whatever the batch."""

import numpy as np
import pytest
import torch
from layouts import BLOCK_CAUSAL
from likelihood_oracle import LladaScript, all_masks

import sinklens
from sinklens.errors import DeviceMemoryError, PromptError, SettingError
from sinklens.experiments import likelihood
from sinklens.experiments.nll.noise import generator_of
from sinklens.hooks import HookTree

PROMPT, ANSWER = [5, 9, 3], [7, 11, 2, 8, 4]
SHIFTED = ("dream", "fast-dllm-v2", "rnd1", "open-dcoder")
MASKED = ("llada", "mmada", "dream", "a2d-qwen3", "llada-moe", "rnd1", "open-dcoder")


def raw(model):
    """From ids to logits, by the transformers model alone."""
    return lambda ids: model.tree.hf(ids).logits.detach()


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("cfg", [0.0, 0.7])
@pytest.mark.parametrize(("answer", "batch"), [(ANSWER, 5), ([*ANSWER, 1, 6, 12], 4), ([7], 1)])
def test_the_estimate_equals_lladas_script_with_the_same_draws(llada, answer, batch, cfg):
    seeds = [generator_of(3, PROMPT, len(answer), 0, number).initial_seed() for number in range(3)]
    script = LladaScript(raw(llada), llada.mask_token_id, 3 * batch, batch, cfg)
    found = likelihood(llada, PROMPT, answer, mc_num=3 * batch, draws_per_start=batch, cfg_scale=cfg, seed=3)
    assert found.value == pytest.approx(script.get_loglikelihood(PROMPT, answer, seeds), rel=1e-5)
    assert found.kind == "estimate"


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", MASKED)
def test_the_sum_over_all_masks_is_that_of_each_family(family_model, name):
    model = family_model(name)
    wanted = all_masks(raw(model), model.mask_token_id, PROMPT, ANSWER, shift=name in SHIFTED)
    found = likelihood(model, PROMPT, ANSWER, exact=True)
    assert found.value == pytest.approx(wanted, rel=1e-5)
    assert (found.kind, found.standard_error) == ("bound", 0.0)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", BLOCK_CAUSAL)
def test_a_block_causal_model_is_evaluated_block_by_block(family_model, name):
    """Blocks of 4: the prompt of 3 tokens ends within the first one, or is padded to a complete one (bd3lm)."""
    model, wanted, start = family_model(name), 0.0, 0
    answer = [*ANSWER, 1, 6]
    lead = 1 if name.startswith("bd3lm") else 0
    ends = [4, 7] if lead else [1, 5, 7]

    def logits(ids):  # the oracle of a padded row: a mask hides the padding
        ids = torch.nn.functional.pad(ids, (lead, 0))
        real = torch.ones_like(ids, dtype=torch.bool)
        real[:, :lead] = False
        return model.tree.head(model.tree.hidden(ids, real)).detach()[:, lead:]

    for end in ends:
        before, block = PROMPT + answer[:start], answer[start:end]
        wanted += all_masks(logits, model.mask_token_id, before, block, shift=name in SHIFTED)
        start = end
    found = likelihood(model, PROMPT, answer, exact=True)
    assert found.value == pytest.approx(wanted, rel=1e-5)
    assert np.flatnonzero(np.diff(found.blocks)).tolist() == [end - 1 for end in ends[:-1]]


@pytest.mark.extended
@pytest.mark.parametrize(("name", "masking"), [("llada", "count"), ("llada", "rate"), ("sdar", "count")])
def test_estimates_scatter_around_the_bound_as_their_standard_errors_say(family_model, name, masking):
    model, seeds = family_model(name), 60
    exact = likelihood(model, PROMPT, ANSWER, exact=True).value
    how = {"mc_num": 64, "draws_per_start": 8, "masking": masking}
    found = [likelihood(model, PROMPT, ANSWER, **how, seed=seed) for seed in range(seeds)]
    values, errors = np.array([one.value for one in found]), np.array([one.standard_error for one in found])
    of_mean = values.std(ddof=1) / seeds**0.5
    assert abs(values.mean() - exact) < 4 * of_mean + (0.002 * abs(exact) if masking == "rate" else 0)
    assert np.sqrt((errors**2).mean()) == pytest.approx(values.std(ddof=1), rel=0.3)
    assert of_mean < 0.02 * abs(exact), "too few seeds to show a bias"


def test_per_token_parts_are_those_of_the_masks(llada):
    found = likelihood(llada, PROMPT, ANSWER, exact=True)
    assert found.positions.sum() == pytest.approx(found.value)
    masks = (found.shares[:, 0] * 5).round().astype(int)
    assert np.bincount(masks).tolist() == [0, 5, 10, 10, 5, 1]
    of_size = [np.nanmean(found.losses[masks == size], axis=1).mean() for size in range(1, 6)]
    assert sum(of_size) == pytest.approx(-found.value), "the mean over the number of masked tokens, times L"
    alone = raw(llada)(torch.tensor([PROMPT + [llada.mask_token_id] * 5]))[0, 3:].log_softmax(-1)
    assert of_size[-1] == pytest.approx(-float(alone[range(5), ANSWER].mean()), rel=1e-5)
    drawn = likelihood(llada, PROMPT, ANSWER, mc_num=4096, draws_per_start=256)
    errors = drawn.error_of(drawn.parts)
    assert (np.abs(drawn.positions - found.positions) < 4 * errors).all()
    assert errors.max() < 0.05 * abs(found.positions).mean()


def test_equal_masks_are_computed_once(llada, passed):
    likelihood(llada, PROMPT, [7], mc_num=128)
    likelihood(llada, PROMPT, [7, 2], mc_num=128)
    assert [len(ids) for ids in passed] == [1, 3]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", BLOCK_CAUSAL)
@pytest.mark.parametrize("length", [3, 8, 9])
def test_draws_and_choices_share_the_blocks_before_them(family_model, passed, name, length):
    """A hook that changes nothing makes every row a complete pass."""
    model, prompt = family_model(name), [*range(3, 3 + length)]
    passed.clear()  # those of the self-check
    given = {"mc_num": 12, "draws_per_start": 4}
    answers = [[*ANSWER, 1], ANSWER[:3], [*ANSWER, 1]]
    shared = likelihood(model, prompt, answers, **given)
    few = len(passed)
    alone = likelihood(model, prompt, answers, hooks=[("hook_embed", lambda value, hook: None)], **given)
    for one, other in zip(shared, alone, strict=True):
        np.testing.assert_allclose(one.losses, other.losses, rtol=1e-4, atol=1e-4)
    computed, of_rows = (sum(ids.numel() for ids in part) for part in (passed[:few], passed[few:]))
    assert computed < (0.75 if length > 3 else 1.0) * of_rows


@pytest.mark.extended
def test_out_of_memory_halves_the_batch_and_goes_on(llada, monkeypatch):
    sizes, hidden = [], HookTree.hidden
    wanted = likelihood(llada, PROMPT, ANSWER, exact=True)

    def small(self, ids, *args, **options):
        sizes.append(len(ids))
        if len(ids) > 9:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return hidden(self, ids, *args, **options)

    monkeypatch.setattr(HookTree, "hidden", small)
    np.testing.assert_allclose(likelihood(llada, PROMPT, ANSWER, exact=True).losses, wanted.losses, rtol=1e-4)
    assert sizes == [31, 15, 7, 7, 7, 7, 3]
    monkeypatch.setattr(HookTree, "hidden", lambda *args, **options: (_ for _ in ()).throw(torch.OutOfMemoryError()))
    with pytest.raises(DeviceMemoryError, match=r"A likelihood pass of 1 rows ran out of memory"):
        likelihood(llada, PROMPT, ANSWER)


def test_texts_are_tokenized_together_and_spaces_belong_to_the_answer(tiny_llada):
    text, answer = "Question: 3?\nAnswer:", " 12"
    ids, both = (tiny_llada.encode(given)[0][0].tolist() for given in (text, text + answer))
    found = likelihood(tiny_llada, text, answer, exact=True)
    assert found.tokens == tuple(both[len(ids) :])
    assert found.value == likelihood(tiny_llada, ids, both[len(ids) :], exact=True).value
    assert likelihood(tiny_llada, text + " ", "12", exact=True).tokens == found.tokens
    assert tiny_llada.likelihood(text, answer, exact=True).value == found.value
    several = likelihood(tiny_llada, text, [answer, " 13"], exact=True)
    assert [one.tokens for one in several] == [found.tokens, likelihood(tiny_llada, text, " 13", exact=True).tokens]
    template = "{{ bos_token }}{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    chat = tiny_llada.encode(text, template)[0][0].tolist()
    tail = tiny_llada.encode(answer, prepend_bos=False)[0][0].tolist()
    templated = likelihood(tiny_llada, text, answer, exact=True, chat_template=template)
    assert templated.value == likelihood(tiny_llada, chat, tail, exact=True).value


@pytest.mark.parametrize(
    ("prompt", "answer", "given", "error", "message"),
    [
        ([5], [], {}, PromptError, r"answer 0 is empty"),
        ([5], None, {}, PromptError, r"prompts and answers are texts, token ids or lists of these; got None"),
        (7, [5], {}, PromptError, r"prompts and answers are texts, token ids or lists of these; got 7"),
        ([5], [60], {}, PromptError, r"pair 0 contains the mask token \(60\)"),
        ([5] * 62, [6] * 3, {}, PromptError, r"pair 0 has 65 tokens, and .* takes at most 64"),
        ([[5], [6]], [[1], [2], [3]], {}, PromptError, r"got 2 prompts and 3 answers"),
        ([5], [6], {"batch_size": 0}, SettingError, r"batch_size must be an integer of at least 1 or None; got 0"),
        ([5], [6], {"cfg_scale": -1.0}, SettingError, r"cfg_scale must be a finite number of at least 0; got -1.0"),
        ([5], [6], {"cache": "dual"}, SettingError, r"DualCache\(.*reuses keys of earlier steps.*evaluate --cache"),
        ([5], [6] * 9, {"exact": True}, SettingError, r"for at most 8 tokens \(255 masks\); got 9. Leave it out"),
    ],
)
def test_invalid_pairs_and_settings_are_refused(llada, prompt, answer, given, error, message, unchecked):
    with pytest.raises(error, match=message):
        likelihood(llada, prompt, answer, **given)


@pytest.mark.extended
def test_other_draws_and_a_canvas_of_random_tokens_are_refused(llada):
    one, two = likelihood(llada, PROMPT, [ANSWER, ANSWER[::-1]], mc_num=32)
    np.testing.assert_array_equal(np.isnan(one.losses), np.isnan(two.losses))
    assert not np.array_equal(
        np.isnan(one.losses), np.isnan(likelihood(llada, PROMPT, ANSWER, mc_num=32, seed=1).losses)
    )
    with pytest.raises(SettingError, match=r"diffusion-gemma models have no likelihood here: .*nor a bound"):
        likelihood(sinklens.load("tiny-canvas"), "1", "2")
