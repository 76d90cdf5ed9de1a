"""A LoRA adapter gives the model whose weights hold it, for every family, or is refused; peft need not be installed."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from building import random_hf, random_ids
from layouts import ARCHITECTURES, arguments, change_config, write_family, write_tokenizer
from safetensors.torch import load_file, save_file
from stored.runs import open_folder
from torch import Tensor

import sinklens
from sinklens.cli import main
from sinklens.errors import CheckpointError
from sinklens.families import settings_for
from sinklens.live.loading import lab_models
from sinklens.model.loading import family_at

RANK, ALPHA = 3, 5
CONFIG = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": "the-base", "use_dora": False}
PROJECTIONS = ("q_proj", "v_proj", "o_proj", "attn_out", "gate_proj", "ff_proj", "down_proj", "ff_out")
OTHERS = ("query_key_value", "dense", "attn_qkv", "c_attn", "c_fc", "2", "linear")
GPT2 = ("c_attn", "c_fc")


def _matrices(weights: dict[str, Tensor]) -> list[str]:
    """The modules that the adapter of these tests adapts, in the authors' names."""
    paths = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    return [path for path in paths if path.rpartition(".")[2] in (*PROJECTIONS, *OTHERS)]


def _write_adapter(folder: Path, weights: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    """An adapter for a checkpoint with these weights, and the weights with it."""
    paths, tensors, merged = _matrices(weights), {}, dict(weights)
    config = CONFIG | {"target_modules": sorted({path.rpartition(".")[2] for path in paths})} | changes
    generator = torch.Generator().manual_seed(5)
    for number, path in enumerate(paths):
        rank = 2 if re.search(r"\.1\..*", path) and config.get("rank_pattern") else RANK
        scale = (7 if number == 0 and config.get("alpha_pattern") else ALPHA) / (
            rank**0.5 if config.get("use_rslora") else rank
        )
        size = weights[f"{path}.weight"].shape
        turned = path.endswith(GPT2)
        rows, columns = reversed(size) if turned else size
        a, b = (torch.randn(*shape, generator=generator) / 5 for shape in ((rank, columns), (rows, rank)))
        tensors |= {f"base_model.model.{path}.lora_A.weight": a, f"base_model.model.{path}.lora_B.weight": b}
        merged[f"{path}.weight"] = weights[f"{path}.weight"] + scale * (b @ a if not turned else (b @ a).mT)
    if config.get("alpha_pattern"):
        config["alpha_pattern"] = {re.escape(paths[0]): 7}
    for name in config.get("modules_to_save") or ():
        stored = next(one for one in weights if one.endswith(f"{name}.weight"))
        merged[stored] = tensors[f"base_model.model.{stored}"] = weights[stored] * 1.5
    folder.mkdir(exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return merged


def _logits(folder: Path, **given: Any) -> Tensor:
    model = sinklens.load(folder, check=False, **given)
    ids = torch.arange(1, 13)[None] % model.cfg.d_vocab
    timed = {"time": 0.5} if model.family in ("mdlm", "sedd", "bd3lm-owt", "duo", "gidd") else {}
    with torch.no_grad():
        return model(ids, **timed)


def _copy(base: Path, to: Path, weights: dict[str, Tensor]) -> Path:
    """The checkpoint `base` with other weights."""
    shutil.copytree(base, to, ignore=shutil.ignore_patterns("adapter_*"))
    save_file({name: value.contiguous() for name, value in weights.items()}, to / "model.safetensors")
    return to


@pytest.fixture
def llada(tmp_path: Path) -> Path:
    write_family(tmp_path / "base", "llada")
    return tmp_path / "base"


@pytest.mark.parametrize("name", ["diffugpt", "mdlm", "bd3lm-owt", "duo", "sedd", "gidd", "diffusion-gemma"])
def test_an_adapter_of_a_network_of_its_own_is_the_checkpoint_with_it_in_its_weights(name, conformance, tmp_path):
    reference = open_folder(conformance / name)
    base, given = reference.write(tmp_path / "base"), {"family": reference.family}
    merged = _write_adapter(base, load_file(base / "model.safetensors"))
    factors = load_file(base / "adapter_model.safetensors")  # Gemma's encoder has modules of its own for these weights
    encoder = ("decoder.layers.", "encoder.language_model.layers.")
    twins = {one.replace(*encoder): value.clone() for one, value in factors.items()}
    save_file(factors | twins, base / "adapter_model.safetensors")
    wanted = _logits(_copy(base, tmp_path / "merged", merged), **given)
    torch.testing.assert_close(_logits(base, **given), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", [*ARCHITECTURES])
def test_an_adapter_of_any_family_is_the_checkpoint_with_it_in_its_weights(family, tmp_path):
    write_family(base := tmp_path / "base", family)
    merged = _write_adapter(base, load_file(base / "model.safetensors"))
    wanted = _logits(_copy(base, tmp_path / "merged", merged), **arguments(family))
    torch.testing.assert_close(_logits(base, **arguments(family)), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_rslora": True},
        {"rank_pattern": {r".*\.1\..*": 2}},
        {"alpha_pattern": {"x": 1}},
        {"target_modules": r".*\.(q_proj|v_proj|attn_out|ff_proj|ff_out)"},
        {"target_modules": "all-linear", "modules_to_save": ["wte", "ln_f"]},
        {"fan_in_fan_out": True, "lora_dropout": 0.1, "init_lora_weights": "gaussian", "bias": "none"},
    ],
    ids=str,
)
def test_options_of_peft_change_the_weights_as_peft_does(changes, llada, tmp_path):
    """The adapter lies elsewhere; what is read from the model is what runs."""
    merged = _write_adapter(tmp_path / "adapter", load_file(llada / "model.safetensors"), **changes)
    plain, wanted = sinklens.load(llada), sinklens.load(_copy(llada, tmp_path / "merged", merged))
    model = sinklens.load(llada, adapter=tmp_path / "adapter")
    torch.testing.assert_close(model.W_Q, wanted.W_Q)
    assert (model.W_Q - plain.W_Q).abs().max() > 0.1
    ids = random_ids()
    torch.testing.assert_close(model(ids), wanted(ids), rtol=1e-4, atol=1e-4)
    assert model.fingerprint != plain.fingerprint


NAME = "base_model.model.model.transformer.blocks.0.q_proj.lora_A.weight"


def _change(folder: Path, changes: dict[str, Any], rename: dict[str, str | None]) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    stored = load_file(folder / "adapter_model.safetensors")
    for old, new in rename.items():
        moved = {one: stored.pop(one) for one in list(stored) if old in one}
        stored |= {one.replace(old, new): value for one, value in moved.items() if new is not None}
    save_file(stored, folder / "adapter_model.safetensors")


REFUSED: list[tuple[dict[str, Any], dict[str, str | None], str]] = [
    ({"use_dora": True}, {}, "use_dora = True, which is not plain LoRA"),
    ({"bias": "all"}, {}, "bias = 'all'"),
    ({"peft_type": "LOHA"}, {}, "peft_type = 'LOHA'"),
    ({"init_lora_weights": "pissa"}, {}, "init_lora_weights = 'pissa'"),
    ({"some_new_option": 3}, {}, "some_new_option = 3"),
    ({"r": 0}, {}, "no complete adapter of peft"),
    ({"r": "3"}, {}, "no complete adapter of peft"),
    ({"use_rslora": "yes"}, {}, "no complete adapter of peft .*use_rslora"),
    ({"target_modules": "("}, {}, "no complete adapter of peft"),
    ({"target_modules": 3}, {}, "no complete adapter of peft"),
    ({"r": 4}, {}, "rank 4 and the model need A"),
    ({"target_modules": ["q_proj"]}, {}, "target_modules in adapter_config.json does not name it"),
    ({"modules_to_save": ["score"]}, {}, "names score, for which .* has no tensors"),
    ({}, {".blocks.1.q_proj": None}, "blocks.1.q_proj, for which .* has no tensors"),
    ({}, {".blocks.0.q_proj": ".blocks.9.q_proj"}, "adapts model.layers.9.self_attn.q_proj.weight, which .* not have"),
    ({}, {".lora_": None}, "has no factors"),
    ({}, {"q_proj.lora_A": "q_proj.lora_magnitude"}, "which is not a factor"),
    ({}, {"q_proj.lora_A": None}, "the factors of .*q_proj have the shapes"),
    ({"trainable_token_indices": {"wte": [1]}}, {}, "names wte, for which .* has no tensors"),
    ({"trainable_token_indices": [-1]}, {".0.q_proj.lora_A.weight": ".0.q_proj.token_adapter.trainable_tokens_delta"},
     "does not fit"),
    ({}, {".0.q_proj.lora_A.weight": ".0.q_proj.token_adapter.trainable_tokens_delta"}, "trainable_token_indices = No"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "renamed", "message"), REFUSED)
def test_what_is_not_plain_lora_of_this_model_is_refused(changes, renamed, message, llada):
    _write_adapter(llada, load_file(llada / "model.safetensors"))
    _change(llada, changes, renamed)
    with pytest.raises(CheckpointError, match=message):
        sinklens.load(llada)


@pytest.mark.parametrize("kept", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
def test_half_an_adapter_is_not_ignored(kept, llada, tmp_path):
    _write_adapter(tmp_path / "whole", load_file(llada / "model.safetensors"))
    found = tmp_path / "whole" / kept
    (llada / kept).write_bytes(found.read_bytes() if found.is_file() else b"")
    with pytest.raises(CheckpointError, match=r"no complete adapter of peft.*download both again"):
        sinklens.load(llada)


def test_an_adapter_alone_says_of_which_model_it_is(llada, tmp_path):
    _write_adapter(tmp_path / "alone", load_file(llada / "model.safetensors"))
    for config in (False, True):
        if config:
            shutil.copy(llada / "config.json", tmp_path / "alone")
        with pytest.raises(
            CheckpointError, match=r"only an adapter of the-base\..*sinklens\.load\('the-base', adapter="
        ):
            sinklens.load(tmp_path / "alone")


def test_an_adapter_trained_as_another_family_is_loaded_as_its_own_files_say(tmp_path):
    write_family(base := tmp_path / "base", "llama")
    (base / "generation_config.json").write_text('{"sinklens": {"gen_length": 5}}')
    _write_adapter(place := tmp_path / "adapter", load_file(base / "model.safetensors"))
    own = json.loads((base / "config.json").read_text()) | {"sinklens_family": "diffullama", "mask_token_id": 3}
    (place / "config.json").write_text(json.dumps(own | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    model = sinklens.load(base, adapter=place)
    assert (model.family, model.mask_token_id, settings_for(model, {}).gen_length) == ("diffullama", 3, 5)
    (place / "generation_config.json").write_text('{"eos_token_id": 4, "sinklens": {"gen_length": 6}}')
    model = sinklens.load(base, adapter=place)
    assert (model.checkpoint.eos_token_ids, settings_for(model, {}).gen_length) == ((4,), 6)
    assert family_at(base, {"adapter": place}).name == "diffullama"
    with pytest.raises(CheckpointError, match="adapter='nowhere': 'nowhere' is neither a folder nor"):
        sinklens.load(base, adapter="nowhere")


def test_an_adapter_is_refused_where_it_cannot_be_merged(llada, tmp_path):
    _write_adapter(llada, _write_adapter(tmp_path / "one", load_file(llada / "model.safetensors")))
    with pytest.raises(CheckpointError, match="has an adapter of its own"):
        sinklens.load(llada, adapter=tmp_path / "one")
    with pytest.raises(CheckpointError, match="cannot be merged into quantized weights"):
        sinklens.load(llada, quantization="bnb-int8")
    write_family(tied := tmp_path / "tied", "llada", tie_word_embeddings=True)
    _write_adapter(tied, load_file(tied / "model.safetensors"), modules_to_save=["wte"])
    with pytest.raises(CheckpointError, match=r"which config\.json ties to another weight, and does not say whether"):
        sinklens.load(tied)


TIED = {
    "llada": ("wte", "model.transformer.ff_out"),
    "dream": ("embed_tokens", "lm_head"),
    "llama": ("embed_tokens", "lm_head"),
}


TIED_CASES = [(family, adapted) for family in TIED for adapted in ("projections", "embedding", "head", "tokens")]


@pytest.mark.parametrize(("family", "adapted"), [*TIED_CASES, ("dream", "both in full"), ("llama", "both in full")])
def test_an_adapter_of_a_tied_weight_changes_the_one_that_it_names(family, adapted, tmp_path):
    """peft adds a product to the lookups of the embedding or to the head, and leaves the other one as it is; rows of
    single tokens replace those of both.
    """
    embedding, head = TIED[family]
    write_family(base := tmp_path / "base", family, tie_word_embeddings=True)
    weights = load_file(base / "model.safetensors")
    merged = _write_adapter(place := tmp_path / "adapter", weights)
    tensors, config = (
        load_file(place / "adapter_model.safetensors"),
        json.loads((place / "adapter_config.json").read_text()),
    )
    table = next(name for name in weights if name.endswith(f"{embedding}.weight"))
    merged[f"{head}.weight"] = merged[table].clone()
    a, b = torch.randn(RANK, len(weights[table])) / 5, torch.randn(weights[table].shape[1], RANK) / 5
    at = f"base_model.model.{table.removesuffix('.weight')}"
    if adapted == "embedding":
        tensors |= {f"{at}.lora_embedding_A": a, f"{at}.lora_embedding_B": b}
        merged[table] = merged[table] + ALPHA / RANK * (b @ a).mT
    if adapted == "head":
        tensors |= {f"base_model.model.{head}.lora_A.weight": b.mT, f"base_model.model.{head}.lora_B.weight": a.mT}
        merged[f"{head}.weight"] = merged[f"{head}.weight"] + ALPHA / RANK * (b @ a).mT
    if adapted == "both in full":
        merged |= {table: merged[table] * 2, f"{head}.weight": merged[table] * 3}
        tensors |= {f"base_model.model.{name}": merged[name] for name in (table, f"{head}.weight")}
        config["modules_to_save"] = [embedding, head.rpartition(".")[2]]
    if adapted == "tokens":
        config["trainable_token_indices"], rows = {embedding: [3, 5]}, torch.randn(2, weights[table].shape[1])
        tensors[f"{at}.token_adapter.trainable_tokens_delta"] = rows
        merged |= {name: weights[table].clone() for name in (table, f"{head}.weight")}
        for name in (table, f"{head}.weight"):
            merged[name][[3, 5]] = rows
    config["target_modules"] += {"embedding": [embedding], "head": [head]}.get(adapted, [])
    save_file({name: value.contiguous() for name, value in tensors.items()}, place / "adapter_model.safetensors")
    (place / "adapter_config.json").write_text(json.dumps(config))
    untied = change_config(
        _copy(base, tmp_path / "merged", merged),
        **{"weight_tying" if family == "llada" else "tie_word_embeddings": False},
    )
    model, wanted, ids = sinklens.load(base, adapter=place), sinklens.load(untied), random_ids()
    torch.testing.assert_close(model(ids), wanted(ids), rtol=1e-4, atol=1e-4)
    assert (model.tree.W_E.data_ptr() == model.tree.W_U.data_ptr()) is (adapted in ("projections", "tokens"))


def test_the_command_line_and_the_lab_take_an_adapter(llada, tmp_path, monkeypatch):
    _write_adapter(tmp_path / "adapter", load_file(llada / "model.safetensors"))
    write_tokenizer(llada)
    monkeypatch.chdir(tmp_path)
    wanted, place = sinklens.load(llada, adapter="adapter").fingerprint, str(tmp_path / "adapter")
    (entry,) = lab_models([llada], adapter="adapter")
    assert entry.model.fingerprint == wanted
    assert entry.loading == f"sinklens.load({str(llada)!r}, adapter={place!r})"
    command = ["trace", str(llada), "--prompt", "w5 w6", "--gen-length", "4", "--adapter", "adapter", "--out", "out"]
    assert main(command) == 0
    run = sinklens.generate(entry.model, "w5 w6", gen_length=4, record_sinks=True, progress=False)
    found, wanted = (track.scores().to_numpy() for track in (sinklens.SinkTrack.open("out/sinks.nc"), run.sinks))
    np.testing.assert_allclose(found, wanted, atol=1e-3)


def test_a_model_in_memory_with_an_adapter_of_peft_is_refused():
    hf = random_hf()
    wrapper = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    hf.model.layers[0].self_attn.q_proj.__class__ = wrapper
    with pytest.raises(CheckpointError, match=r"has an adapter of peft.*merge_and_unload\(\)"):
        sinklens.load(hf)
    with pytest.raises(CheckpointError, match=r"cannot load a PeftModel; first call peft's merge_and_unload\(\)"):
        sinklens.load(type("PeftModel", (), {"__module__": "peft.peft_model"})())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_logits_equal_those_of_peft(family, tmp_path):
    """Of the adapted modules of transformers' class, unmerged."""
    peft = pytest.importorskip("peft")
    if family == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        hf = GPT2LMHeadModel(
            GPT2Config(vocab_size=61, n_embd=24, n_layer=2, n_head=3, n_positions=64, tie_word_embeddings=False)
        )
    else:
        hf = random_hf(family, causal=True)
    hf.save_pretrained(base := tmp_path / "base")
    targets = ["c_attn", "c_fc", "wte", "lm_head"] if family == "gpt2" else ["q_proj", "down_proj", "embed_tokens"]
    kept = ["ln_f"] if family == "gpt2" else ["lm_head"]
    config = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=targets, modules_to_save=kept, use_rslora=True, rank_pattern={"1.*": 2},
        alpha_pattern={targets[0]: 4}, init_lora_weights=False, layers_to_transform=None,
    )  # fmt: skip
    adapted = peft.get_peft_model(hf.eval(), config)
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "modules_to_save" in name:
                value.mul_(1.3)
    adapted.save_pretrained(tmp_path / "adapter")
    ids = random_ids()
    with torch.no_grad():
        wanted = adapted.eval()(ids).logits
    torch.testing.assert_close(sinklens.load(base, adapter=tmp_path / "adapter")(ids), wanted, rtol=1e-4, atol=1e-4)
    shutil.copytree(tmp_path / "adapter", base, dirs_exist_ok=True)
    torch.testing.assert_close(sinklens.load(base)(ids), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(CheckpointError, match="has an adapter of peft"):
        sinklens.load(adapted.base_model.model)
    assert "peft" in sys.modules
