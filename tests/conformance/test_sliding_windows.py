"""Texts longer than the window: MDLM's moves along the text, BD3-LM's slides by blocks; stored runs, rules, tracks."""

import numpy as np
import pytest
import torch
from dit_oracle import PlainDit, rotated
from stored.runs import open_folder

import sinklens
from sinklens.errors import SettingError, TrackError
from sinklens.experiments import LogitLens, logit_lens, of_step
from sinklens.families import bd3lm_owt
from sinklens.interventions import Activations, ForceTokens, MaskedLogits, MaskSinks

WINDOW = {"sampler": "mdlm-windows", "window_length": 9, "stride_length": 4, "window_steps": 5}


@pytest.fixture(scope="module")
def mdlm(conformance):
    return open_folder(conformance / "mdlm").load()


@pytest.fixture(scope="module")
def bd3lm(conformance):
    return open_folder(conformance / "bd3lm-owt").load()


# MDLM


def windows_of(run):
    """The window of each step, from its canvases: it begins at a multiple of the stride and holds the decided token."""
    length, stride = run.settings.window_length, run.settings.stride_length
    total, found, first = run.canvas.shape[2], [], 0
    while len(found) < run.steps_run:
        masked = run.canvas[0, len(found), first : first + length] == run.model.mask_token_id
        same = sum(window.start == first for window in found)
        if not bool(masked.any()) or same == run.settings.window_steps:
            first += stride
            continue
        found.append(range(first, min(first + length, total)))
    return found


@pytest.fixture(scope="module")
def moving(mdlm):
    return sinklens.generate(mdlm, [[5, 6, 7]], gen_length=14, seed=2, **WINDOW)


def test_tracks_are_in_text_positions(moving, conformance):
    dit, windows = PlainDit(conformance / "mdlm"), windows_of(moving)
    assert {window.start for window in windows} == {0, 4, 8}
    score = moving.sinks["score"].to_numpy()[0]
    for step, window in enumerate(windows):
        ids = moving.canvas[:, step, window.start : window.stop]
        with torch.no_grad():
            values = dit(ids).values
        for layer in range(3):
            expected = values[f"blocks.{layer}.attn.hook_pattern"][0].sum(1).numpy()
            np.testing.assert_allclose(score[step, layer][:, window.start : window.stop], expected, atol=1e-4)
        assert np.isnan(score[step][..., [place for place in range(17) if place not in window]]).all()
    assert set(moving.sinks.top(1)[0, -1].to_numpy().ravel().tolist()) <= set(windows[-1])


def test_masked_sinks_of_a_window_are_those_of_the_step_before_in_text_positions(mdlm, conformance):
    dit, at, seen = PlainDit(conformance / "mdlm"), "blocks.0.attn.hook_pattern", {}
    keep = (at, lambda value, hook: seen.update({hook.step: value.clone()}))
    settings = {"gen_length": 14, "seed": 2, **WINDOW}
    for same_step in (False, True):
        run = sinklens.generate(mdlm, [[5, 6, 7]], hooks=[MaskSinks(top_k=1, same_step=same_step), keep], **settings)
        windows = windows_of(run)
        for step in range(0 if same_step else 1, run.steps_run):
            window = windows[step]
            with torch.no_grad():
                plain = dit(run.canvas[:, step, window.start : window.stop]).values[at]
            place = slice(window.start, window.stop)
            found = seen[step][..., place, place]
            assert float(seen[step].sum()) == pytest.approx(float(found.sum()), abs=1e-4)
            strongest = plain.sum(2).argmax(-1) if same_step else seen[step - 1].sum(2).argmax(-1) - window.start
            hidden = strongest[:, :, None, None].expand(-1, -1, plain.shape[2], 1)
            inside = hidden >= 0
            left = torch.where(inside.any(-1, keepdim=True), plain.scatter(-1, hidden.clamp(min=0), 0.0), plain)
            torch.testing.assert_close(found, left / left.sum(-1, keepdim=True), atol=1e-5, rtol=1e-4)


def test_values_and_logits_of_a_window_are_those_of_its_pass(mdlm, moving, conformance):
    dit, settings = PlainDit(conformance / "mdlm"), {"gen_length": 14, **WINDOW}
    kept, logits, lens = Activations(names="blocks.2.hook_resid_post"), MaskedLogits(), LogitLens(layers=[2])
    hooks = [kept, logits, lens]
    run = sinklens.generate(mdlm, [[5, 6, 7]], replay=moving, hooks=hooks, record_sinks=False, **settings)
    read = lens.read(run)
    for step, window in enumerate(windows_of(moving)):
        place = slice(window.start, window.stop)
        with torch.no_grad():
            passed = dit(moving.canvas[:, step, place])
        value = kept.caches[step]["blocks.2.hook_resid_post"][:, place]
        torch.testing.assert_close(value, passed.values["blocks.2.hook_resid_post"], atol=1e-4, rtol=1e-4)
        expected = torch.full((17, 167), torch.nan)
        expected[place] = passed.logits[0]
        undecided = moving.undecided[0, step]
        torch.testing.assert_close(logits.kept[step], expected[undecided], atol=1e-3, rtol=1e-4, equal_nan=True)
        most = torch.from_numpy(read["probability"].sel(step=step, layer=2, rank=0).to_numpy())
        torch.testing.assert_close(most[place], passed.logits[0].softmax(-1).amax(-1), atol=1e-4, rtol=1e-3)


def test_a_token_masked_again_behind_the_window_does_not_keep_the_run_going(mdlm):
    remask = ForceTokens(tokens={0: 166}, steps=range(4, 25))
    run = sinklens.generate(mdlm, [[5, 6, 7]], gen_length=14, hooks=[remask], record_sinks=False, **WINDOW)
    assert run.steps_run <= run.settings.most_steps


# BD3-LM


def test_a_sliding_cache_changes_nothing_while_the_text_fits_into_the_context(bd3lm):
    complete, within = (
        sinklens.generate(bd3lm, [[161]], gen_length=11, seed=4, record_sinks=False, sliding=sliding)
        for sliding in (False, True)
    )
    assert torch.equal(complete.canvas, within.canvas)


def test_a_sliding_window_is_a_cache_that_drops_blocks_and_rotates_again(bd3lm, conformance):
    """The published cache in plain torch: unrotated projections, positions from its start, the first block dropped."""
    dit, size, context = PlainDit(conformance / "bd3lm-owt"), 4, 16
    text = torch.randint(160, (1, 32), generator=torch.Generator().manual_seed(5))
    prompt, seen = text[:, :28].tolist(), []
    hooks = [
        ("denoise.hook_candidates", lambda value, hook: text.clone()),
        ("denoise.hook_commit", lambda value, hook: torch.ones_like(value)),
        ("denoise.hook_logits", lambda value, hook: seen.append(value)),
    ]
    run = sinklens.generate(bd3lm, prompt, gen_length=4, sliding=True, hooks=hooks, first_hitting=False, num_steps=9)
    assert run.steps_run == 1
    masked = torch.cat([text[:, :28], torch.full((1, 4), 162)], dim=1)
    held = {}
    for first in range(0, 32, size):
        logits, held = through_cache(dit, masked[:, first : first + size], held)
        held = {layer: qkv[:, size:] if qkv.shape[1] == context else qkv for layer, qkv in held.items()}
    torch.testing.assert_close(seen[0][:, 28:], logits, atol=1e-3, rtol=1e-4)
    assert np.isfinite(run.sinks["score"].to_numpy()[0, 0]).all()


@torch.no_grad()
def through_cache(dit, ids, held):
    """Logits of a block that sees the cached blocks, and the cache with the block."""
    w, cond = dit.weights, dit.condition(torch.zeros(1))
    x, kept = w["vocab_embed.embedding"][ids], {}

    def norm(name, x):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=1e-5) * w[f"{name}.weight"]

    for number in range(dit.layers):
        at = f"blocks.{number}"
        made = cond @ w[f"{at}.adaLN_modulation.weight"].T + w[f"{at}.adaLN_modulation.bias"]
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = made[:, None].chunk(6, dim=-1)
        own = (norm(f"{at}.norm1", x) * (1 + scale_1) + shift_1) @ w[f"{at}.attn_qkv.weight"].T
        kept[number] = torch.cat([held[number], own], dim=1) if number in held else own
        q, k, v = kept[number].unflatten(-1, (3, dit.heads, -1)).unbind(2)
        q, k = (rotated(one) for one in (q, k))
        scores = torch.einsum("bqhd,bkhd->bhqk", q[:, -ids.shape[1] :], k) / q.shape[-1] ** 0.5
        z = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        x = x + gate_1 * (z @ w[f"{at}.attn_out.weight"].T)
        up = (norm(f"{at}.norm2", x) * (1 + scale_2) + shift_2) @ w[f"{at}.mlp.0.weight"].T + w[f"{at}.mlp.0.bias"]
        down = torch.nn.functional.gelu(up, approximate="tanh") @ w[f"{at}.mlp.2.weight"].T + w[f"{at}.mlp.2.bias"]
        x = x + gate_2 * down
    return dit.read_out(x, cond, lambda _, value: value), kept


@pytest.mark.parametrize("number", range(6))
def test_texts_stop_by_the_published_rule(conformance, number):
    folder = open_folder(conformance / "bd3lm-owt")
    expected = folder.facts["stop"][number]
    text = folder.tensors[f"stop.{expected['canvas']}"][0].long()
    assert bd3lm_owt.stop(text, (161,), expected["var_length"]) == (expected["stop"], expected["kept"])


def test_a_row_ends_at_its_second_end_token_or_where_it_repeats(bd3lm, monkeypatch):
    monkeypatch.setattr(bd3lm_owt, "JUDGED", 6)
    monkeypatch.setattr(bd3lm_owt, "LEAST_ENTROPY", 0.8)
    monkeypatch.setattr(bd3lm, "eos_token_ids", (161,))
    settings = {"gen_length": 15, "var_length": True, "first_hitting": False, "num_steps": 9, "record_sinks": False}
    texts = torch.arange(16).expand(3, -1).clone()
    texts[:, 0] = 161
    texts[0, 6] = 161  # the second end token
    texts[1, 2:8] = 33  # repeats itself
    hooks = [("denoise.hook_candidates", lambda value, hook: texts.clone())]
    run = sinklens.generate(bd3lm, [[161]] * 3, hooks=hooks, **settings)
    assert run.tokens[:2].tolist() == [[161, 1, 2, 3, 4, 5, 161] + [161] * 9, [161, 1] + [161] * 14]
    assert torch.equal(run.tokens[2], texts[2])
    assert [answer.tokens for answer in run.answers] == [5, 1, 15]
    unstopped = sinklens.generate(bd3lm, [[161]] * 3, hooks=hooks, **settings | {"var_length": False})
    assert torch.equal(unstopped.tokens, texts)


def test_what_a_separate_pass_would_show_is_refused(mdlm, moving, bd3lm):
    sliding = sinklens.generate(bd3lm, [[161]], gen_length=19, sliding=True, seed=1)
    separate = "the mdlm-windows sampler sees a window of the text, and a separate pass"
    for read, error, message in (
        (lambda: of_step(moving, 3), SettingError, separate),
        (lambda: logit_lens(mdlm, moving), SettingError, separate),
        (lambda: sinklens.views.pattern_at(moving, 9, 0), TrackError, "a separate pass sees all of the text"),
        (lambda: of_step(sliding, 2), SettingError, "the bd3lm-owt sampler sees a window of the text"),
    ):
        with pytest.raises(error, match=message):
            read()
