"""DiffusionGemma's sampler and what is measured and changed in its runs, on the tiny checkpoint of ../shared."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stored.draws import given_draws, given_starts
from torch import Tensor

import sinklens
from sinklens.errors import HookFunctionError, PromptError, SettingError
from sinklens.interventions import (
    AblateValues,
    Activations,
    FreezePattern,
    Intervention,
    MaskSinks,
    PatchHooks,
    Remask,
)

SETTINGS: dict[str, Any] = {
    "gen_length": 16,
    "max_denoising_steps": 4,
    "entropy_bound": 1.5,
    "confidence_threshold": 0.3,
}
LAYERS = 6


@pytest.fixture(scope="module")
def gemma(conformance: Path) -> sinklens.Model:
    return sinklens.load(conformance / "diffusion-gemma")


@pytest.fixture
def prompt() -> Tensor:
    return torch.arange(18).reshape(2, 9) * 5 + 3


def test_settings_come_from_the_generation_config(gemma):
    settings = sinklens.families.settings_for(gemma, {})
    expected = {
        "canvas_length": 8, "gen_length": 256, "max_denoising_steps": 48, "entropy_bound": 0.1, "t_min": 0.4,
        "t_max": 0.8, "pad_token_id": 0,
    }  # fmt: skip
    assert {name: getattr(settings, name) for name in expected} == expected
    assert (gemma.eos_token_ids, gemma.mask_token_id) == ((1, 106, 50), None)


@pytest.fixture(scope="module")
def free(gemma):
    """A run, and the pattern of every step and layer with the text positions of its keys."""
    return _patterns(gemma, torch.arange(18).reshape(2, 9) * 5 + 3)


def test_positions_exist_from_their_canvas_on_and_get_their_final_token_in_their_unmask_step(free):
    run, _ = free
    exists = run.canvas >= 0
    assert bool(exists[:, :, :9].all())
    second = int((run.canvas[0, :, 17] >= 0).long().argmax())
    assert 0 < second <= 4
    assert not bool(exists[:, :second, 17:].any())
    assert bool(exists[:, second:].all())
    assert bool(run.undecided[:, 0, 9:].all())
    assert not bool(run.undecided[:, -1].any())
    assert not bool(run.undecided[:, second, :17].any())
    for row, pos in itertools.product(range(2), range(9, 25)):
        step = int(run.unmask_step[row, pos])
        assert run.canvas[row, step + 1 :, pos].unique().numel() == 1
        assert not bool(run.undecided[row, step + 1 :, pos].all())


def test_given_draws_replace_the_random_ones(gemma, prompt):
    drawn: dict[str, list[Tensor]] = {"hook_candidates": [], "hook_renoise": []}
    hooks = [(f"denoise.{name}", lambda v, hook, kept=kept: kept.append(v.clone())) for name, kept in drawn.items()]
    run = sinklens.generate(gemma, prompt, hooks=hooks, record_sinks=False, **SETTINGS)
    second = int((run.canvas[0, :, 17] >= 0).long().argmax())
    starts = torch.stack([run.canvas[:, 0, 9:17], run.canvas[:, second, 17:]])
    noise = [given_starts(starts), *(given_draws(name, torch.stack(kept)) for name, kept in drawn.items())]
    again = sinklens.generate(gemma, prompt, seed=9, hooks=noise, record_sinks=False, **SETTINGS)
    assert torch.equal(run.canvas, again.canvas)


def test_edits_of_the_samplers_points_take_effect(gemma, prompt):
    plain = sinklens.generate(gemma, prompt, record_sinks=False, **SETTINGS)
    accept = ("denoise.hook_accepted", lambda value, hook: torch.ones_like(value))
    run = sinklens.generate(gemma, prompt, hooks=[accept], record_sinks=False, **SETTINGS)
    assert not bool(run.undecided[:, 1, :17].any())
    for name in ("hook_self_conditioning", "hook_logits", "hook_entropy", "hook_renoise", "hook_candidates"):

        def change(value: Tensor, hook: Any) -> Tensor:
            return value.flip(1) + (1.0 if value.is_floating_point() and hook.name.endswith("ing") else 0)

        changed = sinklens.generate(gemma, prompt, hooks=[(f"denoise.{name}", change)], record_sinks=False, **SETTINGS)
        size = min(plain.steps_run, changed.steps_run)
        assert not torch.equal(plain.canvas[:, 1:size], changed.canvas[:, 1:size]), name


def test_an_edit_of_the_prompt_is_encoded_again(gemma, prompt):
    def edit(value: Tensor, hook: Any) -> Tensor | None:
        return value.index_fill(1, torch.tensor([2]), 77) if hook.step == 1 else None

    seen: list[Tensor] = []
    keep = ("denoise.hook_logits", lambda value, hook: seen.append(value.clone()))
    run = sinklens.generate(gemma, prompt, hooks=[("denoise.hook_canvas", edit), keep], record_sinks=False, **SETTINGS)
    assert bool((run.canvas[:, 1, 2] == 77).all())
    processed = seen[0] / run.settings.temperature(0)
    with torch.no_grad():
        expected = gemma(run.canvas[:, 1, :17], self_conditioning=processed)
    torch.testing.assert_close(seen[1], expected, atol=2e-4, rtol=0)


def _patterns(model: sinklens.Model, prompt: Tensor, *hooks: Any) -> tuple[Any, dict[tuple[int, int], Any]]:
    """A run, and the pattern of every step and layer with the text positions of its keys."""
    seen: dict[tuple[int, int], Any] = {}

    def keep(value: Tensor, hook: Any) -> None:
        seen[hook.step, int(hook.name.split(".")[1])] = (value.clone(), hook.key_positions)

    points = [(f"blocks.{layer}.attn.hook_pattern", keep) for layer in range(LAYERS)]
    return sinklens.generate(model, prompt, hooks=[*hooks, *points], **SETTINGS), seen


def test_recorded_scores_are_the_column_sums_at_the_positions_of_the_keys(gemma, prompt, free):
    run, patterns = free
    fused = sinklens.generate(gemma, prompt, **SETTINGS).sinks["score"].to_numpy()
    score, canvas = run.sinks.scores(), run.sinks.on_canvas
    units = {unit: run.sinks.scores(unit).to_numpy() for unit in ("fraction", "visible", "percent")}
    assert len(patterns) == run.steps_run * LAYERS
    assert (canvas.sum("pos") == 8).all()
    for (step, layer), (pattern, keys) in patterns.items():
        text = int((run.canvas[0, step] >= 0).sum())
        assert keys.stop == text
        assert keys.start == (text - 15 if layer < 5 else 0)  # a window of 8: 7 cached keys and the canvas
        for found in (run.sinks["score"].to_numpy()[:, step, layer], fused[:, step, layer]):
            np.testing.assert_allclose(found[..., keys.start : keys.stop], pattern.sum(2), atol=1e-5, rtol=1e-5)
            assert np.isnan(found[..., : keys.start]).all()
            assert np.isnan(found[..., keys.stop :]).all()
        part = score.where(~canvas).isel(step=step, layer=layer).sum("pos").to_numpy()
        np.testing.assert_allclose(part, pattern[..., :-8].sum((2, 3)), atol=1e-4)
        for unit, factor in (("fraction", 1), ("visible", 1), ("percent", 100)):  # by the queries of the canvas
            found = units[unit][:, step, layer][..., keys.start : keys.stop]
            np.testing.assert_allclose(found, factor * pattern.mean(2).numpy(), atol=1e-4, rtol=1e-4)


def test_states_of_a_track_follow_the_marks(free):
    run, _ = free
    undecided, canvas = run.undecided[:, :-1].numpy(), run.canvas[:, :-1].numpy()
    decided = ~undecided
    np.testing.assert_array_equal(run.sinks.decided.to_numpy(), decided)
    renoised, edited = np.zeros_like(decided), np.zeros_like(decided)
    renoised[:, 1:] = decided[:, :-1] & undecided[:, 1:]
    edited[:, 1:] = decided[:, :-1] & decided[:, 1:] & (canvas[:, 1:] != canvas[:, :-1])
    assert renoised.any()
    np.testing.assert_array_equal(run.sinks.renoised.to_numpy(), renoised)
    np.testing.assert_array_equal(run.sinks.edited.to_numpy(), edited)


def test_masking_the_sinks_of_another_run_uses_its_positions(gemma, prompt, free):
    source, patterns = free
    _, masked = _patterns(gemma, prompt, MaskSinks(top_k=1, source=source))
    for (step, layer), (pattern, keys) in masked.items():
        if step == 0 or (step, layer) not in patterns:
            continue
        before, earlier = patterns[step - 1, layer]
        strongest = before.sum(2).argmax(-1) + earlier.start
        present = (strongest >= keys.start)[..., None]
        expected = torch.zeros(2, 4, 25, dtype=torch.bool).scatter_(2, strongest[..., None], present)
        assert torch.equal((pattern == 0).all(dim=2), expected[..., keys.start : keys.stop])


SLOW = {"gen_length": 16, "max_denoising_steps": 3, "entropy_bound": 0.1, "confidence_threshold": 0.0}
"""Two canvases of three steps each."""


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("key", "by"), [(4, "zero"), (4, "mean"), (12, "mean"), (20, "zero")])
def test_replaced_values_of_text_and_canvas_are_those_of_encoder_and_decoder(gemma, prompt, key, by):
    """Key 4 is in the prompt, 12 in the first canvas, 20 in the second. Of two canvases, in a layer with a window."""
    where = torch.zeros(1, 1, 1, 1, 25, dtype=torch.bool)
    where[..., key] = True
    seen: dict[tuple[int, str], Tensor] = {}
    ends = ("attn.hook_v", "attn.hook_pattern", "attn.hook_z")
    watch = (lambda name: name.endswith(ends), lambda value, hook: seen.update({(hook.step, hook.name): value.clone()}))
    assert sinklens.generate(gemma, prompt, hooks=[AblateValues(where=where, by=by), watch], **SLOW).steps_run == 6
    changed = 0
    for step, layer in itertools.product((1, 4), range(LAYERS)):
        at, first = f"blocks.{layer}.attn", 9 if step == 1 else 17
        text = [seen[0, f"encoder.{at}.hook_v"], *([seen[3, f"encoder.{at}.hook_v"]] if step == 4 else [])]
        values = torch.cat([*text, seen[step, f"{at}.hook_v"]], dim=1)
        assert values.shape[1] == first + 8
        pattern, z = seen[step, f"{at}.hook_pattern"], seen[step, f"{at}.hook_z"]
        values = values[:, -pattern.shape[-1] :].repeat_interleave(z.shape[2] // values.shape[2], dim=2)
        place = key - (first + 8 - pattern.shape[-1])
        if 0 <= place < values.shape[1]:
            values[:, place] = values.mean(dim=1) if by == "mean" else 0.0
            changed += 1
        torch.testing.assert_close(z, torch.einsum("bhqk,bkhd->bqhd", pattern, values), atol=1e-5, rtol=1e-4)
    assert changed


def test_a_canvas_is_patched_and_frozen_at_its_positions(gemma, prompt):
    kept = Activations(names=["blocks.2.attn.hook_z", "blocks.5.hook_resid_post"])
    base = sinklens.generate(gemma, prompt, hooks=kept, **SLOW)
    assert kept.caches[4].windows["blocks.2.attn.hook_z"] == range(17, 25)
    own = sinklens.generate(gemma, prompt, hooks=PatchHooks(source=kept.caches), **SLOW)
    assert torch.equal(own.canvas, base.canvas)
    seen: dict[int, Tensor] = {}
    keep = ("blocks.2.attn.hook_z", lambda value, hook: seen.update({hook.step: value.clone()}))
    patch = PatchHooks(source={1: kept.caches[0]}, names="blocks.2.attn.hook_z", positions=[11])
    sinklens.generate(gemma, prompt, replay=base, hooks=[patch, keep], **SLOW)
    changed = (seen[1] != kept.caches[1]["blocks.2.attn.hook_z"]).flatten(2).any(dim=2)
    assert changed.nonzero()[:, 1].unique().tolist() == [11 - 9]
    assert torch.equal(seen[1][:, 2], kept.caches[0]["blocks.2.attn.hook_z"][:, 2])
    with pytest.raises(SettingError, match=r"source has positions 9 to 16 of blocks\.2\.attn\.hook_z, and step 3 comp"):
        sinklens.generate(gemma, prompt, hooks=PatchHooks(source={3: kept.caches[0]}), **SLOW)
    with pytest.raises(SettingError, match="Hold repeats the values of step 0, which computed positions 9"):
        sinklens.generate(gemma, prompt, hooks=FreezePattern(at=0), **SLOW)
    sinklens.generate(gemma, prompt, hooks=FreezePattern(at=0, steps=[1, 2]), **SLOW)
    with pytest.raises(SettingError, match=r"denoise\.hook_candidates has the positions of the current canvas only"):
        candidates = {0: {"denoise.hook_candidates": base.canvas[:, 0, 9:17]}}
        sinklens.generate(gemma, prompt, hooks=PatchHooks(source=candidates, positions=[10]), **SLOW)


@dataclass(frozen=True, kw_only=True)
class Appended(Intervention):
    """Puts a token after the answer."""

    on_canvas = True

    def extend(self, model: Any, ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return ids, real, torch.full_like(ids[:, :1], 7)

    def hooks_for(self, model: Any, run: Any = None) -> list[Any]:
        return []


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        *((given, SettingError, text) for given, text in (
            (
                {"gen_length": 13, "canvas_length": 8},
                r"gen_length 13 is not a multiple of canvas_length 8.*8 or 16",
            ),
            ({"t_min": 0.5, "t_max": 0.5}, r"t_min and t_max must satisfy 0 <= t_min < t_max; got 0.5 and 0.5"),
            ({"entropy_bound": 0.0}, r"entropy_bound must be a finite number above 0; got 0.0"),
            ({"stability_threshold": -1}, r"stability_threshold must be an integer of at least 0; got -1"),
            ({"confidence_threshold": -1.0}, r"confidence_threshold must be a finite number of at least 0"),
            ({"start_canvas": [[1, 2]], "canvas_length": 8}, r"start_canvas must be token ids \[batch, 8\]"),
            ({"steps": 4}, r"steps is not a setting of the diffusion-gemma sampler"),
        )),
        ({"sampler": "llada", "gen_length": 8}, SettingError, r"fits bidirectional attention, but diffusion-gemma mod"),
        ({"start_canvas": [[1] * 8] * 3, **SETTINGS}, SettingError, r"start_canvas has 3 rows, but there are 2 prompt"),
        ({"hooks": MaskSinks(top_k=1, same_step=True)}, SettingError, r"same_step needs a second pass .* use the sink"),
        ({"hooks": Appended()}, SettingError, r"reads nothing that follows its canvas; put them before the prompt"),
        ({"hooks": Remask(positions=[-1])}, SettingError, r"Remask is not available for diffusion-gemma models, whose"),
        ({"prompts": [[5, 6, 7, 254, 8]]}, PromptError, r"contains the image token \(254\) at position 3, but"),
        ({"prompts": {"input_ids": torch.arange(3)[None], "pixel_values": torch.zeros(1)}}, PromptError, "got .pixel_"),
        ({"hooks": [("denoise.hook_accepted", lambda v, hook: v[:, 1:])]}, HookFunctionError,
         r"is \[2, 7\], but the value at this point has shape \[2, 8\]"),
    ],
)  # fmt: skip
def test_what_the_sampler_does_not_take_is_refused(gemma, prompt, given, error, text):
    given = {"prompts": prompt} | ({} if "sampler" in given else SETTINGS) | given
    with pytest.raises(error, match=text):
        sinklens.generate(gemma, **given)


@pytest.mark.parametrize("layer", [0, LAYERS - 1])  # a sliding one, and the last, whose output nothing reads
def test_the_decoder_reads_the_encoders_keys_as_edited_after_the_rotation(gemma, layer):
    """Halving a vector before or after it is rotated is the same."""
    ids = torch.arange(2 * 25).reshape(2, 25) % 240 + 3

    def halved_at(name: str, in_place: bool = False) -> Tensor:
        hook = (lambda value, hook: value.mul_(0.5)) if in_place else (lambda value, hook: value * 0.5)
        with torch.no_grad():
            return gemma.run_with_hooks(ids, fwd_hooks=[(f"encoder.blocks.{layer}.attn.{name}", hook)])

    wanted = halved_at("hook_k_normed")
    assert (wanted - gemma(ids)).abs().max() > 0.1
    for in_place in (False, True):
        torch.testing.assert_close(halved_at("hook_rot_k", in_place), wanted, rtol=1e-4, atol=1e-4)


def test_keys_that_are_stored_are_edited_once(gemma, prompt):
    """The second pass of the encoder reads the text's keys as edited in the first."""
    seen: list[Tensor] = []
    at = f"encoder.blocks.{LAYERS - 1}.attn.hook_rot_k"

    def halve_new(value: Tensor, hook: object) -> Tensor:
        seen.append(value.clone())
        new = value.shape[1] - (seen[-2].shape[1] if len(seen) > 1 else 0)
        return torch.cat([value[:, :-new], value[:, -new:] * 0.5], dim=1)

    sinklens.generate(gemma, prompt, hooks=[(at, halve_new)], **SETTINGS)
    assert [keys.shape[1] for keys in seen] == [9, 17]
    torch.testing.assert_close(seen[1][:, :9], seen[0] * 0.5)
