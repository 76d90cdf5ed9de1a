"""Nemotron-Labs-Diffusion: passes, drafts and rules of its modes, beside the stored runs."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored.folders import largest_difference
from stored.runs import stored_run

import sinklens
from sinklens.errors import CheckpointError, HookFunctionError, PromptError, ReadOnlyHookError, SettingError
from sinklens.interventions import Suffix

FOLDER = "nemotron-diffusion"
TOLERANCE = 1e-4
SPECULATION = [8, 9, 10, 11]
PASSES = {"causal": ("causal.", None), "denoise": ("", 18), None: ("bidirectional.", None)}


@pytest.fixture(scope="module")
def model(reference):
    return reference.load()


def repeat(reference, number: int, **more: Any) -> sinklens.Generation:
    """A run of the reference, repeated."""
    return reference.repeat(stored_run(reference, number), **more)


@pytest.mark.parametrize("mode", PASSES)
def test_logits_patterns_and_sink_scores_equal_the_references(reference, model, mode):
    prefix, start = PASSES[mode]
    ids, pattern = reference.tensors["input_ids"], reference.tensors[f"{prefix}pattern"]
    given = {} if mode is None else {"mode": mode, "block_start": start}
    with torch.no_grad():
        plain = model(ids, **given)
        explicit, patterns = model.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_pattern"), **given)
        fused, sinks = model.run_with_cache(ids, names_filter=lambda name: name.endswith("sink_scores"), **given)
    for logits in (plain, explicit, fused):
        assert largest_difference(logits, reference.tensors[f"{prefix}logits"]) < TOLERANCE
    for layer in range(model.cfg.n_layers):
        assert largest_difference(patterns["pattern", layer], pattern[:, layer]) < TOLERANCE
        assert largest_difference(sinks[f"blocks.{layer}.attn.hook_sink_scores"], pattern[:, layer].sum(2)) < TOLERANCE


@pytest.mark.parametrize("number", [0, 2, 5, 8, 11, 12, 13])
def test_every_block_begins_where_the_references_does(reference, number):
    tensors, passes = reference.tensors, []
    run = repeat(
        reference, number, hooks=[("denoise.hook_canvas", lambda value, hook: passes.append(hook.forward_pass))]
    )
    filling = [step for step, mode in enumerate(run.modes) if mode in ("denoise", "draft")]
    assert run.sinks.modes == list(run.modes)
    assert run.sinks["block_start"][0].values.tolist() == [
        one.block.start if step in filling else -1 for step, one in enumerate(passes)
    ]
    assert [len(filling), run.steps_run - len(filling)] == reference.runs[number]["passes"]
    if f"gen{number}.canvas" in tensors:
        assert [passes[step].block.start for step in filling] == tensors[f"gen{number}.start"].tolist()
        stop = torch.tensor([passes[step].block.stop for step in filling])[:, None]
        canvas = tensors[f"gen{number}.canvas"]
        assert torch.equal((canvas >= 0), (torch.arange(canvas.shape[2]) < stop).expand_as(canvas))


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("number", SPECULATION)
def test_drafts_verifications_and_accepted_lengths_equal_the_references(reference, number, use_cache):
    shown: dict[str, list] = {"draft": [], "verify": [], "accepted_length": []}

    def keep(value, hook):
        shown[hook.name.removeprefix("denoise.hook_")].append((hook.step, value.clone()))

    run = repeat(reference, number, use_cache=use_cache, hooks=[(f"denoise.hook_{name}", keep) for name in shown])
    tensors = {name: reference.tensors[f"gen{number}.{name}"] for name in ("draft", "verify", "accepted")}
    assert torch.equal(torch.cat([value for _, value in shown["verify"]]), tensors["verify"])
    assert torch.cat([value for _, value in shown["accepted_length"]]).tolist() == tensors["accepted"].tolist()
    last = [value for (step, value) in shown["draft"] if run.modes[step + 1] == "verify"]
    assert torch.equal(torch.cat(last), tensors["draft"])
    assert [run.modes[step] for step, _ in shown["verify"]] == ["verify"] * len(tensors["verify"])


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("number", [2, 5, 8, 11, 12])
def test_logits_of_the_first_block_and_verification_equal_the_references(reference, number):
    kept: dict[str, torch.Tensor] = {}
    hooks = [("denoise.hook_logits", lambda value, hook: kept.setdefault(hook.forward_pass.mode, value.clone()))]
    repeat(reference, number, hooks=hooks)
    filling = kept["draft" if number in SPECULATION else "denoise"]
    assert largest_difference(filling, reference.tensors[f"gen{number}.logits"]) < TOLERANCE
    if number in SPECULATION:
        assert largest_difference(kept["verify"], reference.tensors[f"gen{number}.verify_logits"]) < TOLERANCE


def test_the_adapter_adds_its_low_rank_product_to_the_projection_in_the_block_of_drafts_only(reference, model):
    ids, values = reference.tensors["input_ids"], {}
    names = [("blocks.1.attn.hook_z", "z"), ("blocks.1.hook_attn_out", "out")]
    hooks = [(name, lambda value, hook, key=key: values.update({key: value})) for name, key in names]
    with torch.no_grad():
        model.run_with_hooks(ids, fwd_hooks=hooks, mode="draft", block_start=18)
        stored = load_file(reference.path / "linear_spec_lora" / "adapter_model.safetensors")
        at = "base_model.model.encoder.layers.1.self_attn.o_proj.lora_{}.weight"
        plain = model.hf.model.layers[1].self_attn.o_proj.weight
        merged = plain + 16 / 4 * stored[at.format("B")] @ stored[at.format("A")]
        read = values["z"].flatten(2)
        expected = torch.cat([read[:, :18] @ plain.T, read[:, 18:] @ merged.T], dim=1)
    assert largest_difference(values["out"], expected) < 1e-5
    assert largest_difference(read[:, 18:] @ plain.T, expected[:, 18:]) > 0.1


def test_speculation_writes_the_autoregressive_text(reference):
    """Whatever the drafts are: with and without the adapter, thresholds, block lengths, caches and edited drafts."""
    model = reference.load()

    def wrong(value, hook):
        value = value.clone()
        value[:, 2] = 7
        return value

    for number in (0, 2, 8, 9):
        prompt = reference.tensors[f"gen{number}.prompt"]
        expected = sinklens.generate(model, prompt, mode="autoregressive", gen_length=21).tokens
        for given in (
            {}, {"use_adapter": False}, {"draft_threshold": 0.8}, {"block_length": 3}, {"block_length": 1},
            {"use_cache": True}, {"hooks": [("denoise.hook_draft", wrong)]},
        ):  # fmt: skip
            run = sinklens.generate(model, prompt, mode="speculation", gen_length=21, record_sinks=False, **given)
            assert torch.equal(run.tokens[:, : expected.shape[1]], expected), given


def test_a_drafted_end_token_does_not_end_the_draft(reference):
    """All tokens but those of the text are end tokens, so that drafts propose some which verification rejects."""
    prompt, drafts = reference.tensors["gen8.prompt"], []
    given = {"mode": "speculation", "gen_length": 17, "draft_threshold": 1.0, "record_sinks": False}
    text = sinklens.generate(reference.load(), prompt, **given).tokens
    ends = sorted({*range(reference.config()["vocab_size"])} - {*text[0].tolist(), reference.load().mask_token_id})
    model = reference.load(changes={"eos_token_id": ends})
    hooks = [("denoise.hook_draft", lambda value, hook: drafts.append((hook.step, value.clone())))]
    run = sinklens.generate(model, prompt, hooks=hooks, **given)
    last = torch.cat([draft for step, draft in drafts if run.modes[step + 1] == "verify"])
    assert torch.equal(run.tokens, text)
    assert torch.isin(last, torch.tensor(ends)).any()
    assert (last != model.mask_token_id).all()


def test_an_edited_accepted_length_moves_the_next_block(reference):
    run = repeat(reference, 8, hooks=[("denoise.hook_accepted_length", lambda value, hook: value * 0 + 1)])
    starts = [block.start for block in run.step_blocks if block]
    assert starts == list(range(10, 10 + len(starts)))
    assert torch.equal(run.tokens[:, :36], repeat(reference, 8).tokens[:, :36])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("number", [2, 5])
def test_a_pass_of_a_run_is_the_single_pass_of_its_mode(reference, number):
    """Its pattern is that of plain attention under the rule of its mode, written out here; run 5 reads both ways."""
    kept: dict[int, torch.Tensor] = {}
    hooks = [("blocks.1.attn.hook_pattern", lambda value, hook: kept.update({hook.step: value.clone()}))]
    run = repeat(reference, number, hooks=hooks)
    prompt, size, causal = run.prompt_length, run.settings.block_length, run.settings.causal_context
    assert causal is (number == 2)
    assert {"prefill", "denoise", "commit"} <= set(run.modes)
    for step, mode in enumerate(run.modes):
        length = kept[step].shape[-1]
        place = torch.arange(length)
        block = (place - prompt).div(size, rounding_mode="floor").clamp(min=-1)
        seen = place[:, None] >= place if causal else block[:, None] >= block
        if mode == "denoise":
            seen = seen | (block[:, None] == block[-1]) & (block == block[-1])
        assert torch.equal(kept[step][0] > 0, seen.expand(4, -1, -1)), (step, mode)
        if not causal:
            continue
        given = {"block_start": length - size} if mode == "denoise" else {}
        _, cache = run.model.run_with_cache(run.canvas[:, step, :length], mode=mode, **given)
        torch.testing.assert_close(cache["pattern", 1], kept[step], rtol=0, atol=2e-5)


def test_an_edit_of_read_text_is_read_again_with_a_cache(reference):
    def edit(value, hook):
        value = value.clone()
        if hook.step >= 4:
            value[:, 3] = 7
        return value

    hooks = [("denoise.hook_canvas", edit)]
    runs = [repeat(reference, 2, hooks=hooks, use_cache=use_cache) for use_cache in (False, True)]
    assert torch.equal(runs[0].canvas, runs[1].canvas)
    assert not torch.equal(runs[0].canvas, repeat(reference, 2).canvas)


def test_a_checkpoint_without_its_adapter_drafts_without_it(reference, tmp_path):
    reference.write(tmp_path)
    (tmp_path / "linear_spec_lora").unlink()
    alone, prompt = sinklens.load(tmp_path), reference.tensors["gen8.prompt"]
    settings = {"mode": "speculation", "gen_length": 26, "block_length": 8}
    expected = sinklens.generate(reference.load(), prompt, use_adapter=False, **settings)
    assert torch.equal(sinklens.generate(alone, prompt, **settings).canvas, expected.canvas)
    assert alone.fingerprint != reference.load().fingerprint


def step(reference, model, **given):
    return model(reference.tensors["input_ids"], **given)


def run(reference, model, prompt="gen2", **given):
    return sinklens.generate(model, reference.tensors[f"{prompt}.prompt"], **given)


def edited(reference, model, point, function):
    return repeat(reference, 8, hooks=[(f"denoise.hook_{point}", function)])


@pytest.mark.parametrize(
    ("call", "given", "error", "message"),
    [
        (step, {"mode": "autoregressive"}, SettingError, "mode must be one of 'causal', 'prefill'"),
        (step, {"mode": "denoise"}, SettingError, r"needs block_start=.*0 to 25; got None"),
        (step, {"mode": "causal", "block_start": 3}, SettingError, "has no block; leave block_start= out"),
        (run, {"mode": "diffuse"}, SettingError, r"mode='diffuse' must be one of 'autoregressive'.*Nearest: diffusion"),
        (run, {"mode": "diffusion", "sampler": "nemotron-dllm"}, SettingError, "both choose how to decode"),
        (run, {"mode": "diffusion", "gen_length": 20}, SettingError,
         r"gen_length 20 is not a multiple of block_length 8.*choose 16 or 24"),
        (run, {"gen_length": 8, "hooks": [Suffix(text=[5])]}, SettingError, "puts tokens after the answer"),
        (run, {"gen_length": 8, "cache": "dual"}, SettingError, "changes from pass to pass"),
        (run, {"prompt": "gen6", "mode": "speculation", "gen_length": 8}, PromptError, "takes one prompt"),
        (lambda *_: sinklens.generate("tiny-llada", "1+1", mode="diffusion"), {}, SettingError, "decode in one way"),
        (edited, {"point": "accepted_length", "function": lambda value, hook: value * 0}, HookFunctionError,
         "takes 1 to 8 tokens"),
        (edited, {"point": "commit", "function": lambda v, hook: v & (hook.forward_pass.mode != "verify")},
         ReadOnlyHookError, "accepted_length"),
    ],
)  # fmt: skip
def test_wrong_modes_settings_and_edits_are_refused(reference, model, call, given, error, message):
    with pytest.raises(error, match=message):
        call(reference, model, **given)


STORED = "base_model.model.encoder.layers.0.self_attn.o_proj.lora_A.weight"
ADAPTERS = [
    ({"use_dora": True}, lambda w: w, "use_dora = True"),
    ({"alpha_pattern": {"0.self_attn.o_proj": 2}}, lambda w: w, "alpha_pattern"),
    ({}, lambda w: {name.replace("o_proj", "q_proj"): value for name, value in w.items()}, "q_proj have the shapes"),
    ({}, lambda w: w | {STORED: w[STORED][:2].clone()}, "rank 4 and the model need A"),
    ({}, lambda w: w | {"extra": torch.zeros(1)}, "'extra', which is not a factor"),
    ({"use_rslora": True}, lambda w: w, ""),
]


@pytest.mark.parametrize(("changes", "weights", "message"), ADAPTERS)
def test_adapters_that_would_compute_another_model_are_refused(reference, tmp_path, changes, weights, message):
    place = reference.write(tmp_path) / "linear_spec_lora"
    place.unlink()
    shutil.copytree(reference.path / "linear_spec_lora", place)
    config = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps(config | changes))
    save_file(weights(load_file(place / "adapter_model.safetensors")), place / "adapter_model.safetensors")
    if message:
        with pytest.raises(CheckpointError, match=message):
            sinklens.load(tmp_path)
    else:
        assert sinklens.load(tmp_path).tree.adapter.scale == 16 / 4**0.5  # of a rank-stabilized adapter
