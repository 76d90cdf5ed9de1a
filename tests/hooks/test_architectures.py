"""The worked example of CONTRIBUTING.md: two table entries add a new family of the Llama kind."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import MistralConfig, MistralForCausalLM

import sinklens
from sinklens.errors import CheckpointError
from sinklens.families import FAMILIES, Family
from sinklens.hooks import Architecture, architecture_of
from sinklens.hooks.architectures import ARCHITECTURES

NEWDLM = Family(
    "newdlm",
    ("newdlm",),
    "mistral",
    "llada",
    "not verified against reference code",
    renames={r"^tok\.": "model.embed_tokens.", r"^layer\.": "model.layers.", r"\.wq\.": ".self_attn.q_proj."},
    required={"sliding_window": (None,)},
    mask_token_id=90,
)


@pytest.fixture
def newdlm(tmp_path, monkeypatch):
    """A checkpoint folder of the new family, and the model it was saved from."""
    monkeypatch.setitem(ARCHITECTURES, "mistral", Architecture())
    monkeypatch.setitem(FAMILIES, "newdlm", NEWDLM)
    config = MistralConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=None, tie_word_embeddings=False,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    renamed = {"model.embed_tokens.": "tok.", "model.layers.": "layer.", ".self_attn.q_proj.": ".wq."}
    weights = {}
    for name, value in model.state_dict().items():
        for new, old in renamed.items():
            name = name.replace(new, old)
        weights[name] = value.clone()
    save_file(weights, tmp_path / "model.safetensors")
    raw = json.loads(config.to_json_string(use_diff=False)) | {"model_type": "newdlm"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path, model


def test_the_example_in_contributing_loads_and_is_bidirectional(newdlm):
    folder, original = newdlm
    model = sinklens.load(folder)
    ids = torch.randint(0, 90, (2, 11))
    everything = torch.zeros(2, 1, 11, 11)  # an explicit mask that does not hide any key
    with torch.no_grad():
        expected = original(input_ids=ids, attention_mask=everything).logits
        torch.testing.assert_close(model(ids), expected, atol=1e-5, rtol=1e-5)
    with sinklens.trace(model, ids, gen_length=6) as t:
        for _ in t.steps:
            pattern = t["blocks.1.attn.hook_pattern"]
    assert pattern[..., 0, -1].min() > 0
    assert t.sinks.data.sizes["step"] == 6


def test_the_example_refuses_settings_that_its_table_cannot_express(newdlm):
    folder, _ = newdlm
    raw = json.loads((folder / "config.json").read_text()) | {"sliding_window": 8}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"sliding_window = 8; the newdlm family can express only None"):
        sinklens.load(folder)


def test_the_error_for_an_unknown_architecture_names_the_table():
    with pytest.raises(
        CheckpointError, match=r"'opt' has no hook points; known are llama, qwen2, .*qwen3.*architectures.py"
    ):
        architecture_of("opt")
    assert replace(Architecture(), q="wq").q == "wq"
