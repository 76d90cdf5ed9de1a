"""Comparing two modes of the same weights equals passes made one by one, position by position."""

import numpy as np
import pytest
import torch
from stored.runs import open_folder

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import commits_compared, compare, effect, logit_lens, mode_patching, modes_compared, sweep
from sinklens.interventions import AblateHeads, MaskedLogits

SETTINGS = {"mode": "diffusion", "gen_length": 16, "block_length": 8, "threshold": 0.7}


@pytest.fixture(scope="module")
def reference(conformance):
    return open_folder(conformance / "nemotron-diffusion")


@pytest.fixture(scope="module")
def model(reference):
    return reference.load(changes={})


@pytest.fixture(scope="module")
def prompts(reference):
    return reference.tensors["gen6.prompt"]


@pytest.fixture(scope="module")
def run(model, prompts):
    return sinklens.generate(model, prompts, **SETTINGS)


@torch.no_grad()
def test_predictions_at_equal_information_are_those_of_single_passes(model, run):
    found, text = modes_compared(run), run.tokens
    for place in range(12, 28, 3):
        start = 12 if place < 20 else 20
        masked = text[:, : start + 8].clone()
        masked[:, place:] = 100
        p = model.tree(text[:, :place], mode="causal")[:, -1].double().softmax(-1)
        q = model.tree(masked, mode="denoise", block_start=start)[:, place].double().softmax(-1)
        here, tokens = found.sel(pos=place), text[:, place, None]
        for name, values in {
            "logprob_causal": p.gather(1, tokens)[:, 0].log(), "logprob_denoise": q.gather(1, tokens)[:, 0].log(),
            "kl": (p * (p / q).log()).sum(-1), "top1_agreement": (p.argmax(-1) == q.argmax(-1)).double(),
        }.items():  # fmt: skip
            np.testing.assert_allclose(here[name], values, atol=2e-5, err_msg=name)


@torch.no_grad()
def test_attention_at_equal_tokens_is_that_of_single_passes(model, run):
    found, text = modes_compared(run), run.tokens
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(3)]
    _, causal = model.tree.run_with_cache(text, names_filter=names, mode="causal")
    for block, start in enumerate((12, 20)):
        given = {"mode": "denoise", "block_start": start}
        _, denoise = model.tree.run_with_cache(text[:, : start + 8], names_filter=names, **given)
        for layer, name in enumerate(names):
            here = found.sel(layer=layer)
            a, b = (kept[name][:, :, start : start + 8, : start + 8] for kept in (causal, denoise))
            distances = here["attention_distance"].sel(pos=slice(start, start + 7)).transpose("batch", "head", "pos")
            np.testing.assert_allclose(distances, (a - b).abs().sum(-1) / 2, atol=2e-5)
            here = here.isel(block=block).transpose("batch", "head", ...)
            np.testing.assert_allclose(here["score_causal"][..., : start + 8], a.sum(2), atol=2e-5)
            assert (here["strongest_causal"].to_numpy() == a.sum(2).argmax(-1).numpy()).all()
            assert (here["strongest_denoise"].to_numpy() == b.sum(2).argmax(-1).numpy()).all()


def test_positions_after_an_undecided_one_are_not_compared(reference):
    model = reference.load(changes={"eos_token_id": 197})
    ended = sinklens.generate(model, reference.tensors["gen1.prompt"], mode="autoregressive", gen_length=24)
    found, length = modes_compared(ended, block_length=8), ended.answers[0].tokens + 1
    assert length < 24
    for values in (found["kl"][0], found["attention_distance"][0, 0, 0]):
        assert values.notnull().values.tolist() == [True] * length + [False] * (24 - length)


def test_hooks_on_the_model_act_in_the_passes_of_both_modes(model, run):
    plain = modes_compared(run)
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", lambda value, hook: value * 0)]):
        changed = modes_compared(run)
    assert (plain["logprob_causal"] != changed["logprob_causal"]).all()
    assert (plain["logprob_denoise"] != changed["logprob_denoise"]).all()


@pytest.mark.parametrize("use_cache", [False, True])
def test_commits_are_compared_with_the_denoise_steps_of_their_block(model, prompts, use_cache):
    run = sinklens.generate(model, prompts, **SETTINGS, use_cache=use_cache)
    found, top, commit = commits_compared(run), run.sinks.scores().fillna(-1).argmax("pos").to_numpy(), -1
    for block in range(2):
        before, commit = commit, run.modes.index("commit", commit + 1)
        steps = [step for step in range(before + 1, commit) if run.modes[step] == "denoise"]
        here, filling, last = found.isel(block=block), top[:, steps], top[:, commit]
        assert int(here["denoise_steps"]) == len(steps)
        assert (here["strongest_commit"].to_numpy() == last).all()
        np.testing.assert_allclose(here["same_strongest"], (filling == last[:, None]).mean(1))
        assert (here["moves"].to_numpy() == (filling[:, 1:] != filling[:, :-1]).sum(1)).all()


@pytest.mark.parametrize(("source", "into"), [("causal", "denoise"), ("denoise", "commit")])
@torch.no_grad()
def test_mode_patching_replaces_one_head_at_the_blocks_positions(model, reference, source, into):
    ids, start, name = reference.tensors["input_ids"], 18, "blocks.2.attn.hook_z"
    found = mode_patching(model, ids, start, source=source, into=into, layers=[1, 2], heads=[0, 3])
    given = {mode: {"mode": mode} | ({"block_start": start} if mode == "denoise" else {}) for mode in (source, into)}
    cache = model.tree.run_with_cache(ids, names_filter=name, **given[source])[1]

    def patch(value, hook):
        value[:, start:, 3] = cache[name][:, start:, 3]
        return value

    p = model.tree(ids, **given[into]).double().softmax(-1)[:, start:]
    q = model.tree.run_with_hooks(ids, fwd_hooks=[(name, patch)], **given[into]).double().softmax(-1)[:, start:]
    here, expected = found.sel(layer=2, head=3), (p * (p / q).log()).sum(-1)
    assert float(expected.max()) > 1e-3
    np.testing.assert_allclose(here["kl"], expected, atol=2e-5)
    assert (here["top1_agreement"].to_numpy() == (p.argmax(-1) == q.argmax(-1)).numpy()).all()
    alone = mode_patching(model, ids, 25, source="causal", into="denoise")
    assert float(alone["kl"].max()) < 1e-9  # a block of one position sees the same keys in both modes
    assert alone.sizes == {"batch": 2, "layer": 3, "head": 4, "pos": 1}


def test_effect_of_two_modes_decodes_in_both_and_compares_at_equal_text(model, prompts, run):
    given = {name: value for name, value in SETTINGS.items() if name != "mode"}
    found = effect(model, prompts, modes=("diffusion", "autoregressive"), **given)
    assert torch.equal(found.base.canvas, run.canvas)
    assert set(found.free.modes) == {"causal"}
    assert found.under_replay.identical(modes_compared(run))
    apart = found.base.tokens[:, 12:28] != found.free.tokens[:, 12:28]
    parted = torch.where(apart.any(1), 12 + apart.long().argmax(1), -1)
    assert found.free_running["first_divergent_position"].to_numpy().tolist() == parted.tolist()
    assert int(parted.max()) > 12
    assert "first_divergent_step" not in found.free_running
    same = effect(model, prompts[:1], modes=("autoregressive", "speculation"), gen_length=13, block_length=4)
    assert int(same.free_running["first_divergent_position"][0]) == -1  # speculation never parts from it
    assert bool(same.free_running["same_answer"][0])
    assert float(same.free_running["changed_share"][0]) == 0


def test_effects_and_sweeps_of_an_intervention_compare_the_masked_positions_of_each_block(model, prompts):
    ablation, kept = AblateHeads(layers=[0], heads=[1]), {}
    found, runs = effect(model, prompts, ablation, **SETTINGS), []
    keep = ("denoise.hook_logits", lambda value, hook: kept.update({hook.step: value.double().softmax(-1)}))
    for hooks in ([keep], [ablation, keep]):
        sinklens.generate(model, prompts, hooks=hooks, replay=found.base, **SETTINGS)
        runs.append(kept.copy())
    for step, mode in enumerate(found.base.modes):
        kl = found.under_replay["kl"].isel(step=step).values
        if mode != "denoise":
            assert np.isnan(kl).all()
            continue
        block = found.base.step_blocks[step]
        for row in range(2):
            masked = found.base.undecided[row, step, block.start : block.stop]
            if masked.any():
                p, q = (one[step][row][masked] for one in runs)
                assert float(kl[row]) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), abs=1e-4)
    swept = sweep(model, prompts, {"head": ablation, "again": ablation}, replay=True, **SETTINGS)["kl"]
    for name in ("head", "again"):
        one = swept.sel(intervention=name).transpose("prompt", "step")
        np.testing.assert_allclose(one, found.under_replay["kl"], atol=2e-5)


def test_what_has_one_mode_or_no_steps_in_common_is_refused(model, prompts, run, worded):
    logits = MaskedLogits()
    other = sinklens.generate(model, prompts, mode="autoregressive", gen_length=16, hooks=[logits])
    shorter = sinklens.generate(model, prompts, mode="autoregressive", gen_length=8)
    plain = sinklens.generate(worded(), "w1 w2", gen_length=4, steps=4)
    for call, match in [
        (lambda: modes_compared(plain), "has one attention for all passes"),
        (lambda: commits_compared(other), "whose blocks are committed"),
        (lambda: mode_patching(model, prompts, 4, source="causal", into="commit"), "either order; got 'causal' and"),
        (lambda: effect(model, prompts, modes=("diffusion", "diffusion"), gen_length=8), "two different modes"),
        (lambda: compare(run, other, logits.kept, logits.kept), "a step of one is no step of the other"),
        (lambda: compare(run, shorter), r"gen_length; got \[2, 16\] and \[2, 8\]"),
        (lambda: logit_lens(model, run), "one rule for all steps"),
        (lambda: model.likelihood(prompts[0], prompts[0]), "one likelihood for each of its modes"),
    ]:  # fmt: skip
        with pytest.raises(SettingError, match=match):
            call()
