"""MDLM, BD3-LM, SEDD, Duo and GIDD: one pass equals the authors' in logits, patterns, stream and modulation."""

import json
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file
from stored.folders import largest_difference

import sinklens
from sinklens.errors import CheckpointError, HookNameError, SettingError
from sinklens.families import family_named, translate
from sinklens.model.files import read_config
from sinklens.model.loading import build_empty

FOLDERS = ("mdlm", "bd3lm-owt", "duo", "sedd", "gidd")
MODULATION = [f"hook_{part}_{what}" for part in ("attn", "mlp") for what in ("shift", "scale", "gate")]
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request, conformance):
    return conformance / request.param


@pytest.fixture(scope="module")
def model(folder):
    return sinklens.load(folder, family="sedd" if folder.name == "sedd" else None)


@pytest.fixture(scope="module")
def stored(folder):
    return load_file(folder / "expected.safetensors")


def time_of(stored, number):
    """The noise level that reaches the network, as the family counts it."""
    return next(
        stored[f"pass{number}.{name}"] for name in ("sigma_used", "sigma", "t") if f"pass{number}.{name}" in stored
    )


@pytest.fixture(scope="module", params=[0, 1])
def passed(request, model, stored):
    """A stored pass: the reference's values, our logits and our points."""
    prefix = f"pass{request.param}."
    with torch.no_grad():
        logits, points = model.run_with_cache(stored["input_ids"].long(), time=time_of(stored, request.param))
    return (
        {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)},
        logits,
        points,
    )


def test_logits_and_conditioning_equal_the_references(passed):
    expected, logits, points = passed
    assert largest_difference(logits, expected["logits"]) < TOLERANCE
    assert largest_difference(points["hook_cond"], expected["cond"]) < TOLERANCE


def test_patterns_stream_and_modulation_equal_the_references(model, passed):
    expected, _, points = passed
    if "pattern" not in expected:
        pytest.skip("this pass is stored as logits only")
    assert largest_difference(points["hook_embed"], expected["resid"][0]) < TOLERANCE
    for layer in range(model.cfg.n_layers):
        block = f"blocks.{layer}"
        assert largest_difference(points[f"{block}.attn.hook_pattern"], expected["pattern"][:, layer]) < TOLERANCE
        assert largest_difference(points[f"{block}.hook_resid_post"], expected["resid"][layer + 1]) < TOLERANCE
        made = torch.cat([points[f"{block}.adaln.{name}"] for name in MODULATION], dim=-1)
        assert largest_difference(made, expected["modulation"][layer]) < TOLERANCE
    final = torch.cat([points["hook_final_shift"], points["hook_final_scale"]], dim=-1)
    assert largest_difference(final, expected["final_modulation"]) < TOLERANCE


def test_what_is_added_to_the_stream_is_the_gated_output_and_the_heads_sum_to_it(model, passed):
    _, _, points = passed
    for layer in range(model.cfg.n_layers):
        block = f"blocks.{layer}"
        gate = points[f"{block}.adaln.hook_attn_gate"][:, None]
        added = points[f"{block}.hook_attn_out"]
        assert largest_difference(points[f"{block}.hook_attn_ungated"] * gate, added) < 1e-5
        assert largest_difference(points[f"{block}.attn.hook_result"].sum(dim=2), added) < TOLERANCE
        assert largest_difference(points[f"{block}.hook_resid_mid"] - points[f"{block}.hook_resid_pre"], added) < 1e-4
        mlp = points[f"{block}.hook_mlp_ungated"] * points[f"{block}.adaln.hook_mlp_gate"][:, None]
        assert largest_difference(mlp, points[f"{block}.hook_mlp_out"]) < 1e-5


def test_points_of_the_norms_are_those_of_a_layer_norm(model, passed):
    _, _, points = passed
    for layer in range(model.cfg.n_layers):
        for norm, stream, part in (("ln1", "hook_resid_pre", "attn"), ("ln2", "hook_resid_mid", "mlp")):
            block, x = f"blocks.{layer}", points[f"blocks.{layer}.{stream}"]
            scale = (x.var(dim=-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
            normalized = (x - x.mean(dim=-1, keepdim=True)) / scale
            assert largest_difference(points[f"{block}.{norm}.hook_scale"], scale) < TOLERANCE
            assert largest_difference(points[f"{block}.{norm}.hook_normalized"], normalized) < TOLERANCE
            shift, factor = (points[f"{block}.adaln.hook_{part}_{what}"][:, None] for what in ("shift", "scale"))
            read = normalized * getattr(model.blocks[layer], norm).w * (1 + factor) + shift
            assert largest_difference(points[f"{block}.{norm}.hook_modulated"], read) < TOLERANCE


def test_an_edited_head_result_changes_the_stream_by_the_edit(model, stored):
    ids, time = stored["input_ids"].long(), time_of(stored, 0)
    _, before = model.run_with_cache(ids, time=time)

    def ablate(value, hook):
        value[:, :, 0] = 0
        return value

    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_result", ablate)]):
        _, after = model.run_with_cache(ids, time=time, names_filter="blocks.0.hook_attn_out")
    expected = before["blocks.0.hook_attn_out"] - before["blocks.0.attn.hook_result"][:, :, 0]
    assert largest_difference(after["blocks.0.hook_attn_out"], expected) < TOLERANCE


def test_editing_the_time_is_another_time(model, stored):
    if not model.config.time_conditioning:
        pytest.skip("this checkpoint is untimed")
    ids = stored["input_ids"].long()
    other = model(ids, time=0.3)
    edited = model.run_with_hooks(ids, time=0.9, fwd_hooks=[("hook_time", lambda value, hook: value * 0 + 0.3)])
    assert largest_difference(edited, other) < 1e-6
    assert largest_difference(model(ids, time=0.9), other) > 1e-2


def test_rows_may_have_different_times_and_an_untimed_network_ignores_them(model, stored):
    ids = stored["input_ids"].long()
    both = model(ids, time=torch.tensor([0.2, 0.8]))
    alone = torch.cat([model(ids[:1], time=0.2), model(ids[1:], time=0.8)])
    assert largest_difference(both, alone) < TOLERANCE
    same = model(ids, time=0.5)
    assert torch.equal(same, both) is not model.config.time_conditioning


def test_a_timed_network_needs_its_time_and_others_refuse_it(model, stored, tiny_llada):
    ids = stored["input_ids"].long()
    if model.config.time_conditioning:
        with pytest.raises(SettingError, match="reads the noise level of its canvas; pass time="):
            model(ids)
        with pytest.raises(SettingError, match="time= has 3 numbers, but the batch has 2 rows; pass one, or 2"):
            model(ids, time=torch.rand(3))
        with pytest.raises(SettingError, match="must be finite numbers of at least 0"):
            model(ids, time=float("nan"))
    else:
        assert torch.equal(model(ids), model(ids, time=3.0))
    with pytest.raises(SettingError, match="not conditioned on the noise level; leave time= out"):
        tiny_llada(ids[:, :4], time=0.5)


def test_every_head_reads_its_own_copy_of_the_stream(model, stored):
    ids, time = stored["input_ids"].long(), time_of(stored, 0)
    plain = model(ids, time=time)
    model.set_use_split_qkv_input(True)
    try:
        same = model.run_with_hooks(
            ids, time=time, fwd_hooks=[("blocks.0.attn.hook_q_input", lambda value, hook: value)]
        )
    finally:
        model.set_use_split_qkv_input(False)
    assert largest_difference(same, plain) < TOLERANCE


def test_weights_have_transformer_lens_names_and_no_gate_branch(model, folder):
    raw = load_file(folder / "model.safetensors")
    prefix = "" if "blocks.0.attn_qkv.weight" in raw else "backbone."
    q, k, v = raw[f"{prefix}blocks.0.attn_qkv.weight"].chunk(3)
    for matrix, found in ((q, model.W_Q), (k, model.W_K), (v, model.W_V)):
        assert torch.equal(found[0].transpose(-2, -1).flatten(0, 1), matrix)
    assert torch.equal(model.W_in[0].T, raw[f"{prefix}blocks.0.mlp.0.weight"])
    assert (model.cfg.normalization_type, model.cfg.gated_mlp, model.cfg.final_rms) == ("LN", False, False)
    with pytest.raises(SettingError, match="the MLP of this model has no gate"):
        _ = model.W_gate
    with pytest.raises(HookNameError, match=r"no hook point is called .blocks\.0\.mlp\.hook_pre_linear."):
        model.run_with_cache(torch.zeros(1, 4, dtype=torch.long), names_filter="blocks.0.mlp.hook_pre_linear", time=0.1)


def masked(size):
    sizes = dict(zip(("hidden_dim", "n_blocks", "n_heads"), size, strict=True))
    return {"vocab_size": 50258, "model_length": 1024, "cond_dim": 128, **sizes}


PUBLIC = {
    "mdlm": lambda size: masked(size) | {"model_type": "mdlm", "time_conditioning": False},
    "bd3lm-owt": lambda size: (
        masked(size) | {"model_type": "bd3lm", "time_conditioning": False, "block_size": 16, "causal": False}
        | {"cross_attn": True, "adaln": True}
    ),
    "duo": lambda size: masked(size) | {"model_type": "duo", "causal": False},
    "sedd": lambda size: {
        "tokens": 50257, "graph": {"type": "absorb"}, "noise": {"type": "loglinear"},
        "model": {"hidden_size": size[0], "n_blocks": size[1], "n_heads": size[2], "cond_dim": 128, "length": 1024}
        | {"scale_by_sigma": True},
    },
    "gidd": lambda size: {
        "model_type": "dit", "vocab_size": 50258, "max_seq_len": 512, "hidden_size": size[0],
        "num_hidden_layers": size[1], "num_attention_heads": size[2], "timestep_cond_dim": 128, "p_uniform": 0.1,
        "t_eps": 1e-4,
    },
}  # fmt: skip
SMALL, MEDIUM = (768, 12, 12), (1024, 24, 16)


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize(("size", "parameters"), [(SMALL, 169_627_218), (MEDIUM, 424_477_010)])
def test_full_sizes_have_the_published_number_of_parameters(name, size, parameters):
    """With 50,258 tokens, the number of MDLM's and Duo's; GIDD's README says 169.6 and 424.5 million."""
    family = family_named(name)
    empty = build_empty(translate(PUBLIC[name](size), family, name))
    assert sum(value.numel() for value in empty.parameters()) == parameters


WRONG = [
    ("mdlm", "cond_dim", None, "lacks cond_dim, which the mdlm family needs"),
    ("mdlm", "time_conditioning", None, "lacks time_conditioning, which the mdlm family needs"),
    ("duo", "causal", True, "has causal = True; the duo family can express only False"),
    ("bd3lm-owt", "cross_attn", False, "has cross_attn = False; the bd3lm-owt family can express only True"),
    ("bd3lm-owt", "block_size", None, "does not give the block length"),
    ("gidd", "p_uniform", None, "lacks p_uniform, which the gidd family needs"),
    ("sedd", "graph.type", "uniform", "has graph.type = 'uniform'; the sedd family can express only 'absorb'"),
    ("sedd", "model.scale_by_sigma", None, "lacks model.scale_by_sigma, which the sedd family needs"),
]


@pytest.mark.parametrize(("name", "key", "value", "message"), WRONG)
def test_a_config_that_means_another_network_is_refused(conformance, name, key, value, message, tmp_path):
    config = read_config(conformance / name)
    *path, last = key.split(".")
    part = config
    for step in path:
        part = part[step]
    if value is None:
        part.pop(last)
    else:
        part[last] = value
    folder = copytree(conformance / name, tmp_path / name)
    (folder / "config.json").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        sinklens.load(folder, family="sedd" if name == "sedd" else None)


def test_sedd_has_no_model_type_and_is_opened_by_name(conformance):
    with pytest.raises(CheckpointError, match=r"looks like SEDD.*pass family='sedd'"):
        sinklens.load(conformance / "sedd")


def test_hooks_read_the_noise_level_of_their_pass(model, stored):
    seen = []
    time = torch.tensor([0.2, 0.8])
    keep = ("blocks.0.hook_resid_pre", lambda value, hook: seen.append(hook.forward_pass.time))
    model.run_with_hooks(stored["input_ids"].long(), time=time, fwd_hooks=[keep])
    assert torch.equal(seen[0], time if model.config.time_conditioning else torch.zeros(2))
