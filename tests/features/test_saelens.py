"""Folders in SAELens's format: configs of its versions are read, and what would be computed differently is refused."""

import json

import huggingface_hub
import pytest
import torch
from planted_saes import random_sae
from safetensors.torch import load_file, save_file

from sinklens.errors import CheckpointError
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
    save_sae(random_sae(architecture=architecture), folder)
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
    ("jumprelu", {"rescale_acts_by_decoder_norm": True}, "rescale belongs to architecture 'topk'"),
    ("topk", {"architecture": "batchtopk"}, "architecture 'batchtopk' is not supported"),
    ("topk", {"metadata": {"hook_head_index": 3}}, "hook_head_index=3 is not supported"),
    ("topk", {"k": None}, "needs an integer k in its config; got None"),
    ("topk", {"k": 400}, "needs k between 1 and 40"),
    ("topk", {"d_sae": 41}, "the config says d_sae 41, but the weights have 40"),
    ("topk", {"architecture": "transcoder"}, "architecture 'transcoder' is not supported"),
])  # fmt: skip
def test_what_would_be_computed_differently_is_refused_by_name(tmp_path, architecture, changes, match):
    with pytest.raises(CheckpointError, match=match):
        load_sae(written(tmp_path, architecture, changes))


@pytest.mark.parametrize(("config", "weights", "match"), [
    (None, None, r"cfg\.json cannot be read"),
    ("[1]", None, "contains a JSON list"),
    ("{}", b"short", r"has no readable sae_weights\.safetensors"),
    ({}, {"b_enc": None, "log_threshold": torch.zeros(40)}, "missing: b_enc; not known: log_threshold"),
    ({"architecture": "jumprelu"}, {}, "must be W_enc, b_enc, W_dec, b_dec, threshold for .*missing: threshold"),
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


TRAINER = {"trainer_class": "TopKTrainer", "dict_class": "AutoEncoderTopK", "activation_dim": 24, "dict_size": 40,
           "k": 6, "layer": 3, "lm_name": "GSAI-ML/LLaDA-8B-Base", "submodule_name": "resid_post_layer_3"}  # fmt: skip


def dictionary(folder, changes=(), io="out", weights=()):
    """A folder as dictionary_learning writes it, with the weights of `random_sae`."""
    sae = random_sae()
    stored = {"encoder.weight": sae.W_enc.T, "encoder.bias": sae.b_enc, "decoder.weight": sae.W_dec.T}
    stored |= {"b_dec": sae.b_dec, "k": torch.tensor(6), "threshold": torch.tensor(9.0)} | dict(weights)
    folder.mkdir(parents=True)
    torch.save({name: value for name, value in stored.items() if value is not None}, folder / "ae.pt")
    (folder / "config.json").write_text(json.dumps({"trainer": TRAINER | dict(changes), "buffer": {"io": io}}))
    return folder


@pytest.mark.parametrize("of_the_hub", [False, True])
def test_a_topk_sae_of_dictionary_learning_is_read(tmp_path, monkeypatch, of_the_hub):
    """Its features are the ReLU of the k largest values of encoder(x - b_dec)."""
    folder = dictionary(tmp_path / "layer_3" / "trainer_0", weights={"k": None} if of_the_hub else {})

    def fetched(name, allow_patterns, **_):
        assert name == "someone/saes"
        assert set(allow_patterns) >= {"layer_3/trainer_0/ae.pt", "layer_3/trainer_0/config.json"}
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    sae = load_sae("someone/saes/layer_3/trainer_0" if of_the_hub else folder)
    assert (sae.point, sae.model, sae.k) == ("blocks.3.hook_resid_post", "GSAI-ML/LLaDA-8B-Base", 6)
    made, x = random_sae(), torch.randn(7, 24)
    values = ((x - made.b_dec) @ made.W_enc + made.b_enc).relu()
    kept = values * (values >= values.sort(dim=-1, descending=True).values[:, 5:6])
    torch.testing.assert_close(sae.encode(x), kept)
    torch.testing.assert_close(sae.decode(kept), kept @ made.W_dec + made.b_dec)


class Runs:
    """Its pickle would create a file."""

    def __reduce__(self):
        return open, ("created", "w")


@pytest.mark.parametrize(("changes", "match"), [
    ({"changes": {"dict_class": "BatchTopKSAE"}}, "'dict_class': 'BatchTopKSAE'.*; supported are"),
    ({"changes": {"submodule_name": "mlp_out_layer_3"}}, "'submodule_name': 'mlp_out_layer_3'"),
    ({"changes": {"layer": 4}}, "'submodule_name': 'resid_post_layer_3'"),
    ({"io": "in"}, "'io': 'in'"),
    ({"changes": {"k": 5}}, "k = 6; supported are .* the k of config.json, 5"),
    ({"changes": {"dict_size": 41}}, "the config says d_sae 41"),
    ({"weights": {"b_dec": None, "bias": torch.zeros(24)}}, "missing: b_dec; not known: bias"),
    ({"weights": {"k": Runs()}}, r"no readable ae\.pt .*UnpicklingError"),
])  # fmt: skip
def test_another_sae_of_dictionary_learning_is_refused(tmp_path, monkeypatch, changes, match):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=match):
        load_sae(dictionary(tmp_path / "sae", **changes))
    assert not (tmp_path / "created").exists()
