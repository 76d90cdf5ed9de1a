"""Planned weights of quantized checkpoints: bytes worked out by hand, and those that the libraries store."""

import json
from typing import Any

import pytest
import torch
from building import random_hf
from torch import nn

import sinklens
from sinklens.cli import main
from sinklens.errors import CheckpointError, SettingError
from sinklens.evaluation.run_memory import plan_run
from sinklens.evaluation.weight_forms import DOUBLE_NF4, INT8, NF4, Form

SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "mask_token_id": 99,
}  # fmt: skip
# Of a layer: q and o 128 × 128, k and v 64 × 128, gate and up 256 × 128, down 128 × 256.
VALUES = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128)  # of the linear layers
ROWS = COLUMNS = 2 * 1024
REST = 2 * (2 * 100 * 128 + 5 * 128)  # bytes of embedding, head and norms in bfloat16
GIVEN: dict[str, Any] = {"gen_length": 8, "prompt_length": 8}


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    """The config that torchao writes."""
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}}}


PER_ROW = {"granularity": {"_type": "PerRow", "_data": {"dim": -1}}}
INT4_OF_EXPERTS = torchao(
    "FqnToConfig",
    fqn_to_config={
        r"re:.*\.mlp\..*": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 64}},
        "model.layers.0.self_attn.q_proj": None,
        "_default": {"_type": "Int8WeightOnlyConfig", "_data": PER_ROW},
    },
)
MLP, Q = 2 * 3 * 256 * 128, 128 * 128
BLOCKS = 2 * (2 * 4 + 2 * 2 + 3 * 8)  # of 64 × 64
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "bitsandbytes int8": ({"load_in_8bit": True}, VALUES + 4 * ROWS),
    "bitsandbytes nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, VALUES // 2 + 4 * VALUES // 64),
    "bitsandbytes, without the MLPs": (
        {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]},
        2 * MLP + (VALUES - MLP) + 4 * 2 * (128 + 64 + 64 + 128),
    ),
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64},
        VALUES // 2 + VALUES // 64 * 2 + VALUES // 64 // 2 + 4 * COLUMNS,  # weights, scales, zero points, groups
    ),
    "gptq, 8 bits, a group per row": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1}, VALUES + ROWS * (2 + 1) + 4 * COLUMNS
    ),
    "gptq of queries": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "modules_in_block_to_quantize": [["self_attn.q_proj"]]},
        2 * (VALUES - 2 * Q) + 2 * (Q // 2 + Q // 64 * 2 + Q // 64 // 2 + 4 * 128),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, VALUES // 2 + VALUES // 64 * 2 + VALUES // 64 // 2),
    "awq of one layer": (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["model.layers.1"]},
        VALUES + VALUES // 4 + VALUES // 64 + VALUES // 64 // 4,
    ),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, VALUES + 4 * BLOCKS),
    "fp8, scales of a byte": (
        {"quant_method": "fp8", "weight_block_size": [64, 64], "scale_fmt": "ue8m0"}, VALUES + BLOCKS
    ),
    "fp8, a scale per matrix": ({"quant_method": "fp8", "weight_block_size": None}, VALUES + 4 * 14),
    "torchao int8": (torchao("Int8WeightOnlyConfig", **PER_ROW), VALUES + 5 * ROWS),
    "torchao float8": (torchao("Float8WeightOnlyConfig", **PER_ROW), VALUES + 4 * ROWS),
    "torchao int4": (torchao("Int4WeightOnlyConfig", group_size=64), VALUES // 2 + VALUES // 64 * 4),
    "torchao, by name": (INT4_OF_EXPERTS, MLP // 2 + MLP // 64 * 4 + 2 * Q + (VALUES - MLP - Q) + 5 * (2 * 384 - 128)),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of a Llama's config."""
    folder = tmp_path_factory.mktemp("plain")
    random_hf("llama", True, **SIZES).config.save_pretrained(folder)
    return folder


def with_config(plain, folder, config):
    """A copy of the config with a ``quantization_config``."""
    raw = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_published_checkpoint_is_planned_as_it_is_stored(case, plain, tmp_path):
    config, wanted = CASES[case]
    found = plan_run(with_config(plain, tmp_path, config), **GIVEN)
    assert found.weights == wanted + REST
    assert next(iter(found.alternatives)) == found.quantization != "none"
    assert found.parameters == VALUES + REST // 2
    assert found.unpacked in (2 * 256 * 128, 2 * Q)


def test_other_parts_of_the_plan_do_not_depend_on_the_quantization(plain, tmp_path):
    full = plan_run(plain, **GIVEN)
    packed = plan_run(with_config(plain, tmp_path, CASES["gptq"][0]), **GIVEN)
    assert (packed.step, packed.keys, packed.track, packed.flops) == (full.step, full.keys, full.track, full.flops)
    assert packed.moved < full.moved


def test_fp8_is_also_planned_for_cards_that_dequantize_it(plain, tmp_path):
    found = plan_run(with_config(plain, tmp_path, CASES["fp8"][0]), **GIVEN)
    assert found.alternatives["dequantized"] == (2 * VALUES + REST, 0)


@pytest.mark.extended
def test_experts_are_quantized_by_fp8_and_not_by_bitsandbytes(tmp_path):
    """8 experts of 3 · 64 × 128 in one layer, beside 4 · 128 × 128 of attention and an MLP-free rest."""
    hf = random_hf("qwen3_moe", True, **SIZES, num_experts=8, moe_intermediate_size=64)
    hf.config.save_pretrained(tmp_path / "plain")
    matrices = {name: value for name, value in hf.named_parameters() if name.endswith("_proj.weight")}
    inside, experts = sum(value.numel() for value in matrices.values()), 8 * 3 * 64 * 128
    rest = 2 * sum(value.numel() for value in hf.parameters()) - 2 * inside - 2 * experts
    blocks = sum(-(-rows // 64) * (columns // 64) for rows, columns in (value.shape for value in matrices.values()))
    for name, config, wanted in (
        ("a", CASES["fp8"][0], inside + experts + 4 * (blocks + 8 * 3 * 2)),
        ("b", {"load_in_8bit": True}, inside + 4 * sum(len(value) for value in matrices.values()) + 2 * experts),
    ):
        (tmp_path / name).mkdir()
        assert plan_run(with_config(tmp_path / "plain", tmp_path / name, config), **GIVEN).weights == wanted + rest
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointError, match=r"gptq quantizes linear layers, .* stacks its experts"):
        plan_run(with_config(tmp_path / "plain", tmp_path / "c", CASES["gptq"][0]), **GIVEN)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "compressed-tensors"}, r"quant_method 'compressed-tensors'; known are torchao, bitsandbytes"),
        ({"quant_method": "hqq"}, r"quant_method 'hqq'; known are"),
        ({"bits": 4}, r"quant_method None; known are"),
        ({"quant_method": "gptq", "bits": 5}, r"of gptq has bits 5; known: 2, 3, 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*down.*": {}}}, r"of gptq has dynamic"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, r"of gptq has group_size 0"),
        ({"quant_method": "awq", "bits": 3}, r"of awq has bits 3; known: 4"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, r"of fp8 has expert_dtype 'fp4'"),
        ({"quant_method": "bitsandbytes"}, r"of bitsandbytes has load_in_4bit and load_in_8bit None"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, r"torchao has quant_type .int4_weight_only"),
        (torchao("UIntXWeightOnlyConfig"), r"of torchao has _type 'UIntXWeightOnlyConfig'; known: Int8"),
        (torchao("Int8WeightOnlyConfig", granularity={"_type": "PerToken"}), r"has _type .PerToken.; known: None"),
    ],
)  # fmt: skip
def test_what_a_plan_does_not_know_is_refused_by_name(plain, tmp_path, config, text):
    with pytest.raises(CheckpointError, match=text):
        plan_run(with_config(plain, tmp_path, config), **GIVEN)


def test_a_quantized_checkpoint_is_not_quantized_again(plain, tmp_path):
    with pytest.raises(SettingError, match=r"quantized already, by gptq, so quantization='bnb-nf4' does not apply"):
        plan_run(with_config(plain, tmp_path, CASES["gptq"][0]), quantization="bnb-nf4", **GIVEN)


def test_the_command_prints_the_method_of_the_checkpoint(plain, tmp_path, capsys):
    main(["plan", str(with_config(plain, tmp_path, CASES["awq"][0])), "--prompt-length", "8", "--gen-length", "8"])
    text = capsys.readouterr().out
    assert "weights (awq, 4 bits):" in text
    assert "24 GiB: awq, 4 bits: 1 card" in text


def test_a_form_rounds_groups_and_bytes_up():
    assert Form(4, 20, 128).size(3, 200) == -(-(3 * 200 * 4 + 3 * 2 * 20) // 8)
    assert NF4.size(5, 13) == -(-(65 * 4 + 2 * 32) // 8)


# What the libraries store


def stored(weight: Any) -> int:
    """Bytes of the tensors of a torchao weight."""
    parts = [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
    return sum(part.numel() * part.element_size() for part in parts)


def test_torchao_stores_what_its_forms_say():
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    from sinklens.evaluation.weight_forms import _torchao_form

    model = sinklens.load(random_hf(dtype=torch.bfloat16), check=False)
    for config in (
        Int8WeightOnlyConfig(),
        Float8WeightOnlyConfig(),
        IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    ):
        layer = nn.Sequential(nn.Linear(256, 96, bias=False, dtype=torch.bfloat16))
        quantize_(layer, config)
        from torchao.core.config import config_to_dict

        assert _torchao_form(config_to_dict(config), model).size(96, 256) == stored(layer[0].weight)


def test_bitsandbytes_stores_what_its_forms_say():
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    for form, double in ((NF4, False), (DOUBLE_NF4, True)):
        layer = bnb.nn.Linear4bit(256, 128, bias=False, quant_type="nf4", compress_statistics=double)
        kept = {name: value.numel() * value.element_size() for name, value in layer.to("cpu").state_dict().items()}
        tables = ("quant_map", "nested_quant_map", "bitsandbytes__nf4")
        assert form.size(128, 256) == sum(size for name, size in kept.items() if not name.endswith(tables))
    assert INT8.size(3, 5) == 15 + 3 * 4
