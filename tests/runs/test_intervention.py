"""Every intervention treats rows independently, works with and without a cache, leaves no hooks and combines."""

import numpy as np
import pytest
import torch
from building import random_ids
from planted_saes import random_sae
from watching import LONG, PADDED, SHORT, Z, logits_of, same, short, watch

import sinklens
from sinklens.errors import HookNameError, SettingError
from sinklens.experiments import donors
from sinklens.features import SpliceSAE
from sinklens.interventions import (
    Ablate,
    AblateHeads,
    AblateValues,
    ForceTokens,
    FreezePattern,
    HideKeys,
    KeepKeys,
    MaskKeys,
    MaskSinks,
    PatchHooks,
    Remask,
    SinkToken,
    Steer,
    Where,
)
from sinklens.runs.intervention import place_mask, within
from sinklens.sinks import EpsilonOverMean, TopK

OUTPUTS = torch.sin(torch.arange(8 * 2 * 6 * 4.0)).view(8, 1, 2, 6, 4)
"""Values for `Z`, at two positions in each of eight steps."""

BOTH = {
    "mask sinks": MaskSinks(top_k=3),
    "mask the paper's": MaskSinks(top_k=None, detector=EpsilonOverMean(epsilon=0.7)),
    "mask at some places": MaskSinks(
        top_k=2, layers=[0, 2], heads=[0, 3], steps=[1, 3], positions=[0, 2, -1]
    ),
    "mask the prompt's": MaskSinks(top_k=2, only="prompt"),
    "mask random keys": MaskSinks(top_k=3, pick="random_any", seed=3),
    "mask the weakest": MaskSinks(top_k=3, pick="weakest", steps=[2]),
    "keep keys": KeepKeys(top_k=3, window=1),
    "keep keys at some places": KeepKeys(top_k=2, steps=[1, 2], heads=[1, 2], positions=[0, 1, 2, -3]),
    "window": MaskKeys(keep=True, window=2, positions=[0], queries="each"),
    "window at some places": MaskKeys(
        keep=True, window=0, layers=[1], heads=[2, 3], steps=[0, 2], positions=[3, -1, -3], queries="each"
    ),
    "ablate heads": AblateHeads(heads=[0, 3], layers=[0, 1]),
    "ablate heads at some places": AblateHeads(heads=[1, 2], steps=[1, 3], positions=[0, 3, -1, -3]),
    "the mean head": lambda reference: AblateHeads(by="mean", reference=reference, heads=[1], layers=[1]),
    "another's head": lambda reference: AblateHeads(by="resample", reference=reference, heads=[1], seed=2),
    "force tokens": ForceTokens(tokens={1: 41, -3: 42}, steps=[1, 3]),
    "sink token": SinkToken(token=9),
    "empty sink token": SinkToken(token=9, value="zero", layers=[0, 1]),
    "patch": PatchHooks(
        source={step: {Z: OUTPUTS[step]} for step in (0, 2)}, positions=[1, -6], source_positions=[0, 1]
    ),
    "replace values": AblateValues(top_k=2),
    "replace values of random keys": AblateValues(top_k=2, pick="random", persistent=True, by="zero"),
    "hide keys": HideKeys(positions=[0, 3], layers=[0, 2], heads=[1, -1]),
    "steer": Steer(torch.linspace(-1.0, 2.0, 24), 2.0, layers=[1], where="committed"),
    "dimensions": Ablate(point="hook_resid_pre", layers=[1], dims=[3, -4], by=0.1),
    "ablate at decided tokens": AblateHeads(where="committed", heads=[1]),
    "splice": SpliceSAE(random_sae(), "blocks.1.hook_resid_post", scope="committed", steps=[1, 2, 3]),
}  # fmt: skip
DIFFUSION = BOTH | {
    "mask masks": MaskSinks(top_k=3, only=["masked"]),
    "ablate at the strongest keys": AblateHeads(where=TopK(2), heads=[0, 3], steps=[1, 2, 3]),
    "ablate at random keys and states": AblateHeads(where=Where(top_k=2, pick="random") | "committed", heads=[1]),
    "ablate at masks": AblateHeads(where="masked", layers=[1]),
    "splice masks": SpliceSAE(random_sae(), Z, scope="masked", features=[2, 11, 30], error=True),
    "mask the same step's": MaskSinks(top_k=3, same_step=True),
    "the row's mean head": AblateHeads(by="mean", heads=[0, 5]),
    "freeze the pattern": FreezePattern(at=1, layers=[0, 1], positions=[0, 3, -4]),
    "mask again": Remask(positions=[-1, -4, -6], steps=[2]),
}


@pytest.fixture(scope="module")
def interventions(worded):
    """Returns an intervention by name, for a model."""
    kept = {}

    def make(model, name):
        found = DIFFUSION[name]
        if not callable(found):
            return found
        if model.name not in kept or kept[model.name][0] is not model:
            prompts = ["w20 w21 w22", "w30 w31 w32 w33 w34"]
            kept[model.name] = (
                model,
                donors(model, prompts, [f"blocks.{layer}.attn.hook_z" for layer in range(3)], gen_length=4),
            )
        return found(kept[model.name][1])

    return make


def changed(watched, base):
    """Whether an intervention had any effect."""
    return watched.run.canvas.shape != base.run.canvas.shape or not torch.equal(logits_of(watched), logits_of(base))


@pytest.fixture(scope="module")
def bases(worded):
    """The run without interventions, by kind of model."""
    return {
        (architecture, causal): watch(worded(architecture, causal), PADDED, [], ["hook_logits"])
        for architecture, causal in (("llama", False), ("dream", False), ("llama", True))
    }


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("architecture", "causal", "name"),
    [*(("llama", False, name) for name in DIFFUSION), *(("llama", True, name) for name in BOTH)]
    + [
        ("dream", False, name)
        for name in (
            "mask sinks",
            "mask random keys",
            "window",
            "patch",
            "replace values",
            "splice masks",
        )
    ],
)
def test_a_prompts_result_does_not_depend_on_its_batch_or_padding(
    model, interventions, bases, architecture, causal, name
):
    intervention = interventions(model, name)
    together = watch(model, PADDED, [intervention], ["hook_logits"])
    assert changed(together, bases[architecture, causal])
    alone = watch(model, [SHORT], [intervention], ["hook_logits"])
    length, steps = alone.run.canvas.shape[2], min(alone.run.steps_run, together.run.steps_run)
    assert steps > 2
    assert torch.equal(together.run.canvas[0, : steps + 1, -length:], alone.run.canvas[0, : steps + 1])
    expected = logits_of(alone)[0, :steps, -8:]  # of the answer; Dream shifts logits of padding to a row's first token
    torch.testing.assert_close(logits_of(together)[0, :steps, -expected.shape[1] :], expected, atol=2e-4, rtol=0)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", BOTH)
def test_an_autoregressive_run_is_the_same_with_and_without_a_key_value_cache(worded, interventions, bases, name):
    model = worded("llama", True)
    runs = [
        watch(model, PADDED, [interventions(model, name)], ["hook_logits"], use_cache=cached)
        for cached in (True, False)
    ]
    assert torch.equal(runs[0].run.canvas, runs[1].run.canvas)
    torch.testing.assert_close(logits_of(runs[0]), logits_of(runs[1]), atol=2e-4, rtol=0)
    assert changed(runs[0], bases["llama", True])


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", DIFFUSION)
def test_finished_and_failed_runs_leave_model_and_intervention_unchanged(model, interventions, name):
    intervention, ids = interventions(model, name), random_ids()
    before = model(ids)

    def fail(value, hook):
        if hook.step == 2:
            raise ZeroDivisionError("from a hook")

    first = watch(model, PADDED, [intervention], ["hook_logits"])
    with pytest.raises(ZeroDivisionError, match="from a hook"):
        watch(model, PADDED, [intervention, ("blocks.2.hook_mlp_out", fail)])
    assert torch.equal(model(ids), before)
    assert same(watch(model, PADDED, [intervention], ["hook_logits"]), first)


# --- the same edit in three ways ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [
    "window", "ablate heads", "the row's mean head", "patch", "hide keys", "dimensions",
])  # fmt: skip
def test_a_single_pass_with_hooks_for_equals_the_first_step_of_a_run(model, interventions, name):
    intervention = interventions(model, name)
    watched = watch(model, [LONG], [intervention], ["hook_logits"])
    single = model.run_with_hooks(watched.run.canvas[:, 0], fwd_hooks=intervention.hooks_for(model))
    torch.testing.assert_close(single, watched.values[0]["denoise.hook_logits"], atol=1e-5, rtol=0)
    assert (single - model(watched.run.canvas[:, 0])).abs().max() > 0.01


def test_a_block_sees_and_edits_values_after_interventions(worded):
    """Hooks run inside a point, the block after it."""
    model, hooks = worded(), [MaskKeys(keep=True, window=1, positions=[0])]
    with sinklens.trace(model, LONG, hooks=hooks, **short(model, {})) as t:
        for _ in t.steps:
            mask = t["blocks.1.attn.hook_attn_mask"]
            assert (mask[0, 0, 0, 2:] == -torch.inf).all()
            mask[:, :, 0, 5] = 0
            pattern = t["blocks.1.attn.hook_pattern"]
    assert (pattern[0, :, 0, 5] > 0).all()
    assert (pattern[0, :, 0, 6:] == 0).all()


# --- together ----------------------------------------------------------------------------------------------------


def test_interventions_and_plain_pairs_at_different_points_combine_in_any_order(worded):
    model, seen = worded(), []

    def halve(value, hook):
        seen.append(hook.step)
        return value / 2

    listed = [
        MaskSinks(top_k=2),
        ("blocks.1.hook_mlp_out", halve),
        AblateHeads(heads=[2], layers=[0]),
        MaskKeys(keep=True, window=6, positions=[0]),
    ]
    runs = [watch(model, PADDED, order, ["hook_logits", "hook_pattern"]) for order in (listed, listed[::-1])]
    assert torch.equal(logits_of(runs[0]), logits_of(runs[1]))
    assert seen == [0, 1, 2, 3] * 2
    pattern = runs[0].stacked("hook_pattern", 2)[:, 1]
    far = ((torch.arange(15)[:, None] - torch.arange(15)).abs() > 6) & (torch.arange(15) > 3)
    assert (pattern[..., far] == 0).all()
    assert ((pattern == 0).all(dim=2).sum(dim=-1) >= 2).all()
    for left_out in range(4):
        fewer = watch(model, PADDED, listed[:left_out] + listed[left_out + 1 :], ["hook_logits"])
        assert not torch.equal(logits_of(fewer), logits_of(runs[0]))


@pytest.mark.parametrize(
    ("hooks", "shown"),
    [
        ([MaskSinks], "<function MaskSinks at"),
        ([("hook_embed",)], r"\('hook_embed',\)"),
        ("no", "'no'"),
        (5, "5"),
        (None, "None"),
        ({"hook_embed": print}, r"\{'hook_embed'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_an_entry_that_is_neither_intervention_nor_pair_is_rejected_and_shown(worded, hooks, shown):
    with pytest.raises(HookNameError, match=rf"hooks= must be a list of .*pairs and interventions, .*; got {shown}"):
        sinklens.generate(worded(), LONG, hooks=hooks, gen_length=8)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", [
    "mask sinks", "ablate heads", "patch", "freeze the pattern", "window", "keep keys",
    "sink token", "replace values", "ablate at the strongest keys", "ablate at masks", "steer", "splice",
])  # fmt: skip
def test_under_guidance_only_conditional_rows_are_changed(worded, interventions, name):
    """On one canvas, the unconditional rows of a step equal those of the run without the intervention."""
    model, intervention, seen = worded(), interventions(worded(), name), []
    point = model.tree.blocks[-1].hook_resid_post
    handle = point.register_forward_hook(lambda *given: seen.append(given[-1].clone()), with_kwargs=True)
    try:
        run = watch(model, [LONG], [intervention], [], cfg_scale=1.0).run
        steps = len(seen)
        if isinstance(intervention, SinkToken):  # a plain run over the same ids
            watch(model, run.canvas[:, 0, : run.prompt_length], [], [], cfg_scale=1.0, replay=run)
        else:
            watch(model, [LONG], [], [], cfg_scale=1.0, replay=run)
    finally:
        handle.remove()
    for changed_values, base in zip(seen[:steps], seen[steps:], strict=True):
        torch.testing.assert_close(changed_values[1], base[1], atol=1e-4, rtol=0)
    assert max((seen[step][0] - seen[steps + step][0]).abs().max() for step in range(steps)) > 0.01


# --- positions and steps -----------------------------------------------------------------------------------------


def test_positions_count_from_each_rows_first_token_or_from_the_end():
    real = torch.tensor([[False, False, True, True, True], [True] * 5])
    assert place_mask([0, -1], real).int().tolist() == [[0, 0, 1, 0, 1], [1, 0, 0, 0, 1]]
    assert place_mask([3, -4], real).int().tolist() == [[0, 0, 0, 0, 0], [0, 1, 0, 1, 0]]
    assert place_mask([], real).sum() == 0
    assert place_mask(None, real).all()
    with pytest.raises(SettingError, match=r"position 5 does not exist; there are 5, 0 to 4 \(or -5 to -1\)"):
        place_mask([5], real)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("chosen", [torch.tensor([3, 1, -3]), np.array([1, 3]), range(1, 5, 2), [torch.tensor(1), 3]])
def test_arrays_and_tensors_of_integers_are_accepted_as_lists(chosen):
    assert within("step", chosen, 5) == ([1, 2, 3] if len(chosen) == 3 else [1, 3])
    real = torch.ones(1, 5, dtype=torch.bool)
    assert place_mask(chosen, real).nonzero()[:, 1].tolist() == within("position", chosen, 5)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (2, r"steps must be a list of integers, .*; got 2"),
        ({1: 5}, r"steps must be a list of integers, .*; got \{1: 5\}"),
        ([1, 2.5], r"steps must be a list of integers, .*; got \[1, 2.5\]"),
        (torch.tensor([1.0, 2.0]), r"steps must be a list of integers, .*; got tensor\(\[1., 2.\]\)"),
        ("12", "steps must be a list of integers, .*; got '12'"),
        (torch.tensor(3), r"steps must be a list of integers, .*; got tensor\(3\)"),
        ([True, False], r"steps must be a list of integers, .*; got \[True, False\]"),
        (torch.tensor([True, False]), r"got tensor\(\[ True, False\]\)"),
        ((step for step in (1, 2)), r"got <generator"),
    ],
)
def test_anything_but_a_list_of_integers_is_rejected(chosen, text):
    with pytest.raises(SettingError, match=text):
        within("step", chosen, 5)
