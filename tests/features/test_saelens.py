"""Folders in SAELens's format: configs of its versions are read, and what would be computed differently is refused."""

import json

import pytest
import torch
from planted_saes import random_sae, random_transcoder
from safetensors.torch import load_file, save_file

from sinklens.errors import CheckpointError, SettingError
from sinklens.features import load_sae, save_sae

OLD = {  # as SAELens 3 and 5 wrote them: with activation_fn_str, and what was trained at the top
    "standard": {"architecture": "standard", "activation_fn_str": "relu", "hook_name": "blocks.1.hook_resid_pre"},
    "topk": {"architecture": "standard", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": 6}},
    "jumprelu": {"architecture": "jumprelu", "activation_fn_str": "relu", "model_name": "gpt2-small"},
}  # fmt: skip
OLD_KEYS = {"d_in": 24, "d_sae": 40, "normalize_activations": "none", "finetuning_scaling_factor": False,
            "apply_b_dec_to_input": True, "hook_head_index": None, "prepend_bos": True}  # fmt: skip


def written(folder, architecture="topk", changes=(), weights=()):
    """A folder with an SAE, with changed keys of its config (None removes one) and of its weights."""
    made = random_transcoder(d_out=9) if architecture == "transcoder" else random_sae(architecture=architecture)
    save_sae(made, folder)
    config = json.loads((folder / "cfg.json").read_text()) | dict(changes)
    (folder / "cfg.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    tensors = load_file(folder / "sae_weights.safetensors") | dict(weights)
    tensors = {name: value for name, value in tensors.items() if value is not None}
    save_file(tensors, folder / "sae_weights.safetensors")
    return folder


def same(sae, other):
    """Whether two SAEs compute the same."""
    x = torch.randn(7, 24)
    return torch.equal(sae.encode(x), other.encode(x)) and torch.equal(
        sae.decode(other.encode(x)), other.decode(sae.encode(x))
    )


@pytest.mark.parametrize("architecture", ["standard", "topk", "jumprelu"])
def test_a_written_sae_is_read_as_it_was(tmp_path, architecture):
    sae = random_sae(architecture=architecture, point="blocks.1.hook_resid_post", model="tiny")
    save_sae(sae, tmp_path)
    read = load_sae(tmp_path)
    assert same(read, sae)
    assert (read.point, read.model) == (sae.point, sae.model)
    save_sae(sae, tmp_path, torch.bfloat16)
    assert torch.equal(load_sae(tmp_path).W_enc, sae.W_enc.bfloat16().float())


@pytest.mark.parametrize("architecture", OLD)
def test_configs_of_earlier_versions_are_read(tmp_path, architecture):
    folder = written(tmp_path, architecture)
    (folder / "cfg.json").write_text(json.dumps(OLD_KEYS | OLD[architecture]))
    read = load_sae(folder)
    assert same(read, random_sae(architecture=architecture))
    assert (read.point, read.model) == (
        OLD[architecture].get("hook_name", ""), OLD[architecture].get("model_name", ""),
    )  # fmt: skip


def test_older_names_and_a_rescaling_by_the_norms_of_the_decoder_are_read(tmp_path):
    changes = {"architecture": None, "metadata": None, "hook_point": "blocks.2.hook_mlp_out"}
    assert load_sae(written(tmp_path, "standard", changes)).point == "blocks.2.hook_mlp_out"
    folder = written(tmp_path, "topk", {"rescale_acts_by_decoder_norm": True, "apply_b_dec_to_input": False})
    assert same(load_sae(folder), random_sae(rescale=True, subtract_b_dec=False))


@pytest.mark.parametrize(("architecture", "changes", "match"), [
    ("topk", {"architecture": "gated"}, "architecture 'gated' is not supported; known are standard, topk, jumprelu"),
    ("topk", {"normalize_activations": "layer_norm"}, "normalize_activations='layer_norm' is not supported.*'none'"),
    ("standard", {"activation_fn": "tanh-relu"}, "activation_fn='tanh-relu' is not supported"),
    ("standard", {"finetuning_scaling_factor": True}, "finetuning_scaling_factor=True is not supported"),
    ("standard", {"hook_head_index": 3}, "hook_head_index=3 is not supported"),
    ("jumprelu", {"rescale_acts_by_decoder_norm": True}, "rescale_acts_by_decoder_norm is supported"),
    ("topk", {"metadata": {"hook_head_index": 3}}, "hook_head_index=3 is not supported"),
    ("topk", {"k": None}, "needs an integer k in cfg.json; got None"),
    ("topk", {"k": 400}, "needs k between 1 and 40"),
    ("topk", {"d_sae": 41}, "cfg.json says d_sae 41, but the weights have 40"),
    ("transcoder", {"apply_b_dec_to_input": True}, "a transcoder does not subtract b_dec"),
    ("transcoder", {"d_out": 1}, "says d_out 1, but the weights have 9"),
    ("transcoder", {"hook_head_index_out": 3}, "hook_head_index_out=3 is not supported"),
    ("transcoder", {"architecture": "clt"}, "architecture 'clt' is not supported; known are .*skip_transcoder"),
])  # fmt: skip
def test_what_would_be_computed_differently_is_refused_by_name(tmp_path, architecture, changes, match):
    with pytest.raises(CheckpointError, match=match):
        load_sae(written(tmp_path, architecture, changes))
    with pytest.raises(SettingError, match="SAELens has no transcoder with the activation 'topk'"):
        save_sae(random_transcoder(architecture="topk"), tmp_path)


@pytest.mark.parametrize(("config", "weights", "match"), [
    (None, None, r"has no readable cfg\.json"),
    ("[1]", None, "holds a list"),
    ("{}", b"short", r"has no readable sae_weights\.safetensors"),
    ({}, {"b_enc": None, "log_threshold": torch.zeros(40)}, "missing: b_enc; not known: log_threshold"),
    ({"architecture": "jumprelu"}, {}, "must hold W_enc, b_enc, W_dec, b_dec, threshold for .*missing: threshold"),
])  # fmt: skip
def test_missing_and_broken_files_and_weights_are_named(tmp_path, config, weights, match):
    if isinstance(config, dict):
        written(tmp_path, "topk", config, weights)
    elif config is not None:
        (tmp_path / "cfg.json").write_text(config)
        (tmp_path / "sae_weights.safetensors").write_bytes(weights or b"")
    with pytest.raises(CheckpointError, match=match):
        load_sae(tmp_path)
    with pytest.raises(CheckpointError, match="'nowhere' is neither a folder nor a shipped SAE"):
        load_sae("nowhere")


TRANSCODERS = [
    ("transcoder", "standard", False), ("skip_transcoder", "standard", True),
    ("jumprelu_transcoder", "jumprelu", False), ("jumprelu_skip_transcoder", "jumprelu", True),
]  # fmt: skip


@pytest.mark.parametrize(("name", "architecture", "skip"), TRANSCODERS)
def test_a_written_transcoder_is_read_as_it_was_and_follows_saelens_formula(tmp_path, name, architecture, skip):
    points = {"point": "blocks.1.ln2.hook_normalized", "point_out": "blocks.1.hook_mlp_out"}
    sae, x = random_transcoder(d_out=9, architecture=architecture, skip=skip, **points), torch.randn(30, 24)
    save_sae(sae, tmp_path)
    config, stored = json.loads((tmp_path / "cfg.json").read_text()), load_file(tmp_path / "sae_weights.safetensors")
    assert (config["architecture"], config["d_out"], config["apply_b_dec_to_input"]) == (name, 9, False)
    assert config["metadata"]["hook_name_out"] == "blocks.1.hook_mlp_out"
    pre = x @ stored["W_enc"] + stored["b_enc"]  # as SAELens's Transcoder.encode and decode
    features = pre.relu() * (pre > stored["threshold"]) if architecture == "jumprelu" else pre.relu()
    made = features @ stored["W_dec"] + stored["b_dec"] + (x @ stored["W_skip"].T if skip else 0.0)
    read = load_sae(tmp_path)
    torch.testing.assert_close(read.decode(read.encode(x), x), made)
    assert (read.point, read.point_out, read.transcoder) == (*points.values(), True)


@pytest.mark.parametrize("rescale", [False, True])
@pytest.mark.parametrize("name", ["batchtopk", "matryoshka_batchtopk"])
def test_a_checkpoint_of_batchtopk_training_is_the_jumprelu_that_saelens_makes_of_it(tmp_path, name, rescale):
    sae, x = random_sae(), torch.randn(60, 24)
    tensors = {key: getattr(sae, key) for key in ("W_enc", "b_enc", "W_dec", "b_dec")}
    save_file(tensors | {"topk_threshold": torch.tensor(1.7, dtype=torch.double)}, tmp_path / "sae_weights.safetensors")
    config = {"architecture": name, "d_in": 24, "d_sae": 40, "k": 5.5, "rescale_acts_by_decoder_norm": rescale}
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    norm = sae.W_dec.norm(dim=-1) if rescale else torch.ones(40)  # as in process_state_dict_for_saving_inference
    pre = (x - sae.b_dec) @ (sae.W_enc * norm) + sae.b_enc * norm
    features = pre.relu() * (pre > 1.7)
    read = load_sae(tmp_path)
    torch.testing.assert_close(read.encode(x), features, atol=1e-4, rtol=1e-4)
    made = features @ (sae.W_dec / norm[:, None]) + sae.b_dec
    torch.testing.assert_close(read.decode(features), made, atol=1e-4, rtol=1e-4)
    assert 0.0 < float((features > 0).float().mean()) < 0.9
    save_sae(read, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "cfg.json").read_text())["architecture"] == "jumprelu"
    assert same(load_sae(tmp_path / "again"), read)


def test_norms_that_saelens_has_no_key_for_are_folded_when_written(tmp_path):
    sae, x = random_sae(architecture="jumprelu", rescale=True), torch.randn(20, 24)
    save_sae(sae, tmp_path)
    torch.testing.assert_close(load_sae(tmp_path).encode(x), sae.encode(x), atol=1e-4, rtol=1e-4)
