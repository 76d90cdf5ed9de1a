"""Interventions in a likelihood are masks of the same pass; what needs an earlier step or a decision is refused."""

import numpy as np
import pytest
import torch
from building import plain_pass
from likelihood_oracle import LladaScript, all_masks

import sinklens
from sinklens.errors import SinklensError
from sinklens.experiments import likelihood, likelihood_difference
from sinklens.experiments.nll.noise import generator_of
from sinklens.interventions import (
    AblateHeads,
    ForceTokens,
    FreezePattern,
    HideKeys,
    HoldSinks,
    KeepKeys,
    MaskKeys,
    MaskSinks,
    SinkToken,
    Suffix,
    Where,
)  # fmt: skip
from sinklens.sinks import EpsilonOverMean

PROMPT, ANSWER = [5, 9, 3], [7, 11, 2, 8]
TEXT, WORKED = "Question: 12 + 7?\nAnswer:", " 12 + 7 = 19."


def without(model, choose):
    """From ids to logits, each head without the keys that `choose(ids, scores, layer)` marks, [row, head, key]."""

    def logits(ids):
        values, edits = plain_pass(model, ids).values, {}
        for layer in range(model.cfg.n_layers):
            keys = choose(ids, values[f"blocks.{layer}.attn.hook_sink_scores"], layer)[:, :, None]
            edits[f"blocks.{layer}.attn.hook_attn_mask"] = lambda mask, keys=keys: mask.masked_fill(keys, -torch.inf)
        return plain_pass(model, ids, edits=edits).logits

    return logits


def strongest(scores, count=1):
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(count).indices, True)


def everywhere(choose):
    """The same keys in every head, chosen by the ids and their positions."""
    return lambda ids, scores, layer: choose(ids, torch.arange(7))[..., None, :].expand(scores.shape)


def above(ids, scores, layer):
    return scores > (scores.sum(-1, keepdim=True) - scores) / (scores.shape[-1] - 1) + 1.0


DETECTOR = EpsilonOverMean(epsilon=1.0)
KEYS = {
    "strongest": (MaskSinks(top_k=1, same_step=True), lambda ids, scores, layer: strongest(scores)),
    "three": (MaskSinks(top_k=3, same_step=True), lambda ids, scores, layer: strongest(scores, 3)),
    "position": (HideKeys(positions=[1, -1]), everywhere(lambda ids, at: (at == 1) | (at == 6))),
    "state": (MaskSinks(top_k=None, where="masked"), everywhere(lambda ids, at: ids == 60)),
    "prompt": (MaskSinks(top_k=None, where="prompt"), everywhere(lambda ids, at: at < 3)),
    "detector": (MaskSinks(top_k=None, detector=DETECTOR, same_step=True), above),
    "where": (MaskSinks(top_k=None, where=Where(detector=DETECTOR, same_step=True)), above),
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", KEYS)
def test_masked_keys_are_those_of_the_pass_itself(llada, name):
    hooks, choose = KEYS[name]
    found = likelihood(llada, PROMPT, ANSWER, exact=True, hooks=hooks).value
    assert found == pytest.approx(all_masks(without(llada, choose), 60, PROMPT, ANSWER), rel=1e-4)
    unmasked = likelihood(llada, PROMPT, ANSWER, exact=True).value
    assert abs(found - unmasked) > 0.01
    assert likelihood(llada, PROMPT, ANSWER, exact=True, hooks=MaskSinks(top_k=0, same_step=True)).value == unmasked


def test_under_guidance_interventions_see_the_conditional_rows(llada):
    masked = without(llada, KEYS["strongest"][1])

    def logits(ids):
        half = len(ids) // 2
        return torch.cat([masked(ids[:half]), plain_pass(llada, ids[half:]).logits])

    seed = generator_of(0, PROMPT, len(ANSWER), 0, 0).initial_seed()
    script = LladaScript(logits, llada.mask_token_id, 4, 4, 0.5)
    options = {"mc_num": 4, "draws_per_start": 4, "cfg_scale": 0.5}
    found = likelihood(llada, PROMPT, ANSWER, hooks=MaskSinks(top_k=1, same_step=True), **options)
    assert found.value == pytest.approx(script.get_loglikelihood(PROMPT, ANSWER, [seed]), rel=1e-4)


def test_keys_are_masked_by_kind_of_token(tiny_llada):
    ids = tiny_llada.encode(TEXT)[0][0].tolist()
    digits = [place for place, token in enumerate(ids) if tiny_llada.to_str_tokens([token])[0].strip().isdigit()]
    by_kind = likelihood(tiny_llada, ids, [260], hooks=MaskSinks(top_k=None, where="digit"))
    assert by_kind.value == pytest.approx(likelihood(tiny_llada, ids, [260], hooks=HideKeys(positions=digits)).value)
    assert by_kind.value != likelihood(tiny_llada, ids, [260]).value
    assert digits


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("pick", ["random", "same_mass", "nearest", "weakest", "random_any"])
def test_controls_do_not_depend_on_the_batch_and_share_the_masks(llada, pick):
    hooks = MaskSinks(top_k=1, pick=pick, same_step=True)
    first, second = (likelihood(llada, PROMPT, ANSWER, mc_num=32, hooks=hooks, batch_size=rows) for rows in (None, 3))
    np.testing.assert_allclose(first.losses, second.losses, rtol=1e-4)
    treated = likelihood(llada, PROMPT, ANSWER, mc_num=32, hooks=MaskSinks(top_k=1, same_step=True))
    assert likelihood_difference(first, treated).n == 1
    assert abs(first.value - treated.value) > 1e-3


def test_other_interventions_change_a_pass_as_they_change_a_step(llada):
    """The oracle: the first step of a run over the same, completely masked answer."""
    for hook in (
        AblateHeads(layers=[1], heads=[2]), MaskKeys(keep=True, window=1, positions=[0]),
        KeepKeys(top_k=2, same_step=True),
        ("blocks.1.attn.hook_z", lambda value, hook: value * 0.5),
    ):  # fmt: skip
        seen = []
        read = ("denoise.hook_logits", lambda value, hook, seen=seen: seen.append(value[0, 3:].log_softmax(-1)))
        sinklens.generate(llada, [PROMPT], gen_length=4, steps=4, block_length=4, hooks=[hook, read])
        found = likelihood(llada, PROMPT, ANSWER, exact=True, hooks=[hook])
        np.testing.assert_allclose(found.losses[-1], -seen[0][range(4), ANSWER], rtol=1e-4)


def test_tokens_around_the_answer_are_given(llada):
    seen = []
    read = ("denoise.hook_canvas", lambda value, hook: seen.append(value.clone()))
    found = likelihood(llada, PROMPT, [8, 4], exact=True, hooks=[Suffix(text=[12, 13]), read])
    assert {tuple(row) for row in seen[0].tolist()} == {
        (*PROMPT, 60, 4, 12, 13), (*PROMPT, 8, 60, 12, 13), (*PROMPT, 60, 60, 12, 13)
    }  # fmt: skip

    def given(ids):
        return plain_pass(llada, torch.cat([ids, torch.tensor([[12, 13]]).expand(len(ids), 2)], dim=1)).logits

    assert found.value == pytest.approx(all_masks(given, 60, PROMPT, [8, 4]), rel=1e-4)
    seen.clear()
    likelihood(llada, PROMPT, [8, 4], exact=True, hooks=[SinkToken(token=12), read])
    assert seen[0][:, :4].unique(dim=0).tolist() == [[12, *PROMPT]]
    with pytest.raises(sinklens.errors.PromptError, match=r"has 64 positions, and a pass would need 65"):
        likelihood(llada, [5] * 60, [8] * 4, hooks=SinkToken(token=12))


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (MaskSinks(top_k=1), r"MaskKeys acts on the sinks of the previous step or of another run, and a"),
        (
            MaskSinks(top_k=None, where=EpsilonOverMean()),
            r"pass same_step=True for the keys of the pass itself, where=",
        ),
        (AblateHeads(where=Where(top_k=1)), r"Ablate acts on the sinks of the previous step"),
        (AblateHeads(where="prompt" & ~Where(top_k=1), layers=[0]), r"Ablate acts on the sinks of the previous"),
        (HoldSinks(at=0), r"Hold repeats attention of an earlier step"),
        (FreezePattern(at=0), r"Hold repeats attention of an earlier step"),
        (AblateHeads(steps=[3], layers=[0], heads=[0]), r"step 3 does not exist; there are 1, 0 to 0"),
        (ForceTokens(tokens={4: 9}), r"an intervention changed answer tokens of a likelihood"),
        ([("denoise.hook_confidence", lambda value, hook: None)], r"a hook function at 'denoise.hook_confidence' acts"),
        (
            [("blocks.0.attn.hook_z", lambda value, hook: value[:, :1])],
            r"hook_z \(step 0\) is \[15, 1, 6, 4\], but",
        ),
        ([("denoise.hook_logits", lambda value: None)], r"hooks= must be a list of \(name or predicate, function\)"),
    ],
)
def test_what_a_pass_does_not_have_is_refused(llada, hooks, message):
    with pytest.raises(SinklensError, match=message):
        likelihood(llada, PROMPT, ANSWER, hooks=hooks)
    assert not any(point.fwd_hooks for point in llada.tree.hook_dict.values())
    assert llada.tree.watch.forward_pass.step is None
