"""The study of modes: one edit per comparison, the same queries and keys, hidden keys, shuffled heads; plants."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import sinklens
from sinklens.analyses import find
from sinklens.analyses.modes import (
    EDITS,
    MATCHING,
    BlockText,
    Modes,
    Pair,
    canvases,
    costs,
    heads,
    log_probabilities,
    motion,
    moves,
    patterns,
    predicting,
    similarity,
)
from sinklens.analyses.runs import noise_of
from sinklens.errors import SettingError
from sinklens.tasks import held_out
from training import RECIPES, write_untrained

PROMPTS = [problem.prompt for problem in held_out(2)]
SIZES = {"problems": 200, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_mlp": 24, "block_length": 4}
MASK = 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    recipe = replace(RECIPES["tiny-two-modes"], **SIZES)
    return sinklens.load(write_untrained(recipe, tmp_path_factory.mktemp("two") / "two-modes"))


@pytest.fixture(scope="module")
def text(model):
    return BlockText.of(sinklens.generate(model, PROMPTS[0], gen_length=8, threshold=0.9))


@pytest.fixture(scope="module")
def measured(model):
    return Modes(settings={"gen_length": 8}).run(model, PROMPTS)


def planted_keys(plan, modes):
    """Hooks that give nearly all attention of each row to its key in `plan`, in passes of these modes."""

    def plant(value, hook):
        if hook.forward_pass.mode in modes and len(value) == len(plan):
            for row, key in enumerate(plan):
                value[row, :, :, key] = 50.0
        return value

    return [(f"blocks.{layer}.attn.hook_attn_scores", plant) for layer in range(2)]


def test_the_text_is_cut_into_the_complete_blocks_after_the_prompt(model, text):
    start = model.encode(PROMPTS[0])[0].shape[1]
    assert text.blocks == (range(start, start + 4), range(start + 4, start + 8))
    assert text.ids[:start].tolist() == model.encode(PROMPTS[0])[0][0].tolist()
    assert MASK not in text.ids
    ended = sinklens.generate(model, PROMPTS[0], gen_length=8)
    undecided = ended.undecided.clone()
    undecided[0, -1, start + 5 :] = True
    assert BlockText.of(replace(ended, undecided=undecided)).blocks == (range(start, start + 4),)


def test_every_pair_differs_in_one_token(model, text):
    block = text.blocks[1]
    rows, pairs = canvases(text, block, MASK, noise_of(text.ids, 0))
    for pair in pairs:
        assert (rows[pair.before] != rows[pair.after]).nonzero().tolist() == [[pair.position]]
        (masks,) = {int((rows[pair.after] == MASK).sum()) for _ in [0]}
        assert (pair.edit == "fill") or masks == 0
    assert [pair.edit for pair in pairs] == ["fill"] * 4 + ["swap"] * 4
    assert rows[0].tolist() == [*text.ids[: block.start].tolist(), *[MASK] * 4]
    assert rows[4].equal(text.ids[: block.stop])
    order = [pair.position for pair in pairs[:4]]
    assert sorted(order) == list(block)
    assert text.decided[order].tolist() == sorted(text.decided[block.start : block.stop])


@pytest.mark.parametrize("matching", MATCHING)
def test_moves_equal_sums_written_out(matching):
    generator = torch.Generator().manual_seed(3)
    pattern = (torch.rand(2, 2, 3, 4, 10, generator=generator) * 4).exp()
    pattern[1] += 3 * torch.rand(2, 3, 4, 10, generator=generator)
    pair, first = Pair("swap", 0, 1, 8), 6
    changes, are_sinks, moved = moves(pattern, pair, first, matching, 2.0)
    queries = [6, 7, 8, 9] if matching == "all" else [8, 9]
    keys = range(9) if matching == "matched" else range(10)
    for layer in range(2):
        for head in range(3):
            one, other = (
                np.array([sum(float(pattern[row, layer, head, q - first, k]) for q in queries) for k in keys])
                for row in range(2)
            )
            assert bool(changes[layer, head]) == (one.argmax() != other.argmax())
            distance = abs(one / one.sum() - other / other.sum()).sum() / 2
            assert float(moved[layer, head]) == pytest.approx(distance, abs=1e-5)
            over = [
                sums.max() / sums.mean() - np.delete(sums, sums.argmax()).mean() / sums.mean() for sums in (one, other)
            ]
            assert bool(are_sinks[layer, head]) == (min(over) > 2.0)


@pytest.mark.parametrize("modes", [("causal", "denoise"), ("denoise",), ()])
def test_planted_motion_is_found_in_the_modes_that_have_it(model, text, modes):
    stop = text.blocks[0].stop
    one = BlockText(text.ids[:stop], text.blocks[:1], text.decided[:stop])
    _, pairs = canvases(one, one.blocks[0], MASK, noise_of(one.ids, 0))
    plan = np.random.default_rng(5).integers(one.blocks[0].start, size=9)
    still = np.full(9, 2)
    hooks = planted_keys(plan, modes) + planted_keys(still, {"causal", "denoise"} - set(modes))
    with model.hooks(fwd_hooks=hooks):
        found = motion(model, one, 3.0, 0)
    for mode in ("causal", "denoise"):
        for edit in EDITS:
            moved = np.mean([plan[pair.before] != plan[pair.after] for pair in pairs if pair.edit == edit])
            values = found.sel(mode=mode, edit=edit).to_array()
            np.testing.assert_allclose(values, moved if mode in modes else 0.0, atol=1e-4)


def test_hiding_keys_takes_them_from_the_block_alone(model, text):
    block = text.blocks[1]
    keys = torch.zeros(2, 2, block.start, dtype=torch.bool)
    keys[0, 1, 3] = keys[1, 0, 5] = True
    seen = {}

    def keep(value, hook):
        seen[hook.name] = value.clone()

    plain = [(f"blocks.{layer}.attn.hook_pattern", keep) for layer in range(2)]
    for mode, first in (("causal", block.start - 1), ("denoise", block.start)):
        with model.hooks(fwd_hooks=plain):
            log_probabilities(model, text, mode, block, keys)
        for layer, head, key in ((0, 1, 3), (1, 0, 5)):
            column = seen[f"blocks.{layer}.attn.hook_pattern"][:, :, :, key]
            assert (column[:, head, first:] == 0).all()
            assert (column[:, head, key:first] > 0).all()
            assert (column[:, 1 - head, key:] > 0).all()


def test_predictions_have_the_same_information_in_both_modes(model, text):
    block = text.blocks[1]
    for mode in ("causal", "denoise"):
        found = log_probabilities(model, text, mode, block)
        for row, position in enumerate(block):
            ids = text.ids[: block.stop][None].clone()
            ids[:, position:] = MASK
            if mode == "causal":
                logits = model.tree(ids[:, :position], mode="causal")[0, -1]
            else:
                logits = model.tree(ids, mode="denoise", block_start=block.start)[0, position]
            torch.testing.assert_close(found[row], logits.double().log_softmax(-1), rtol=0, atol=1e-5)


def test_predicting_queries_are_those_whose_logits_are_read(model, text):
    block = text.blocks[1]
    causal, denoise = (predicting(model, text, mode, block) for mode in ("causal", "denoise"))
    pattern = patterns(model, text.ids[: block.stop][None], "causal", block, range(block.start - 1, block.stop - 1))
    torch.testing.assert_close(causal, pattern[0, ..., : block.start].sum(-2))
    expected = 0
    for position in block:
        ids = text.ids[: block.stop][None].clone()
        ids[:, position:] = MASK
        expected = expected + patterns(model, ids, "denoise", block)[0, :, :, position - block.start, : block.start]
    torch.testing.assert_close(denoise, expected, rtol=0, atol=1e-6)


def test_a_mode_whose_attention_writes_nothing_loses_nothing(model, text):
    """Sinks are planted in both modes; in causal passes, heads write nothing."""

    def write(value, hook):
        return value * 0 if hook.forward_pass.mode == "causal" else value

    def attract(value, hook):
        value[..., 0] += 6.0
        return value

    hooks = [(f"blocks.{layer}.attn.{name}", hook) for layer in range(2) for name, hook in
             (("hook_z", write), ("hook_attn_scores", attract))]  # fmt: skip
    with model.hooks(fwd_hooks=hooks):
        found = costs(model, text, 3.0, 0)
    sink, random = (found.sel(choice=choice) for choice in ("sink", "random"))
    np.testing.assert_allclose([sink["number"], random["number"]], 1.0)
    assert (sink["mass"] > 0.8).all()
    np.testing.assert_array_equal(found["kl"].sel(mode="causal"), 0.0)
    kl = sink["kl"].sel(mode="denoise")
    assert (kl > 0).all()
    assert (kl > random["kl"].sel(mode="denoise")).all(), "a random key holds less attention"


def test_heads_are_compared_with_heads_of_the_same_layer():
    rng = np.random.default_rng(0)
    strength = np.broadcast_to(rng.random((1, 3, 8)), (2, 3, 8))
    key = np.broadcast_to(np.arange(24).reshape(1, 1, 3, 8), (5, 2, 3, 8))
    same = similarity(strength, strength > 0.5, key)
    assert same["correlation"][0] == same["overlap"][0] == same["same_key"][0] == 1.0
    assert same["same_key"][1] == pytest.approx(1 / 8, abs=0.02)
    layers = strength.copy()
    layers[0], layers[1] = rng.random((2, 3, 8)) + np.arange(3)[:, None] * 10  # only the layer is shared
    found = similarity(layers, layers > 10, key)
    assert found["correlation"][0] > 0.7
    assert abs(found["correlation"][2]) < 0.2
    assert found["overlap"][2] == pytest.approx(0.0)


def test_strengths_are_those_of_passes_over_the_finished_block(model, text):
    found = heads(model, text, 3.0, 0)
    for number, mode in enumerate(("causal", "denoise")):
        shares = []
        for block in text.blocks:
            pattern = patterns(model, text.ids[: block.stop][None], mode, block)[0]
            shares.append(pattern[..., : block.start].mean(dim=-2).amax(dim=-1))
        np.testing.assert_allclose(found["strength"][1][number], torch.stack(shares).mean(0), atol=1e-6)


def test_the_study_writes_its_tables_and_figures(model, measured, tmp_path):
    study = Modes(settings={"gen_length": 8})
    found = study.run(model, PROMPTS, tmp_path)
    for name, table in found.tables.items():
        assert table.equals(measured.tables[name])
        assert (tmp_path / f"modes-{name}.csv").is_file()
    assert {file.stem for file in found.files if file.suffix == ".png"} == {
        "modes-motion",
        "modes-costs",
        "modes-heads",
    }
    claims = found.tables["claims"]
    assert set(claims["verdict"]) <= {"holds", "no", "cannot tell", "not measured"}
    assert len(claims) == len(set(claims["claim"])) == 14


def test_claims_are_differences_of_the_measurements(measured):
    (data,) = measured.measured.values()
    one = data.isel(prompt=0)
    named = dict(zip(one["claim"].values, one["difference"].values, strict=True))
    jump = one["jump_share"].sel(edit="fill", matching="matched").values
    assert named["filling a block: strongest keys move more under denoising"] == pytest.approx(jump[1] - jump[0])
    cost = one["nll"].sel(choice="sink").values - one["nll"].sel(choice="same_mass").values
    claim = "hiding sinks costs more than random keys with as much attention, more so under denoising"
    assert named[claim] == pytest.approx(cost[1, 1] - cost[0, 0])


def test_the_text_of_another_mode_and_prompts_of_ids_are_measured(model, measured):
    ids = model.encode(PROMPTS[0])[0]
    found = Modes(settings={"gen_length": 8, "mode": "autoregressive"}).run(model, ids)
    (data,) = found.measured.values()
    assert data["jump_share"].notnull().all()
    assert data["right"].isnull().all()
    (other,) = measured.measured.values()
    assert not np.array_equal(other["moved"].values[0], data["moved"].values[0])


def test_a_model_with_one_mode_is_refused(tiny_llada):
    with pytest.raises(SettingError, match=r"modes cannot measure .*decodes in one way\. Give one that decodes"):
        find("modes")().run(tiny_llada, PROMPTS)
    with pytest.raises(SettingError, match="epsilon must be a finite number of at least 0; got -1"):
        Modes(epsilon=-1.0)
