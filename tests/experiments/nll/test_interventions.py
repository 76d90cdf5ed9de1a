"""Interventions in a likelihood are masks of the same pass; what needs an earlier step or a decision is refused."""

import numpy as np
import pytest
import torch
from building import plain_pass, random_model
from likelihood_oracle import LladaScript, all_masks

import sinklens
from sinklens.errors import HookFunctionError, HookNameError, SettingError
from sinklens.experiments import likelihood, likelihood_difference
from sinklens.experiments.nll.draws import generator_of
from sinklens.interventions import (
    AblateHeads,
    ForceTokens,
    FreezePattern,
    HideKeys,
    HoldSinks,
    KeepKeys,
    MaskSinks,
    SinkToken,
    Suffix,
    Where,
    WindowAttention,
)  # fmt: skip
from sinklens.sinks import EpsilonOverMean

PROMPT, ANSWER = [5, 9, 3], [7, 11, 2, 8]
TEXT, WORKED = "Question: 12 + 7?\nAnswer:", " 12 + 7 = 19."


@pytest.fixture(scope="module")
def llada():
    return random_model()


def plain(model):
    """From ids to logits in plain torch."""
    return lambda ids: plain_pass(model, ids).logits


def hiding(keys):
    """An edit of ``hook_attn_mask`` that hides the keys [row, head, key]."""
    return lambda mask: mask.masked_fill(keys[:, :, None], -torch.inf)


def without_strongest(model, count):
    """From ids to logits, each head without the `count` keys that are strongest in the unmasked pass."""

    def logits(ids):
        values, edits = plain_pass(model, ids).values, {}
        for layer in range(model.cfg.n_layers):
            scores = values[f"blocks.{layer}.attn.hook_sink_scores"]
            keys = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, scores.topk(count).indices, True)
            edits[f"blocks.{layer}.attn.hook_attn_mask"] = hiding(keys)
        return plain_pass(model, ids, edits=edits).logits

    return logits


@pytest.mark.parametrize("count", [1, 3])
def test_masked_sinks_are_those_of_the_pass_itself(llada, count):
    found = likelihood(llada, PROMPT, ANSWER, exact=True, hooks=MaskSinks(top_k=count, same_step=True))
    wanted = all_masks(without_strongest(llada, count), llada.mask_token_id, PROMPT, ANSWER)
    assert found.value == pytest.approx(wanted, rel=1e-4)
    unmasked = likelihood(llada, PROMPT, ANSWER, exact=True).value
    assert abs(found.value - unmasked) > 0.01
    none = likelihood(llada, PROMPT, ANSWER, exact=True, hooks=MaskSinks(top_k=0, same_step=True))
    assert none.value == unmasked


def test_under_guidance_interventions_see_the_conditional_rows(llada):
    masked, plain_logits = without_strongest(llada, 1), plain(llada)

    def logits(ids):
        half = len(ids) // 2
        return torch.cat([masked(ids[:half]), plain_logits(ids[half:])])

    seed = generator_of(0, PROMPT, len(ANSWER), 0, 0).initial_seed()
    script = LladaScript(logits, llada.mask_token_id, 4, 4, 0.5)
    options = {"mc_num": 4, "batch": 4, "cfg_scale": 0.5}
    found = likelihood(llada, PROMPT, ANSWER, hooks=MaskSinks(top_k=1, same_step=True), **options)
    assert found.value == pytest.approx(script.get_loglikelihood(PROMPT, ANSWER, [seed]), rel=1e-4)


def masks_at(model, choose):
    """From ids to logits, every head without the keys that `choose(ids)` [row, key] marks."""

    def logits(ids):
        keys = choose(ids)[:, None].expand(-1, model.cfg.n_heads, -1)
        edits = {f"blocks.{layer}.attn.hook_attn_mask": hiding(keys) for layer in range(model.cfg.n_layers)}
        return plain_pass(model, ids, edits=edits).logits

    return logits


PLACES = {
    "position": (
        HideKeys(positions=[1, -1]),
        lambda ids, mask: torch.isin(torch.arange(ids.shape[1]), torch.tensor([1, 6])),
    ),
    "state": (MaskSinks(top_k=None, where="masked"), lambda ids, mask: ids == mask),
    "prompt": (MaskSinks(top_k=None, where="prompt"), lambda ids, mask: torch.arange(ids.shape[1]) < 3),
}


@pytest.mark.parametrize("name", PLACES)
def test_keys_are_masked_by_position_and_by_state(llada, name):
    hook, choose = PLACES[name]
    wanted = all_masks(
        masks_at(llada, lambda ids: choose(ids, llada.mask_token_id).expand_as(ids)),
        llada.mask_token_id,
        PROMPT,
        ANSWER,
    )
    assert likelihood(llada, PROMPT, ANSWER, exact=True, hooks=hook).value == pytest.approx(wanted, rel=1e-4)


def test_keys_are_masked_by_kind_of_token(tiny_llada):
    ids = tiny_llada.encode(TEXT)[0][0].tolist()
    digits = [place for place, token in enumerate(ids) if tiny_llada.to_str_tokens([token])[0].strip().isdigit()]
    by_kind = likelihood(tiny_llada, ids, [260], hooks=MaskSinks(top_k=None, where="digit"))
    assert by_kind.value == pytest.approx(likelihood(tiny_llada, ids, [260], hooks=HideKeys(positions=digits)).value)
    assert by_kind.value != likelihood(tiny_llada, ids, [260]).value
    assert digits


def test_keys_are_masked_by_a_detector(llada):
    detector = EpsilonOverMean(epsilon=1.0)

    def logits(ids):
        values, edits = plain_pass(llada, ids).values, {}
        for layer in range(llada.cfg.n_layers):
            scores = values[f"blocks.{layer}.attn.hook_sink_scores"]
            length = scores.shape[-1]
            others = (scores.sum(-1, keepdim=True) - scores) / (length - 1)
            keys = scores > others + 1.0
            edits[f"blocks.{layer}.attn.hook_attn_mask"] = hiding(keys)
        return plain_pass(llada, ids, edits=edits).logits

    hooks = MaskSinks(top_k=None, detector=detector, same_step=True)
    found = likelihood(llada, PROMPT, ANSWER, exact=True, hooks=hooks).value
    by_place = MaskSinks(top_k=None, where=Where(detector=detector, same_step=True))
    assert likelihood(llada, PROMPT, ANSWER, exact=True, hooks=by_place).value == pytest.approx(found)
    assert found != pytest.approx(likelihood(llada, PROMPT, ANSWER, exact=True).value, rel=1e-4)


def test_a_run_is_a_plan_each_pass_takes_its_step_with_as_many_masked_tokens(llada):
    other = [4, 9, 3, 6]  # makes the run pad the prompt
    run = sinklens.generate(llada, [PROMPT, other], gen_length=5, steps=5, block_length=5)
    assert run.sinks is not None
    scores = run.sinks.data["score"].to_numpy()[0, :, :, :, 1:8]  # [step, layer, head, pos], without the padding
    undecided = (run.canvas[0, :-1, 4:8] == 60).sum(1).tolist()  # of the first four answer positions, by step

    def logits(ids):
        step = int(np.abs(np.array(undecided) - int((ids[0] == 60).sum())).argmin())
        edits = {}
        for layer in range(llada.cfg.n_layers):
            of_layer = torch.from_numpy(scores[step, layer])[None]
            keys = torch.zeros_like(of_layer, dtype=torch.bool).scatter(-1, of_layer.topk(1).indices, True)
            edits[f"blocks.{layer}.attn.hook_attn_mask"] = hiding(keys)
        return plain_pass(llada, ids, edits=edits).logits

    wanted = all_masks(logits, 60, PROMPT, ANSWER)
    hooks = MaskSinks(top_k=1, same_step=True, source=run)
    assert likelihood(llada, PROMPT, ANSWER, exact=True, hooks=hooks).value == pytest.approx(wanted, rel=1e-4)
    by_place = MaskSinks(top_k=None, where=Where(top_k=1, same_step=True, source=run))
    assert likelihood(llada, PROMPT, ANSWER, exact=True, hooks=by_place).value == pytest.approx(wanted, rel=1e-4)
    likelihood(llada, PROMPT, ANSWER, exact=True, hooks=AblateHeads(where=run.sinks, layers=[0], heads=[0]))
    with pytest.raises(SettingError, match=r"MaskKeys acts on the sinks of the previous step.*source= with same_step"):
        likelihood(llada, PROMPT, ANSWER, hooks=MaskSinks(top_k=1, source=run))
    with pytest.raises(SettingError, match=r"source has no run of the prompt of row 0; record one with the prompts"):
        likelihood(llada, [1, 2], ANSWER, hooks=hooks)
    with pytest.raises(SettingError, match=r"at least 6 answer positions, as the answer has tokens; it has 5"):
        likelihood(llada, PROMPT, [*ANSWER, 1, 2], hooks=hooks)


@pytest.mark.parametrize("pick", ["random", "same_mass", "nearest", "permuted", "weakest", "random_any"])
def test_controls_do_not_depend_on_the_batch_and_share_the_masks(llada, pick):
    hooks = MaskSinks(top_k=1, pick=pick, same_step=True)
    first, second = (likelihood(llada, PROMPT, ANSWER, mc_num=32, hooks=hooks, rows=rows) for rows in (None, 3))
    np.testing.assert_allclose(first.losses, second.losses, rtol=1e-4)
    treated = likelihood(llada, PROMPT, ANSWER, mc_num=32, hooks=MaskSinks(top_k=1, same_step=True))
    assert likelihood_difference(first, treated).n == 1
    assert abs(first.value - treated.value) > 1e-3


def test_shared_draws_narrow_the_interval_of_a_difference(llada):
    """The narrowing that a difference reports is that of repeated estimates."""
    hooks, options = AblateHeads(layers=[1], heads=[2]), {"mc_num": 32, "batch": 8}
    base = [likelihood(llada, PROMPT, ANSWER, seed=seed, **options) for seed in range(80)]
    changed = [likelihood(llada, PROMPT, ANSWER, seed=seed, hooks=hooks, **options) for seed in range(40)]
    gaps = np.array([two.value - one.value for one, two in zip(base, changed, strict=False)])
    apart = np.array([two.value - one.value for one, two in zip(base[40:], changed, strict=True)])
    reported = [likelihood_difference(one, two) for one, two in zip(base, changed, strict=False)]
    shared, independent = (
        np.sqrt(np.mean([getattr(one, name) ** 2 for one in reported])) for name in ("standard_error", "independent")
    )
    assert shared == pytest.approx(gaps.std(ddof=1), rel=0.3)
    assert independent == pytest.approx(apart.std(ddof=1), rel=0.3)
    assert shared < 0.6 * independent


def test_other_interventions_change_a_pass_as_they_change_a_step(llada):
    """The oracle: the first step of a run over the same, completely masked answer."""
    for hook in (
        AblateHeads(layers=[1], heads=[2]), WindowAttention(width=1), KeepKeys(top_k=2, same_step=True),
        ("blocks.1.attn.hook_z", lambda value, hook: value * 0.5),
    ):  # fmt: skip
        seen = []
        read = ("denoise.hook_logits", lambda value, hook, seen=seen: seen.append(value[0, 3:].log_softmax(-1)))
        sinklens.generate(llada, [PROMPT], gen_length=4, steps=4, block_length=4, hooks=[hook, read])
        found = likelihood(llada, PROMPT, ANSWER, exact=True, hooks=[hook])
        np.testing.assert_allclose(found.losses[-1], -seen[0][range(4), ANSWER], rtol=1e-4)


def test_a_hook_function_keeps_the_shape(llada):
    with pytest.raises(
        HookFunctionError, match=r"hook function <lambda> at blocks.0.attn.hook_z \(step 0\) got a value of shape"
    ):
        likelihood(llada, PROMPT, ANSWER, hooks=[("blocks.0.attn.hook_z", lambda value, hook: value[:, :1])])


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
    with pytest.raises(sinklens.errors.PromptError, match=r"a pass would need 65 positions; .* has 64"):
        likelihood(llada, [5] * 60, [8] * 4, hooks=SinkToken(token=12))


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (MaskSinks(top_k=1), r"MaskKeys acts on the sinks of the previous step, and a likelihood is one pass without"),
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
        ([("denoise.hook_logits", lambda value: None)], r"hooks= must be a list of \(name or predicate, function\)"),
    ],
)
def test_what_a_pass_does_not_have_is_refused(llada, hooks, message):
    error = HookNameError if "must be a list" in message else SettingError
    with pytest.raises(error, match=message):
        likelihood(llada, PROMPT, ANSWER, hooks=hooks)
    assert not any(point.fwd_hooks for point in llada.tree.hook_dict.values())
    assert llada.tree.watch.forward_pass.step is None
