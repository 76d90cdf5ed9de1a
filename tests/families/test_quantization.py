"""A quantized model computes with the matrices that it shows, and says which of its matrices are quantized."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from building import random_ids
from layouts import change_config, write_family
from packed_layouts import pack_folder
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

import sinklens
from sinklens.errors import CheckpointError, SettingError
from sinklens.families import FAMILIES
from sinklens.hooks.offload import value_of, weight_of
from sinklens.hooks.quantized import form_of, scaled_blocks
from sinklens.model.files import Weights
from sinklens.model.quantization import (
    METHODS,
    check_quantized,
    published,
    quantization_of,
    unpacked,
)

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
WEIGHT_ONLY = ("torchao-int8", "torchao-int4", "torchao-float8", "bnb-nf4")


def _needs(method: str) -> None:
    if method.startswith("bnb"):
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    else:
        pytest.importorskip("torchao", reason="torchao is not installed")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A Llama checkpoint whose rows 4-bit groups divide."""
    write_family(tmp_path / "llama", "llama", **SIZES)
    return tmp_path / "llama"


def _with_shown_matrices(folder: Path, quantized: Any) -> Any:
    """The full-precision model, with the matrices that the quantized one shows in place of its own."""
    plain = sinklens.load(folder)
    matrices = {
        name: quantized.tree.hf.get_submodule(name.rpartition(".")[0]) for name in quantized.quantization.quantized
    }
    for name, module in matrices.items():
        path, _, attribute = name.rpartition(".")
        shown = value_of(module, attribute)
        stored = getattr(plain.tree.hf.get_submodule(path), attribute)
        assert shown.shape == stored.shape
        assert 0 < (shown - stored).abs().max() < 0.3 * stored.abs().max()
        stored.data = shown.detach().clone().to(stored.dtype)
    return plain


@pytest.mark.extended
@pytest.mark.parametrize("method", WEIGHT_ONLY)
def test_a_quantized_model_computes_what_a_plain_one_with_its_matrices_computes(llama, method):
    _needs(method)
    quantized = sinklens.load(llama, quantization=method)  # with the self-check
    plain = _with_shown_matrices(llama, quantized)
    ids = random_ids()
    with torch.no_grad():
        wanted = plain(ids)
        bound = 0.05 if method.startswith("bnb") else 1e-4  # bitsandbytes' kernels for a CPU multiply in bfloat16
        assert (quantized(ids) - wanted).abs().max() < bound * wanted.abs().max()
    torch.testing.assert_close(quantized.W_Q, plain.W_Q)
    torch.testing.assert_close(quantized.W_O, plain.W_O)


@pytest.mark.extended
@pytest.mark.parametrize("method", ["torchao-int8", "torchao-float8", "bnb-nf4"])
def test_stacked_experts_are_quantized_by_torchao_and_left_by_bitsandbytes(tmp_path, method):
    _needs(method)
    write_family(tmp_path, "qwen3-moe", **SIZES)
    if method.startswith("bnb"):
        found = sinklens.load(tmp_path, quantization=method, check=False).quantization
        assert "bitsandbytes does not quantize Qwen3MoeExperts" in str(found)
        assert not any("experts" in name for name in found.quantized)
        return
    quantized = sinklens.load(tmp_path, quantization=method)
    assert any("experts" in name for name in quantized.quantization.quantized)
    plain = _with_shown_matrices(tmp_path, quantized)
    ids = random_ids()
    with torch.no_grad():
        torch.testing.assert_close(quantized(ids), plain(ids), rtol=1e-3, atol=1e-3)


@pytest.mark.extended
def test_a_network_with_noise_levels_is_quantized_by_bitsandbytes():
    """Its embedding of the time takes the element type of what stays in floating point."""
    _needs("bnb-int8")
    model = sinklens.load("tiny-mdlm", quantization="bnb-int8")  # with the self-check
    assert any("time_embed" in name for name in model.quantization.quantized)


@pytest.mark.extended
def test_what_is_stored_in_one_piece_is_split_before_bitsandbytes_quantizes_it(tmp_path):
    """LLaDA 2 stores queries, keys and values as one matrix."""
    _needs("bnb-int8")
    write_family(tmp_path, "llada2", **SIZES)
    quantized = sinklens.load(tmp_path, quantization="bnb-int8", check=False)
    _with_shown_matrices(tmp_path, quantized)
    names = {name.split(".")[-2] for name in quantized.quantization.quantized}
    assert {"q_proj", "k_proj", "v_proj"} < names


@pytest.mark.extended
def test_an_edit_of_a_head_s_output_adds_its_change_to_what_the_quantized_projection_computed(llama):
    """LLM.int8 rounds its inputs too, so the heads' outputs do not add up to the layer's."""
    _needs("bnb-int8")
    model, ids = sinklens.load(llama, quantization="bnb-int8"), random_ids()
    place, out = "blocks.0.attn.hook_result", "blocks.0.hook_attn_out"
    _, before = model.run_with_cache(ids, names_filter=[place, out])
    seen = []
    hooks = [
        (place, lambda value, hook: value * torch.tensor([2.0, 1, 1, 1])[:, None]),
        (out, lambda value, hook: seen.append(value.clone())),
    ]
    with torch.no_grad():
        model.run_with_hooks(ids, fwd_hooks=hooks)
    torch.testing.assert_close(seen[0], before[out] + before[place][:, :, 0], rtol=1e-4, atol=1e-5)


# Published checkpoints


@pytest.mark.extended
@pytest.mark.parametrize("method", ["torchao-int8", "bnb-int8", "bnb-nf4"])
def test_a_published_quantized_checkpoint_loads_with_the_same_matrices(llama, tmp_path, method):
    _needs(method)
    made, again = (sinklens.load(llama, quantization=method, check=False) for _ in range(2))
    assert made.fingerprint == again.fingerprint != sinklens.load(llama, check=False).fingerprint
    kept, ids = made.quantization, random_ids()
    assert kept.kept == {"lm_head.weight": "the language-model head stays in floating point"}
    assert len(kept.quantized) == 7 * made.cfg.n_layers
    with torch.no_grad():
        wanted = made(ids)
    made.release().save_pretrained(tmp_path / "published")
    loaded = sinklens.load(tmp_path / "published")
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids), wanted, rtol=1e-4, atol=1e-5)
    assert loaded.quantization.quantized == kept.quantized
    if method == "bnb-nf4":
        file = tmp_path / "published" / "model.safetensors"
        weights = load_file(file)
        save_file({name: value for name, value in weights.items() if "layers.0.mlp.up_proj.weight." not in name}, file)
        with pytest.raises(CheckpointError, match=r"up_proj.weight is quantized, but the files have no scales"):
            sinklens.load(tmp_path / "published")


def _headers(shapes: dict[str, tuple[int, ...]], packed: set[str]) -> Weights:
    return Weights(shapes, torch.float16, {name: name for name in shapes}, frozenset(packed))


def test_the_headers_of_gptq_and_awq_files_are_those_of_the_matrices():
    """64 × 32 values of 4 bits: eight in a 32-bit word, along the rows in GPTQ, along the columns in AWQ."""
    expected = {"a.q_proj.weight": (32, 64), "a.norm.weight": (64,)}
    for kind, shape in (("gptq", (8, 32)), ("awq", (64, 4))):
        stored = {
            "a.q_proj.qweight": shape,
            "a.q_proj.qzeros": (1, 4),
            "a.q_proj.scales": (1, 32),
            "a.norm.weight": (64,),
        }
        found = unpacked(_headers(stored, {"a.q_proj.qweight", "a.q_proj.qzeros"}), kind, expected, "here")
        assert found.shapes == expected


@pytest.mark.extended
@pytest.mark.parametrize("family", ["llama", "llada", "nemotron-diffusion"])
@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_gptq_and_awq_checkpoints_compute_with_the_matrices_that_they_store(tmp_path, kind, family):
    """Packed by hand; the kernels multiply in half precision."""
    pytest.importorskip("gptqmodel", reason="gptqmodel is not installed")
    for name in ("packed", "plain"):
        write_family(tmp_path / name, family, **SIZES)
    matrices = pack_folder(tmp_path / "packed", kind)
    save_file(matrices, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    quantized, plain = (sinklens.load(tmp_path / name, dtype="float32") for name in ("packed", "plain"))
    assert len(quantized.quantization.quantized) == 7 * quantized.cfg.n_layers
    ids = random_ids()
    with torch.no_grad():
        wanted = plain(ids)
        assert (quantized(ids) - wanted).abs().max() < 0.01 * wanted.abs().max()
    for name in ("W_Q", "W_O", "W_in"):  # scale · (q − zero), of which the kernel makes half precision
        torch.testing.assert_close(getattr(quantized, name), getattr(plain, name), rtol=1e-3, atol=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_a_layer_that_config_json_calls_quantized_and_the_files_do_not_is_refused(tmp_path, kind):
    """transformers would leave its packed numbers as they are in fresh memory, with a warning."""
    pytest.importorskip("gptqmodel", reason="gptqmodel is not installed")
    write_family(tmp_path, "llama", **SIZES)
    pack_folder(tmp_path, kind, layers=r"(q|k|v|o|gate|up)_proj\.weight$")
    with pytest.raises(CheckpointError, match=r"mlp.down_proj is quantized, but the files do not have its q"):
        sinklens.load(tmp_path, dtype="float32")


def test_fp8_files_are_dequantized_without_a_gpu(llama):
    """One scale for each block of 32 × 32 values, as transformers' fp8 checkpoints have."""
    if torch.cuda.is_available():
        pytest.skip("the GPU check loads fp8 weights")
    file = llama / "model.safetensors"
    stored = load_file(file)
    plain = {}
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        weight = stored[name].float()
        blocks = weight.unfold(0, 16, 16).unfold(1, 16, 16)
        scale = blocks.abs().amax(dim=(-1, -2)) / 448
        packed = (weight / scale.repeat_interleave(16, 0).repeat_interleave(16, 1)).to(torch.float8_e4m3fn)
        stored |= {name: packed, name.replace("weight", "weight_scale_inv"): scale}
        plain[name] = scaled_blocks(packed, scale)
    save_file(stored, file, metadata={"format": "pt"})
    change_config(llama, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    model = sinklens.load(llama, dtype="float32")
    for name, wanted in plain.items():
        torch.testing.assert_close(model.tree.hf.get_parameter(name).data, wanted)
    assert "dequantized while it was loaded" in str(model.quantization)


# Refusals


PLAIN_LLADA2 = {"hidden_size": 24}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("llada2", PLAIN_LLADA2, "torchao-int8", r"query_key_value.weight in one piece, of which .* first part only"),
    ("llada2", PLAIN_LLADA2, "fp8", r"query_key_value.weight in one piece, of which .* first part only"),
    ("llama", SIZES | {"intermediate_size": 40}, "torchao-int4", r"of 32, and .*mlp.down_proj.weight is \[64, 40\]"),
    ("llama", SIZES | {"intermediate_size": 96}, "bnb-nf4", r"of 64, and .*mlp.down_proj.weight is \[64, 96\]"),
    ("llama", SIZES, "torchao-int9", r"'torchao-int9' is unknown; choose one of torchao-int8, torchao-int4"),
    ("llama", SIZES, "fp8", r"'fp8' needs a GPU of compute capability 8.9"),
]


@pytest.mark.parametrize(("family", "sizes", "method", "message"), REFUSED)
def test_a_method_that_does_not_apply_is_refused(tmp_path, family, sizes, method, message):
    write_family(tmp_path, family, **sizes)
    with pytest.raises(CheckpointError, match=message):
        sinklens.load(tmp_path, quantization=method, device="cpu")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("gptq", "gptq weights need .*gptqmodel.*pip install"),
        ("awq", "awq weights need .*gptqmodel.*pip install"),
        ("aqlm", "quant_method 'aqlm'; known are torchao, bitsandbytes, fp8, gptq, awq"),
    ],
)
def test_a_published_method_that_is_unknown_or_not_installed_is_named(llama, kind, message, monkeypatch):
    monkeypatch.setattr("sinklens.model.quantization.find_spec", lambda name: None)
    change_config(llama, quantization_config={"quant_method": kind, "bits": 4})
    with pytest.raises(CheckpointError, match=message):
        sinklens.load(llama)


def test_a_published_config_has_transformers_names_and_no_fused_projections():
    raw = {"quantization_config": {"load_in_8bit": True, "llm_int8_skip_modules": ["model.transformer.ff_out"]}}
    found = published(raw, FAMILIES["llada"], "here", installed=False)
    assert found is not None
    assert (found["llm_int8_skip_modules"], found["quant_method"]) == (["lm_head"], "bitsandbytes")
    with pytest.raises(CheckpointError, match=r"query_key_value.weight in one piece, which cannot be split"):
        published({"quantization_config": {"quant_method": "fp8"}}, FAMILIES["llada2"], "here")


Q, EXPERT = "a.q_proj", "mlp.experts.3.up_proj"
STACKED = r"an expert quantized by .*, and transformers reads .* linear layers"
PACKED: list[tuple[str, dict[str, tuple[int, ...]], str]] = [
    ("gptq", {f"{Q}.qweight": (7, 32), f"{Q}.qzeros": (1, 4), f"{Q}.scales": (1, 32)},
     "224 packed numbers, which cannot be the 2048 values"),
    ("gptq", {f"{Q}.qzeros": (1, 4), f"{Q}.scales": (1, 32)}, r"scales for a.q_proj, but not its weight"),
    ("gptq", {f"{EXPERT}.qweight": (256, 1), f"{EXPERT}.scales": (1, 32)}, STACKED),
    ("awq", {f"{EXPERT}.qweight": (256, 1), f"{EXPERT}.scales": (1, 32)}, STACKED),
    ("bitsandbytes", {f"{EXPERT}.weight": (256, 1), f"{EXPERT}.weight.absmax": (1, 32)}, STACKED),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "stored", "message"), PACKED)
def test_packed_matrices_that_do_not_fit_are_refused(kind, stored, message):
    packed = {name for name in stored if name.endswith(("qweight", ".weight"))}
    with pytest.raises(CheckpointError, match=message):
        unpacked(_headers(stored, packed), kind, {f"{Q}.weight": (32, 64), f"{EXPERT}.weight": (32, 64)}, "here")


def test_a_model_in_memory_cannot_be_quantized_or_divided_among_processes(llama):
    hf = sinklens.load(llama, check=False).release()
    with pytest.raises(CheckpointError, match="quantization applies only while loading"):
        sinklens.load(hf, quantization="torchao-int8")
    hf._tp_size = 2
    with pytest.raises(CheckpointError, match=r"divided among processes \(tp_plan\) cannot be hooked"):
        sinklens.load(hf)


def test_a_model_without_linear_layers_is_refused():
    """GPT-2's projections are of a class of their own, and torchao quantizes linear layers."""
    hf = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=50))
    found = quantization_of(hf, "torchao-int8")
    with pytest.raises(CheckpointError, match=r"torchao-int8 quantizes none of .*does not quantize Conv1D"):
        check_quantized(found, "here")


def test_a_packed_layer_shows_the_matrix_by_which_it_multiplies():
    class Packed(torch.nn.Linear):
        """Any kernel: its matrix is not in a parameter that could be read."""

        def __init__(self) -> None:
            super().__init__(5, 3)
            self._hidden = [self.weight.detach().clone()]
            del self.weight
            self.register_buffer("qweight", torch.zeros(1, 3, dtype=torch.int32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            product = x @ self._hidden[0].T
            return product if self.bias is None else product + self.bias

    layer = Packed()
    layer.__dict__["sinklens_dtype"] = torch.float32
    torch.testing.assert_close(weight_of(layer), layer._hidden[0])
    layer.bias = None
    torch.testing.assert_close(weight_of(layer), layer._hidden[0])


def test_a_packed_layer_without_a_number_of_inputs_refuses_to_show_its_matrix():
    layer = type("TritonLinear", (torch.nn.Module,), {})()
    layer.register_buffer("qweight", torch.zeros(8, 32, dtype=torch.int32))
    assert form_of(layer) == "packed TritonLinear"
    with pytest.raises(SettingError, match=r"TritonLinear layer is packed for its kernel .* W_Q"):
        weight_of(layer)


def test_one_scale_per_block_or_in_all_multiplies_a_weight():
    weight = torch.arange(12.0).view(3, 4)
    scale = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
    wanted = torch.stack(
        [
            row * torch.tensor([[1, 1, 10, 10], [1, 1, 10, 10], [100, 100, 1000, 1000]][number])
            for number, row in enumerate(weight)
        ]
    )
    torch.testing.assert_close(scaled_blocks(weight, scale), wanted)
    torch.testing.assert_close(scaled_blocks(weight, torch.tensor(3.0)), 3 * weight)


def test_every_method_has_a_name_in_the_argument_s_documentation():
    text = json.dumps(sinklens.load.__doc__)
    assert all(name in text for name in METHODS)


def test_the_table_of_quantizers_has_every_family_once():
    text = (Path(__file__).parents[2] / "docs" / "concepts" / "large-models.md").read_text()
    rows = text.split("| class (families) |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    found = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert sorted(found) == sorted(FAMILIES)
    assert {row.count("|") for row in rows} == {9}
    assert not any(cell.strip() in ("", "?") for row in rows for cell in row.split("|")[1:-1])
