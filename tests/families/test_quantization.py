"""A quantized model computes with the matrices that it stores, and other libraries' formats are refused by name."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from building import random_ids
from layouts import change_config, write_family
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, GPTQConfig

import sinklens
from sinklens.errors import CheckpointError, SettingError
from sinklens.families import FAMILIES
from sinklens.model.quantization import METHODS, published
from sinklens.model.selfcheck import check

NEEDS_BITSANDBYTES = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A Llama checkpoint."""
    write_family(tmp_path / "llama", "llama", **SIZES)
    return tmp_path / "llama"


def _unpacked(weight: torch.nn.Parameter) -> torch.Tensor:
    """The matrix of a quantized weight, by its library."""
    if hasattr(weight, "quant_state"):
        import bitsandbytes

        return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    return weight.SCB[:, None] * weight.data / 127


def _with_stored_matrices(folder: Path, quantized: Any) -> Any:
    """The full-precision model, with the matrices that the quantized one stores in place of its own."""
    plain = sinklens.load(folder)
    for name in quantized.quantization:
        full, found = (model.tree.hf.get_parameter(name) for model in (plain, quantized))
        matrix = _unpacked(found)
        assert 0 < (matrix - full).abs().max() < 0.3 * full.abs().max()
        full.data = matrix.detach().to(full.dtype)
    return plain


@pytest.mark.extended
@pytest.mark.parametrize(
    ("method", "family", "kinds"),
    [
        ("bnb-nf4", "llama", 7),
        ("bnb-int8", "llada2", None),  # stores queries, keys and values as one matrix, which is split first
        ("bnb-nf4", "qwen3-moe", None),
    ],
)
@NEEDS_BITSANDBYTES
def test_a_quantized_model_computes_what_a_plain_one_with_its_matrices_computes(tmp_path, method, family, kinds):
    write_family(tmp_path, family, **SIZES)
    quantized = sinklens.load(tmp_path, quantization=method, check=False)  # a pass would pack its weights for the CPU
    assert kinds in (None, len({name.split(".")[-2] for name in quantized.quantization}))
    plain, ids = _with_stored_matrices(tmp_path, quantized), random_ids()
    with torch.no_grad():
        wanted = plain(ids)
        bound = 0.1  # it rounds inputs, or multiplies in bfloat16
        assert (quantized(ids) - wanted).abs().max() < bound * wanted.abs().max()
    check(quantized.tree, quantized.causal)
    place = "blocks.0.attn.hook_result"
    found, wanted = (model.run_with_cache(ids, names_filter=place)[1][place] for model in (quantized, plain))
    assert (found - wanted).abs().max() < bound * wanted.abs().max()
    for name in ("W_Q", "W_O"):
        with pytest.raises(SettingError, match=r"weight is quantized \(.*; load the model without quantization to"):
            getattr(quantized, name)


@pytest.mark.extended
@NEEDS_BITSANDBYTES
def test_a_network_with_noise_levels_is_quantized_by_bitsandbytes():
    """Its embedding of the time takes the element type of what stays in floating point."""
    model = sinklens.load("tiny-mdlm", quantization=BitsAndBytesConfig(load_in_8bit=True))  # with the self-check
    assert any("time_embed" in name for name in model.quantization)


@pytest.mark.extended
@pytest.mark.parametrize("method", METHODS)
@NEEDS_BITSANDBYTES
def test_a_published_quantized_checkpoint_loads_with_the_same_matrices(llama, tmp_path, method):
    made, ids = sinklens.load(llama, quantization=method, check=False), random_ids()
    kept = made.quantization
    assert len(kept) == 7 * made.cfg.n_layers
    with torch.no_grad():
        wanted = made(ids)
    made.release().save_pretrained(tmp_path / "published")
    loaded = sinklens.load(tmp_path / "published", dtype="float32")
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids), wanted, rtol=1e-4, atol=1e-5)
    assert loaded.quantization == kept
    with pytest.raises(CheckpointError, match="this checkpoint is quantized already"):
        sinklens.load(tmp_path / "published", quantization=method)
    file = tmp_path / "published" / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "layers.0.mlp.up_proj." not in name}, file)
    with pytest.raises(CheckpointError, match=r"weights are missing \(|could not load the quantized weights"):
        sinklens.load(tmp_path / "published")


@pytest.mark.parametrize(
    ("stored", "method", "message"),
    [
        (None, "bnb-int9", r"'bnb-int9' is unknown; choose one of bnb-int8, bnb-nf4"),
        (None, GPTQConfig(bits=4), r"quant_method 'gptq' are not supported; known is bitsandbytes"),
        *(({"quant_method": kind, "bits": 4}, None, rf"quant_method {kind!r} are not supported; known is")
          for kind in ("gptq", "awq", "fp8", "compressed-tensors", None)),
    ],
)  # fmt: skip
def test_a_method_or_published_form_that_is_not_supported_is_refused(llama, stored, method, message):
    if stored:
        change_config(llama, quantization_config=stored)
    with pytest.raises(CheckpointError, match=message):
        sinklens.load(llama, quantization=method, device="cpu")


def test_a_library_that_is_not_installed_is_named(llama, monkeypatch):
    monkeypatch.setattr("transformers.quantizers.quantizer_bnb_4bit.is_bitsandbytes_available", lambda *_: False)
    with pytest.raises(CheckpointError, match=r"could not load the quantized weights \(.*bitsandbytes"):
        sinklens.load(llama, quantization="bnb-nf4")


def test_a_published_config_has_transformers_names_and_no_fused_projections():
    raw = {"quantization_config": {"load_in_8bit": True, "llm_int8_skip_modules": ["model.transformer.ff_out"]}}
    found = published(raw, FAMILIES["llada"], "here")
    assert found is not None
    assert (found["llm_int8_skip_modules"], found["quant_method"]) == (["lm_head"], "bitsandbytes")
    with pytest.raises(CheckpointError, match="cannot be split"):
        published({"quantization_config": {"quant_method": "bitsandbytes"}}, FAMILIES["llada2"], "here")


def test_a_model_in_memory_cannot_be_quantized_or_divided_among_processes(llama):
    hf = sinklens.load(llama, check=False).release()
    hf.config.quantization_config = GPTQConfig(bits=4)
    with pytest.raises(CheckpointError, match="quant_method 'gptq' are not supported"):
        sinklens.load(hf)
    hf._tp_size = 2
    with pytest.raises(CheckpointError, match=r"divided among processes \(tp_plan\) cannot be hooked"):
        sinklens.load(hf)


@pytest.mark.extended
@NEEDS_BITSANDBYTES
def test_a_config_that_quantizes_nothing_is_refused(llama):
    config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["model", "lm_head"])
    with pytest.raises(CheckpointError, match="found none of its layers in this LlamaForCausalLM"):
        sinklens.load(llama, quantization=config)
