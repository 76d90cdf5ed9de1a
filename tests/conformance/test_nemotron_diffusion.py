"""Nemotron-Labs-Diffusion: passes, drafts and rules of its modes, beside the stored runs."""

import itertools
import json
import shutil
from collections import Counter
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored.folders import largest_difference
from stored.runs import stored_runs

import sinklens
from sinklens.errors import CheckpointError, HookFunctionError, PromptError, ReadOnlyHookError, SettingError
from sinklens.interventions import SinkToken

FOLDER = "nemotron-diffusion"
TOLERANCE = 1e-4
DEFECT = 7
"""The reference ends a block for all rows because one of them has ended."""
SPECULATION = [8, 9, 10, 11]
PASSES = {"causal": ("causal.", None), "denoise": ("", 18), None: ("bidirectional.", None)}
FULL_SIZE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 262144,
}  # fmt: skip
"""config.json of the 8B model, as far as it differs from the reference's."""
ROTATION = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(reference):
    return reference.load()


def stored_run(reference, number: int, **more: Any) -> sinklens.Generation:
    """A run of the reference, repeated; the one with a defect from its settings alone."""
    if number != DEFECT:
        return reference.repeat(next(run for run in stored_runs(reference) if run.number == number), **more)
    prompt = reference.tensors[f"gen{number}.prompt"]
    return sinklens.generate(reference.load(changes={"eos_token_id": 91}), prompt, **batched_settings(reference) | more)


def batched_settings(reference) -> dict[str, Any]:
    """Those of the run with a defect."""
    stored = reference.runs[DEFECT]
    found = {"mode": "diffusion", "gen_length": stored.get("max_new_tokens") or stored["gen_length"]}
    found |= {"block_length": stored["block_length"], "threshold": stored.get("threshold")}
    return found | {"causal_context": stored.get("causal_context", True)}


def seen_in(steps: list) -> Any:
    """A hook that keeps the pass of every step."""
    return ("denoise.hook_canvas", lambda value, hook: steps.append(hook.forward_pass))


def test_the_config_is_translated_key_by_key(reference, model):
    raw, config = reference.config(), model.config
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "hidden_act",
            "sliding_window", "bos_token_id", "eos_token_id")  # fmt: skip
    assert {key: getattr(config, key) for key in kept} == {key: raw[key] for key in kept}
    assert {key: config.rope_parameters[key] for key in raw["rope_parameters"]} == raw["rope_parameters"]
    assert config.model_type == "ministral3"
    assert config._attn_implementation == "sinklens"
    assert config.use_cache is True  # transformers' default, not the file's
    assert (model.family, model.mask_token_id, model.causal, model.block_length) == (FOLDER, 100, False, None)


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


@pytest.mark.parametrize("number", [number for number in range(14) if number != DEFECT])
def test_every_block_begins_where_the_references_does(reference, number):
    tensors, passes = reference.tensors, []
    run = stored_run(reference, number, hooks=[seen_in(passes)])
    filling = [step for step, mode in enumerate(run.modes) if mode in ("denoise", "draft")]
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

    hooks = [(f"denoise.hook_{name}", keep) for name in shown]
    run = stored_run(reference, number, use_cache=use_cache, hooks=hooks)
    tensors = {name: reference.tensors[f"gen{number}.{name}"] for name in ("draft", "verify", "accepted")}
    assert torch.equal(torch.cat([value for _, value in shown["verify"]]), tensors["verify"])
    assert torch.cat([value for _, value in shown["accepted_length"]]).tolist() == tensors["accepted"].tolist()
    last = [value for (step, value) in shown["draft"] if run.modes[step + 1] == "verify"]
    assert torch.equal(torch.cat(last), tensors["draft"])
    assert [run.modes[step] for step, _ in shown["verify"]] == ["verify"] * len(tensors["verify"])


@pytest.mark.parametrize("number", [2, 5, 8, 11, 12])
def test_logits_of_the_first_block_and_verification_equal_the_references(reference, number):
    kept: dict[str, torch.Tensor] = {}
    hooks = [("denoise.hook_logits", lambda value, hook: kept.setdefault(hook.forward_pass.mode, value.clone()))]
    stored_run(reference, number, hooks=hooks)
    filling = kept["draft" if number in SPECULATION else "denoise"]
    assert largest_difference(filling, reference.tensors[f"gen{number}.logits"]) < TOLERANCE
    if number in SPECULATION:
        assert largest_difference(kept["verify"], reference.tensors[f"gen{number}.verify_logits"]) < TOLERANCE


def test_the_modes_of_a_run_and_its_track_are_those_of_its_passes(reference):
    run = stored_run(reference, 2)
    passes = Counter(reference.tensors["gen2.start"].tolist()).values()
    blocks = [["denoise"] * count + ["commit"] for count in passes]
    assert list(run.modes) == ["prefill", *itertools.chain(*blocks)]
    assert run.sinks.modes == list(run.modes)
    start = [place.start if place else -1 for place in run.step_blocks]
    assert run.sinks["block_start"][0].values.tolist() == start
    assert [step for step, mode in enumerate(run.modes) if mode == "denoise"] == [
        s for s, at in enumerate(start) if at >= 0
    ]


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_row_of_a_batch_is_decoded_as_if_it_were_alone(reference, use_cache):
    """Where the reference leaves masks in one row because another one has ended."""
    together = stored_run(reference, DEFECT, use_cache=use_cache)
    prompt = reference.tensors[f"gen{DEFECT}.prompt"]
    for row in range(2):
        model, settings = reference.load(changes={"eos_token_id": 91}), batched_settings(reference)
        alone = sinklens.generate(model, prompt[[row]], use_cache=use_cache, **settings)
        assert torch.equal(together.tokens[row], alone.tokens[0])
    assert (together.answers[1].ended, together.answers[1].masks) == (True, 0)


@pytest.mark.parametrize("use_cache", [False, True])
def test_left_padding_changes_nothing(reference, use_cache):
    prompts = [reference.tensors[f"gen{number}.prompt"][0].tolist() for number in (2, 3)]
    model = reference.load()
    settings = {"mode": "diffusion", "gen_length": 16, "threshold": 0.7, "use_cache": use_cache}
    ids = torch.tensor([prompts[0], [0, *prompts[1]]])
    real = torch.tensor([[1] * 11, [0] + [1] * 10])
    together = sinklens.generate(model, {"input_ids": ids, "attention_mask": real}, **settings)
    for row, prompt in enumerate(prompts):
        alone = sinklens.generate(model, torch.tensor([prompt]), **settings)
        assert torch.equal(together.tokens[row, 11:], alone.tokens[0, -16:])


def test_the_adapter_acts_on_the_block_of_draft_passes_only(reference):
    model, ids = reference.load(), reference.tensors["input_ids"]
    with torch.no_grad():
        draft, denoise = (model(ids, mode=mode, block_start=18) for mode in ("draft", "denoise"))
        commit = model(ids, mode="commit")
    assert torch.equal(draft[:, :18], denoise[:, :18])
    assert ((draft - denoise)[:, 18:].abs().amax(-1) > 0.1).all()
    assert torch.equal(commit, model(ids, mode="causal"))


def test_the_adapter_adds_its_low_rank_product_to_the_projection(reference, model):
    ids, values = reference.tensors["input_ids"], {}
    names = [("blocks.1.attn.hook_z", "z"), ("blocks.1.hook_attn_out", "out")]
    hooks = [(name, lambda value, hook, key=key: values.update({key: value})) for name, key in names]
    with torch.no_grad():
        model.run_with_hooks(ids, fwd_hooks=hooks, mode="draft", block_start=18)
        stored = load_file(reference.path / "linear_spec_lora" / "adapter_model.safetensors")
        at = "base_model.model.encoder.layers.1.self_attn.o_proj.lora_{}.weight"
        merged = (
            model.hf.model.layers[1].self_attn.o_proj.weight + 16 / 4 * stored[at.format("B")] @ stored[at.format("A")]
        )
        expected = values["z"].flatten(2) @ merged.T
    assert largest_difference(values["out"][:, 18:], expected[:, 18:]) < 1e-5


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


def test_an_edited_accepted_length_moves_the_next_block(reference):
    one = [("denoise.hook_accepted_length", lambda value, hook: value * 0 + 1)]
    run = stored_run(reference, 8, hooks=one)
    starts = [block.start for block in run.step_blocks if block]
    assert starts == list(range(10, 10 + len(starts)))
    assert torch.equal(run.tokens[:, :36], stored_run(reference, 8).tokens[:, :36])
    with pytest.raises(HookFunctionError, match="takes 1 to 8 tokens"):
        stored_run(reference, 8, hooks=[("denoise.hook_accepted_length", lambda value, hook: value * 0)])
    with pytest.raises(ReadOnlyHookError, match="accepted_length"):
        stored_run(
            reference,
            8,
            hooks=[("denoise.hook_commit", lambda v, hook: v & (hook.forward_pass.mode != "verify"))],
        )


@pytest.mark.parametrize("number", [0, 2, 5, 8, 9, 12])
def test_a_replay_repeats_the_run(reference, number):
    base = stored_run(reference, number)
    again = stored_run(reference, number, replay=base)
    assert torch.equal(again.canvas, base.canvas)
    assert again.modes == base.modes
    assert again.sinks["score"].equals(base.sinks["score"])


@pytest.mark.parametrize("number", [2, 5])
def test_a_pass_of_a_run_is_the_single_pass_of_its_mode(reference, number):
    """Its pattern is that of plain attention under the rule of its mode, written out here."""
    kept: dict[int, torch.Tensor] = {}
    hooks = [("blocks.1.attn.hook_pattern", lambda value, hook: kept.update({hook.step: value.clone()}))]
    passes: list = []
    run = stored_run(reference, number, hooks=[*hooks, seen_in(passes)])
    prompt, size = run.prompt_length, run.settings.block_length
    for step, mode in enumerate(run.modes):
        length = kept[step].shape[-1]
        place = torch.arange(length)
        block = (place - prompt).div(size, rounding_mode="floor").clamp(min=-1)
        if run.settings.causal_context:
            seen = place[:, None] >= place
            if mode == "denoise":
                seen |= (block[:, None] == block[-1]) & (block == block[-1])
        else:
            seen = block[:, None] >= block
        assert torch.equal(kept[step][0] > 0, seen.expand(4, -1, -1)), (step, mode)


def test_single_passes_read_a_context_that_sees_all_of_itself_as_runs_do(reference):
    kept: dict[int, torch.Tensor] = {}
    hooks = [("blocks.1.attn.hook_pattern", lambda value, hook: kept.update({hook.step: value.clone()}))]
    run = stored_run(reference, 5, hooks=hooks)
    assert not run.settings.causal_context
    prompt, size = run.prompt_length, run.settings.block_length
    for step, mode in enumerate(run.modes):
        length = kept[step].shape[-1]
        place = {} if mode == "prefill" else {"block_start": length - size, "prompt_length": prompt}
        ids = run.canvas[:, step, :length]
        _, cache = run.model.run_with_cache(ids, mode=mode, causal_context=False, **place)
        torch.testing.assert_close(cache["pattern", 1], kept[step], rtol=0, atol=2e-5)
    assert {"prefill", "denoise", "commit"} <= set(run.modes)
    for wrong in ({"mode": "causal"}, {"mode": "draft", "block_start": 18}, {"mode": "prefill", "block_start": 18}):
        with pytest.raises(SettingError, match="causal_context=False is for 'denoise' and 'commit' passes"):
            run.model(ids, causal_context=False, **wrong)
    with pytest.raises(SettingError, match=r"must follow the prompt of prompt_length= columns after complete blocks"):
        run.model(ids, mode="denoise", causal_context=False, block_start=length - size, prompt_length=prompt + 1)
    with pytest.raises(SettingError, match=r"prompt_length= says where blocks begin if causal_context=False"):
        run.model(ids, mode="denoise", block_start=length - size, prompt_length=prompt)


@pytest.mark.parametrize("mode", ["prefill", "denoise", "commit"])
def test_a_hook_that_reads_the_mode_acts_in_the_steps_of_that_mode_only(reference, mode):
    def logits_of(*hooks):
        kept: dict[int, torch.Tensor] = {}
        keep = ("denoise.hook_logits", lambda value, hook: kept.update({hook.step: value.clone()}))
        return stored_run(reference, 2, replay=base, hooks=[*hooks, keep]), kept

    def zero(value, hook):
        return value * 0 if hook.forward_pass.mode == mode else value

    base = stored_run(reference, 2)
    (run, plain), (_, changed) = logits_of(), logits_of(("blocks.0.attn.hook_z", zero))
    assert [not torch.equal(plain[step], changed[step]) for step in plain] == [found == mode for found in run.modes]


def test_an_edit_of_read_text_is_read_again_with_a_cache(reference):
    def edit(value, hook):
        value = value.clone()
        if hook.step >= 4:
            value[:, 3] = 7
        return value

    hooks = [("denoise.hook_canvas", edit)]
    runs = [stored_run(reference, 2, hooks=hooks, use_cache=use_cache) for use_cache in (False, True)]
    assert torch.equal(runs[0].canvas, runs[1].canvas)
    assert not torch.equal(runs[0].canvas, stored_run(reference, 2).canvas)


def test_wrong_modes_and_settings_are_refused(reference, model):
    ids = reference.tensors["input_ids"]
    with pytest.raises(SettingError, match="mode must be one of 'causal', 'prefill'"):
        model(ids, mode="autoregressive")
    with pytest.raises(SettingError, match=r"needs block_start=.*0 to 25; got None"):
        model(ids, mode="denoise")
    with pytest.raises(SettingError, match="has no block; leave block_start= out"):
        model(ids, mode="causal", block_start=3)
    with pytest.raises(SettingError, match=r"mode='diffuse' must be one of 'autoregressive'.*Nearest: diffusion"):
        sinklens.generate(model, ids, mode="diffuse")
    with pytest.raises(SettingError, match="both choose how to decode"):
        sinklens.generate(model, ids, mode="diffusion", sampler="nemotron-dllm")
    with pytest.raises(SettingError, match="decode in one way"):
        sinklens.generate("tiny-llada", "1+1", mode="diffusion")
    with pytest.raises(SettingError, match=r"gen_length 20 is not a multiple of block_length 8.*choose 16 or 24"):
        sinklens.generate(model, ids, mode="diffusion", gen_length=20)
    with pytest.raises(PromptError, match="takes one prompt"):
        sinklens.generate(model, reference.tensors["gen6.prompt"], mode="speculation", gen_length=8)
    with pytest.raises(SettingError, match="puts tokens after the answer"):
        sinklens.generate(model, reference.tensors["gen2.prompt"], gen_length=8, hooks=[SinkToken(at="end", token=5)])
    with pytest.raises(SettingError, match="changes from pass to pass"):
        sinklens.generate(model, reference.tensors["gen2.prompt"], gen_length=8, cache="dual")


def test_vision_variants_and_other_paradigms_are_refused_by_name(reference, tmp_path):
    for changes, match in (
        ({"model_type": "nemotron_labs_diffusion_vlm", "architectures": None}, "has a vision tower"),
        ({"dlm_paradigm": "block_diff"}, "dlm_paradigm = 'block_diff'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, "lacks rope_scaling.rope_type"),
    ):
        with pytest.raises(CheckpointError, match=match):
            sinklens.load(reference.write(tmp_path / match.split()[0], **changes))


def with_adapter(reference, folder, weights=None, **changes):
    """A copy of the checkpoint with another adapter."""
    reference.write(folder)
    place = folder / "linear_spec_lora"
    place.unlink()
    shutil.copytree(reference.path / "linear_spec_lora", place)
    config = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps(config | changes))
    if weights is not None:
        save_file(weights(load_file(place / "adapter_model.safetensors")), place / "adapter_model.safetensors")
    return folder


def test_adapters_that_would_compute_another_model_are_refused(reference, tmp_path):
    stored = "base_model.model.encoder.layers.0.self_attn.o_proj.lora_A.weight"
    for number, (changes, weights, match) in enumerate((
        ({"use_dora": True}, None, "use_dora = True"),
        ({"alpha_pattern": {"o_proj": 2}}, None, "alpha_pattern"),
        ({}, lambda w: {name.replace("o_proj", "q_proj"): value for name, value in w.items()}, "adapts .*q_proj"),
        ({}, lambda w: w | {stored: w[stored][:2].clone()}, "rank 4 and the model need A"),
        ({}, lambda w: w | {"extra": torch.zeros(1)}, "'extra', which is not a factor"),
    )):  # fmt: skip
        with pytest.raises(CheckpointError, match=match):
            sinklens.load(with_adapter(reference, tmp_path / str(number), weights, **changes))


def test_rank_stabilized_adapters_scale_by_the_root_of_the_rank(reference, tmp_path):
    model = sinklens.load(with_adapter(reference, tmp_path / "rs", use_rslora=True))
    assert model.tree.adapter.scale == 16 / 4**0.5


def test_a_checkpoint_without_its_adapter_drafts_without_it(reference, tmp_path):
    reference.write(tmp_path)
    (tmp_path / "linear_spec_lora").unlink()
    alone, prompt = sinklens.load(tmp_path), reference.tensors["gen8.prompt"]
    settings = {"mode": "speculation", "gen_length": 26, "block_length": 8}
    expected = sinklens.generate(reference.load(), prompt, use_adapter=False, **settings)
    assert torch.equal(sinklens.generate(alone, prompt, **settings).canvas, expected.canvas)
    assert alone.fingerprint != reference.load().fingerprint


@pytest.mark.parametrize(
    ("sizes", "rotation", "parameters"),
    [
        ({}, {}, 8_490_000_000),
        ({"hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26}, {}, 3_830_000_000),
        (
            {"hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26, "max_position_embeddings": 4096},
            {"factor": 0.25},
            3_830_000_000,
        ),
    ],
    ids=["8B", "3B", "3B-Base"],
)
def test_the_full_size_configs_build_with_the_published_sizes(reference, sizes, rotation, parameters):
    from sinklens.families import family_named, translate
    from sinklens.model.loading import build_empty

    config = reference.config() | FULL_SIZE | sizes | {"rope_parameters": ROTATION | rotation}
    made = translate(config, family_named(FOLDER), "here")
    empty = build_empty(made)
    assert sum(parameter.numel() for parameter in empty.parameters()) == pytest.approx(parameters, rel=1e-3)
    if sizes:
        assert len(empty.state_dict()) == 237
    assert made.rope_parameters["factor"] == (ROTATION | rotation)["factor"]
