"""SDAR with experts: config, mask token and size, beside the stored runs (test_stored_runs.py)."""

import pytest

import sinklens
from sinklens.errors import CheckpointError
from sinklens.families import FAMILIES
from sinklens.families.translate import translate
from sinklens.model.loading import build_empty

FOLDER = "sdar-moe"
FULL_SIZE = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    "moe_intermediate_size": 768, "rope_theta": 1e6,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(reference):
    return reference.load()


def test_the_config_is_that_of_qwen3_with_experts(reference, model):
    raw, config = reference.config(), model.config
    kept = ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob", "head_dim",
            "num_key_value_heads", "vocab_size", "tie_word_embeddings", "mlp_only_layers")  # fmt: skip
    assert {key: getattr(config, key) for key in kept} == {key: raw[key] for key in kept}
    assert (model.family, model.block_length, model.mask_token_id) == ("sdar-moe", 4, 289)
    assert (config.model_type, config.is_causal) == ("qwen3_moe", False)


def test_the_mask_token_is_the_callers_or_the_tokenizers(reference):
    with pytest.raises(CheckpointError, match=r"no usable mask token \(found None, .*\); pass mask_token_id="):
        sinklens.load(reference.path)
    assert sinklens.load(reference.path, mask_token_id=289, check=False).mask_token_id == 289
    with pytest.raises(CheckpointError, match=r"no usable mask token \(found 300, vocabulary 300\)"):
        sinklens.load(reference.path, mask_token_id=300)
    with pytest.raises(CheckpointError, match="llama models have no mask token; leave mask_token_id= out"):
        sinklens.load("tiny-llama", mask_token_id=3)


def test_the_full_size_has_the_published_number_of_parameters(reference):
    family = FAMILIES["sdar-moe"]
    empty = build_empty(translate(reference.config() | FULL_SIZE, family, "SDAR-30B-A3B-Chat"))
    assert sum(parameter.numel() for parameter in empty.parameters()) == 30_532_122_624
