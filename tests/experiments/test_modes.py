"""Comparing two modes of the same weights equals passes made one by one, position by position."""

import itertools
import math

import pytest
import torch
from stored.runs import open_folder

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import commits_compared, compare, effect, mode_patching, modes_compared, sweep
from sinklens.interventions import AblateHeads, MaskedLogits

CLOSE = {"rtol": 0, "atol": 2e-5}


@pytest.fixture(scope="module")
def reference(conformance):
    return open_folder(conformance / "nemotron-diffusion")


@pytest.fixture(scope="module")
def load(reference):
    return lambda changes=(): reference.load(changes=dict(changes))


@pytest.fixture(scope="module")
def model(load):
    return load()


@pytest.fixture(scope="module")
def prompts(reference):
    return reference.tensors["gen6.prompt"]


@pytest.fixture(scope="module")
def run(model, prompts):
    return sinklens.generate(model, prompts, mode="diffusion", gen_length=16, block_length=8, threshold=0.7)


def distribution(model, ids, place, **mode):
    with torch.no_grad():
        return model.tree(ids, **mode)[:, place].double().softmax(-1)


def test_predictions_at_equal_information_are_those_of_single_passes(model, run):
    found, text = modes_compared(run), run.tokens
    for place in range(12, 28):
        start = 12 if place < 20 else 20
        masked = text[:, : start + 8].clone()
        masked[:, place:] = 100
        causal = distribution(model, text[:, :place], -1, mode="causal")
        denoise = distribution(model, masked, place, mode="denoise", block_start=start)
        for row in range(2):
            here = found.sel(pos=place, batch=row)
            p, q = causal[row], denoise[row]
            token = int(text[row, place])
            assert float(here["logprob_causal"]) == pytest.approx(math.log(p[token]), abs=2e-5)
            assert float(here["logprob_denoise"]) == pytest.approx(math.log(q[token]), abs=2e-5)
            assert float(here["kl"]) == pytest.approx(float((p * (p / q).log()).sum()), abs=2e-5)
            assert bool(here["top1_agreement"]) == (int(p.argmax()) == int(q.argmax()))


def test_attention_at_equal_tokens_is_that_of_single_passes(model, run):
    found, text = modes_compared(run), run.tokens
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(3)]
    with torch.no_grad():
        _, causal = model.tree.run_with_cache(text, names_filter=names, mode="causal")
        for block, start in enumerate((12, 20)):
            _, denoise = model.tree.run_with_cache(
                text[:, : start + 8], names_filter=names, mode="denoise", block_start=start
            )
            for layer, name in enumerate(names):
                for head in range(4):
                    for row in range(2):
                        here = found.sel(batch=row, layer=layer, head=head)
                        a, b = causal[name][row, head], denoise[name][row, head]
                        for query in range(start, start + 8):
                            distance = sum(abs(float(a[query, key] - b[query, key])) for key in range(start + 8)) / 2
                            assert float(here["attention_distance"].sel(pos=query)) == pytest.approx(distance, abs=2e-5)
                        sums = a[start : start + 8].sum(0)
                        torch.testing.assert_close(torch.tensor(here["score_causal"][block].values), sums, **CLOSE)
                        assert int(here["strongest_causal"][block]) == int(sums.argmax())
                        assert int(here["strongest_denoise"][block]) == int(b[start : start + 8].sum(0).argmax())


def test_positions_after_an_undecided_one_are_not_compared(load, reference):
    model = load((("eos_token_id", 197),))
    ended = sinklens.generate(model, reference.tensors["gen1.prompt"], mode="autoregressive", gen_length=24)
    found = modes_compared(ended, block_length=8)
    length = ended.answers[0].tokens + 1
    assert length < 24
    assert found["kl"].notnull()[0].values.tolist() == [True] * length + [False] * (24 - length)
    assert found["attention_distance"].notnull()[0, 0, 0].values.tolist() == [True] * length + [False] * (24 - length)


def test_hooks_on_the_model_act_in_the_passes_of_both_modes(model, run):
    plain = modes_compared(run)
    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", lambda value, hook: value * 0)]):
        changed = modes_compared(run)
    assert (plain["logprob_causal"] != changed["logprob_causal"]).all()
    assert (plain["logprob_denoise"] != changed["logprob_denoise"]).all()


@pytest.mark.parametrize("use_cache", [False, True])
def test_commits_are_compared_with_the_denoise_steps_of_their_block(model, prompts, use_cache):
    run = sinklens.generate(
        model, prompts, mode="diffusion", gen_length=16, block_length=8, threshold=0.7, use_cache=use_cache
    )
    found, scores = commits_compared(run), run.sinks.scores().fillna(-1).values
    commit = -1
    for block in range(2):
        before, commit = commit, run.modes.index("commit", commit + 1)
        steps = [step for step in range(before + 1, commit) if run.modes[step] == "denoise"]
        assert int(found["denoise_steps"][block]) == len(steps)
        for row in range(2):
            for layer in range(3):
                for head in range(4):
                    top = [int(scores[row, step, layer, head].argmax()) for step in (*steps, commit)]
                    here = found.isel(batch=row, block=block, layer=layer, head=head)
                    assert int(here["strongest_commit"]) == top[-1]
                    assert float(here["same_strongest"]) == pytest.approx(top[:-1].count(top[-1]) / len(steps))
                    assert int(here["moves"]) == sum(a != b for a, b in itertools.pairwise(top[:-1]))


@pytest.mark.parametrize(("source", "into"), [("causal", "denoise"), ("denoise", "commit")])
def test_mode_patching_replaces_one_head_at_the_blocks_positions(model, reference, source, into):
    ids, start = reference.tensors["input_ids"], 18
    found = mode_patching(model, ids, start, source=source, into=into, layers=[1, 2], heads=[0, 3])
    given = {mode: {"mode": mode} | ({"block_start": start} if mode == "denoise" else {}) for mode in (source, into)}
    with torch.no_grad():
        _, cache = model.tree.run_with_cache(ids, names_filter="blocks.2.attn.hook_z", **given[source])
        plain = model.tree(ids, **given[into]).double().softmax(-1)

        def patch(value, hook):
            value[:, 18:, 3] = cache["blocks.2.attn.hook_z"][:, 18:, 3]
            return value

        patched = model.tree.run_with_hooks(ids, fwd_hooks=[("blocks.2.attn.hook_z", patch)], **given[into])
    q = patched.double().softmax(-1)
    expected = (plain * (plain / q).log()).sum(-1)
    assert float(expected[:, 18:].max()) > 1e-3
    torch.testing.assert_close(torch.tensor(found["kl"].sel(layer=2, head=3).values), expected[:, 18:], **CLOSE)
    same = plain.argmax(-1) == q.argmax(-1)
    assert found["top1_agreement"].sel(layer=2, head=3).values.tolist() == same[:, 18:].double().tolist()


def test_patching_every_head_of_a_layer_from_its_own_mode_changes_nothing(model, reference):
    found = mode_patching(model, reference.tensors["input_ids"], 25, source="causal", into="denoise")
    assert float(found["kl"].max()) < 1e-9  # a block of one position sees the same keys in both modes
    assert found.sizes == {"batch": 2, "layer": 3, "head": 4, "pos": 1}


def test_effect_of_two_modes_decodes_in_both_and_compares_at_equal_text(model, prompts, run):
    settings = {"gen_length": 16, "block_length": 8, "threshold": 0.7}
    found = effect(model, prompts, modes=("diffusion", "autoregressive"), **settings)
    assert torch.equal(found.base.canvas, run.canvas)
    assert set(found.free.modes) == {"causal"}
    assert found.under_replay.identical(modes_compared(run))
    for row in range(2):
        tokens = [one.tokens[row, 12:28].tolist() for one in (found.base, found.free)]
        parted = next((12 + at for at, (a, b) in enumerate(zip(*tokens, strict=True)) if a != b), -1)
        assert int(found.free_running["first_divergent_position"][row]) == parted
    assert int(found.free_running["first_divergent_position"].max()) > 12
    assert "first_divergent_step" not in found.free_running


def test_a_sweep_under_replay_compares_each_block_as_effect_does(model, prompts):
    settings = {"mode": "diffusion", "gen_length": 16, "block_length": 8, "threshold": 0.7}
    ablation = AblateHeads(layers=[1], heads=[0])
    found = sweep(model, prompts, {"head": ablation, "again": ablation}, replay=True, **settings)["kl"]
    wanted = torch.from_numpy(effect(model, prompts, ablation, **settings).under_replay["kl"].values)
    for name in ("head", "again"):
        one = torch.from_numpy(found.sel(intervention=name).transpose("prompt", "step").values)
        torch.testing.assert_close(one, wanted, equal_nan=True, **CLOSE)
    assert wanted.nan_to_num().max() > 1e-4


def test_speculation_never_parts_from_autoregressive_decoding(model, prompts):
    found = effect(model, prompts[:1], modes=("autoregressive", "speculation"), gen_length=13, block_length=4)
    assert int(found.free_running["first_divergent_position"][0]) == -1
    assert bool(found.free_running["same_answer"][0])
    assert float(found.free_running["changed_share"][0]) == 0


def test_effect_of_an_intervention_compares_the_masked_positions_of_each_block(model, prompts):
    settings = {"mode": "diffusion", "gen_length": 16, "block_length": 8, "threshold": 0.7}
    found = effect(model, prompts, AblateHeads(layers=[0], heads=[1]), **settings)
    kept: dict = {}
    keep = ("denoise.hook_logits", lambda value, hook: kept.update({hook.step: value.double().softmax(-1)}))
    sinklens.generate(model, prompts, hooks=[keep], **settings)
    base = kept.copy()
    sinklens.generate(model, prompts, hooks=[AblateHeads(layers=[0], heads=[1]), keep], replay=found.base, **settings)
    for step, mode in enumerate(found.base.modes):
        kl = found.under_replay["kl"].isel(step=step).values
        if mode != "denoise":
            assert torch.tensor(kl).isnan().all()
            continue
        block = found.base.step_blocks[step]
        for row in range(2):
            masked = found.base.undecided[row, step, block.start : block.stop]
            if masked.any():
                p, q = base[step][row][masked], kept[step][row][masked]
                assert float(kl[row]) == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), abs=1e-4)


def test_what_has_one_mode_or_no_steps_in_common_is_refused(model, prompts, run):
    plain = sinklens.generate("tiny-llada", "1+1=", gen_length=4, steps=4)
    with pytest.raises(SettingError, match="has one attention for all passes"):
        modes_compared(plain)
    with pytest.raises(SettingError, match="whose blocks are committed"):
        commits_compared(sinklens.generate(model, prompts, mode="autoregressive", gen_length=4))
    with pytest.raises(SettingError, match="in either order; got 'causal' and 'commit'"):
        mode_patching(model, prompts, 4, source="causal", into="commit")
    with pytest.raises(SettingError, match="two different modes"):
        effect(model, prompts, modes=("diffusion", "diffusion"), gen_length=8)
    logits = MaskedLogits()
    other = sinklens.generate(model, prompts, mode="autoregressive", gen_length=16, hooks=[logits])
    with pytest.raises(SettingError, match="a step of one is no step of the other"):
        compare(run, other, logits.kept, logits.kept)
    with pytest.raises(SettingError, match=r"gen_length; got \[2, 16\] and \[2, 8\]"):
        compare(run, sinklens.generate(model, prompts, mode="autoregressive", gen_length=8))
    with pytest.raises(SettingError, match="one rule for all steps"):
        sinklens.experiments.logit_lens(model, run)
    with pytest.raises(SettingError, match="one likelihood for each of its modes"):
        model.likelihood(prompts[0], prompts[0])
