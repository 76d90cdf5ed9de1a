"""A model or a TransformerLens bridge in memory is used as it is, or rejected and left unchanged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from building import random_hf, random_ids
from layouts import eager_logits, word_tokenizer
from transformers import PreTrainedModel

import sinklens
from sinklens.errors import CheckpointError

# Models in memory


@pytest.mark.parametrize(
    ("architecture", "sees_back_only", "built_causal"),
    [("llama", True, True), ("llama", False, False), ("qwen2", False, True), ("qwen3", False, False)],
)
def test_a_model_in_memory_computes_what_its_config_says(architecture, sees_back_only, built_causal, tmp_path):
    """Also if its attention modules were built with another value of is_causal."""
    hf, ids = random_hf(architecture, built_causal, mask_token_id=None), random_ids()
    hf.config.is_causal = sees_back_only
    wanted = eager_logits(hf, ids, sees_back_only)
    tokenizer = word_tokenizer(tmp_path)
    model = sinklens.load(hf, tokenizer=tokenizer)
    torch.testing.assert_close(model(ids), wanted, rtol=1e-4, atol=1e-5)
    assert model.family == (architecture if sees_back_only else f"a2d-{architecture}")
    assert (model.tree.hf, model.tokenizer) == (hf, tokenizer)
    assert model.mask_token_id == (None if sees_back_only else 60)  # the tokenizer's


def test_a_rejected_model_is_left_unchanged():
    hf = random_hf("llama", mask_token_id=None)
    before = hf.config.to_dict(), hf.config._attn_implementation
    with pytest.raises(CheckpointError, match=r"no usable mask token \(found None, vocabulary 61\)"):
        sinklens.load(hf)
    assert (hf.config.to_dict(), hf.config._attn_implementation) == before


def test_loading_the_same_model_again_returns_the_same_object():
    hf = random_hf()
    assert sinklens.load(hf) is sinklens.load(hf)
    ids = torch.randint(0, 60, (1, 7))
    first, again = (sinklens.generate(hf, ids, gen_length=3) for _ in range(2))
    assert torch.equal(first.canvas, again.canvas)


OPT = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 8, "max_position_embeddings": 8}
LOADED = "revision, dtype, device and device_map apply only while loading"
REFUSED: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    *((random_hf, {key: value}, LOADED) for key, value in
      (("revision", "v1"), ("dtype", "bf16"), ("device", "cpu"), ("device_map", "cpu"))),
    *((random_hf, {key: value}, f"{key} applies only while loading") for key, value in
      (("quantization", "bnb-int8"), ("adapter", "some-adapter"))),
    (lambda: random_hf().model, {}, "LlamaModel has no language-model head; pass a model of a …ForCausalLM"),
    (lambda: transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=8, **OPT)), {},
     "OPTForCausalLM: model_type 'opt' is not a known family"),
    (lambda: random_hf("qwen2", use_sliding_window=True, sliding_window=4), {},
     r"use_sliding_window = True; the a2d-qwen2 family can express only False"),
    (lambda: random_hf(sinklens_attention="hard"), {}, "sinklens_attention = 'hard'; known attention normalizers"),
    (lambda: random_hf("qwen3_moe", causal=False), {},
     r"is_causal is False, .*'rnd1' \(bidirectional, predicts the next"),
    (lambda: sinklens.load(random_hf()).tree.hf, {"mask_token_id": 8},
     r"already has hook points, and a second set would disconnect the first.*the model that sinklens\.load returned"),
    (lambda: 8, {}, "cannot load a int; pass a name, a folder, a transformers PreTrainedModel"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "given", "message"), REFUSED)
def test_what_cannot_be_loaded_from_memory_is_refused(made, given, message):
    with pytest.raises(CheckpointError, match=message):
        sinklens.load(made(), **given)


# TransformerLens bridges


BRIDGED = {"llama": "meta-llama/Llama-3.1-8B", "qwen2": "Qwen/Qwen2.5-0.5B", "qwen3": "Qwen/Qwen3-0.6B"}


def _bridge(hf: PreTrainedModel, folder: Path) -> Any:
    from transformer_lens.model_bridge.sources.transformers import boot

    return boot(BRIDGED[hf.config.model_type], hf_model=hf, tokenizer=word_tokenizer(folder))


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("architecture", "tied", "processed"),
    [("llama", False, True), *((one, tied, False) for one in BRIDGED for tied in (False, True))],
)
def test_a_bridge_is_loaded_with_its_weights_and_keeps_working(architecture, tied, processed, tmp_path):
    """Folding and centring shift Llama's logits by one number per position, and the model's shift with them."""
    hf, ids = random_hf(architecture, causal=True, tie_word_embeddings=tied), random_ids()
    raw = hf(ids).logits
    bridge = _bridge(hf, tmp_path)
    if processed:
        bridge.enable_compatibility_mode(disable_warnings=True)
    wanted = bridge(ids)
    assert ((wanted - raw).abs().max() > 1e-3) == processed
    model = sinklens.load(bridge)
    torch.testing.assert_close(model(ids), wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(bridge(ids), wanted)
    held = {parameter.data_ptr() for parameter in bridge.original_model.parameters()}
    assert {parameter.data_ptr() for parameter in model.tree.hf.parameters()} == held
    assert (model.tokenizer, model.family) == (bridge.tokenizer, architecture)


@pytest.mark.parametrize(
    ("architecture", "tied", "message"),
    [
        (
            "qwen3",
            True,
            r"the config of the TransformerBridge ties its weights, but lm_head\.weight has separate values",
        ),
        (
            "qwen2",
            False,
            r"weights must not be folded or centered\): 3 weights have no place in the model \(.*o_proj\.bias",
        ),
    ],
)
def test_a_bridge_whose_processed_weights_do_not_fit_is_rejected(architecture, tied, message, tmp_path):
    bridge = _bridge(random_hf(architecture, causal=True, tie_word_embeddings=tied), tmp_path)
    bridge.enable_compatibility_mode(disable_warnings=True)
    with pytest.raises(CheckpointError, match=message):
        sinklens.load(bridge)
