"""A GGUF file loads as the model that it was written from, or is refused with its name.

The files are written as llama.cpp's converter writes them: gguf's own table names the tensors, and the rows of queries
and keys are reordered by a list of indices written out here.
"""

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from building import random_hf, random_ids
from gguf.quants import dequantize, quantize
from layouts import eager_logits, llada_names
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

import sinklens
from sinklens.errors import CheckpointError, CheckpointWarning, SelfCheckError
from sinklens.model.gguf import converted

Type = gguf.GGMLQuantizationType
KIND = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "llada": "llama", "dream": "qwen2"}
SIZES = {"hidden_size": 64, "head_dim": 16, "num_attention_heads": 4, "intermediate_size": 96}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def write(file: Path, name: str, stored: Type = Type.F32, change: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Write a GGUF file; returns the transformers model, which gets the values that the file stores.

    Args:
        change: metadata keys that get another value.
    """
    diffuses = name in ("llada", "dream")
    hf: Any = random_hf(KIND[name], not diffuses, **SIZES | settings)
    layers, own = hf.config.num_hidden_layers, hf.state_dict()
    metadata = {
        "block_count": layers, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0, "rope.dimension_count": 16, "attention.key_length": 16, "vocab_size": 61,
    }  # fmt: skip
    metadata = {f"{name}.{key}": value for key, value in metadata.items()} | {"tokenizer.ggml.eos_token_id": 2}
    own_keys = {
        "attention.causal": False,
        "diffusion.shift_logits": name == "dream",
        "tokenizer.ggml.mask_token_id": 60,
    }
    metadata |= {f"{name}.{key}" if key == "attention.causal" else key: own_keys[key] for key in own_keys if diffuses}
    writer = gguf.GGUFWriter(file, (change or {}).pop("general.architecture", name))
    for key, value in (metadata | (change or {})).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    places = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, name.upper()), layers)
    tied = hf.config.tie_word_embeddings
    names = llada_names(layers) if name == "llada" else {one: one for one in own if not tied or one != "lm_head.weight"}
    for public, ours in names.items():
        kind, value = stored if own[ours].ndim == 2 else Type.F32, own[ours].numpy()
        rows = np.arange(len(value))
        if name in ("llama", "llada") and ("q_proj" in public or "k_proj" in public):
            rows = rows.reshape(-1, 2, 8).swapaxes(1, 2).ravel()  # 0, 8, 1, 9, ...: those that are rotated together
        path, role = public.rsplit(".", 1)
        writer.add_tensor(f"{places.get_name(path)}.{role}", quantize(value[rows], kind), raw_dtype=kind)
        own[ours].copy_(torch.from_numpy(dequantize(quantize(value, kind), kind)))
    if "rope_parameters" in settings:
        plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
        writer.add_tensor("rope_freqs.weight", (plain / hf.model.rotary_emb.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return hf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which converted files are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sinklens" / "gguf"


@pytest.mark.parametrize(
    ("name", "stored", "settings"),
    [
        *((name, Type.F32, {}) for name in KIND),
        *(("llama", stored, {}) for stored in (Type.F16, Type.BF16, Type.Q8_0, Type.Q5_0, Type.Q4_1)),
        ("llada", Type.Q8_0, {}),
        ("qwen3", Type.F32, {"tie_word_embeddings": True}),
        ("llama", Type.F32, {"rope_parameters": LLAMA3}),
    ],
    ids=str,
)
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_written_from(tmp_path, name, stored, settings):
    hf = write(tmp_path / "model.gguf", name, stored, **settings)
    model, ids = sinklens.load(tmp_path / "model.gguf"), random_ids(length=40)
    assert (model.family, model.mask_token_id) == (name, 60 if name in ("llada", "dream") else None)
    assert model.eos_token_ids == (2,)
    torch.testing.assert_close(dict(model.tree.hf.state_dict()), dict(hf.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(model(ids), eager_logits(hf, ids, model.mask_token_id is None), rtol=1e-4, atol=1e-4)


def test_a_file_is_converted_once_and_a_folder_of_one_file_is_that_file(tmp_path, cache):
    one = tmp_path / "files" / "one.gguf"
    one.parent.mkdir()
    write(one, "qwen2")
    sinklens.load(one.parent)
    (made,) = cache.iterdir()
    (made / "model.safetensors").rename(made / "kept.safetensors")
    assert converted(one) == made
    assert (made / "kept.safetensors").is_file()
    assert converted(one, tmp_path / "here") == tmp_path / "here"
    with pytest.raises(CheckpointError, match=r"here'? \(OSError\)"):
        converted(one, tmp_path / "here")
    write(one.with_name("two.gguf"), "qwen3")
    with pytest.raises(CheckpointError, match="files holds 2 GGUF files; pass the path of one of them"):
        sinklens.load(one.parent)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "qwen3",
            {"general.architecture": "gemma3"},
            "its architecture 'gemma3' is not one of llama, qwen2",
        ),
        ("llama", {"general.type": "adapter"}, "general.type = 'adapter' cannot be carried over"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn' cannot be carried over"),
        ("llama", {"llama.expert_count": 8}, "llama.expert_count = 8 cannot be carried over"),
        ("qwen2", {"qwen2.rope.dimension_count": 8}, "qwen2.rope.dimension_count = 8 cannot be carried over"),
        ("qwen2", {"split.count": 2}, "split.count = 2 cannot be carried over"),
        ("dream", {"diffusion.shift_logits": False}, "diffusion.shift_logits = False cannot be carried over"),
        ("qwen2", {"diffusion.shift_logits": False}, "diffusion.shift_logits = False cannot be carried over"),
        ("llama", {"llama.attention.causal": False}, r"is_causal is False, .*'a2d-llama' \(bidirectional\)"),
        ("llada", {"llada.attention.causal": True}, "is_causal is True"),
        ("qwen2", {"tokenizer.ggml.mask_token_id": 60}, "it has mask_token_id, which causal models lack"),
        ("llama", {"llama.block_count": 2}, r"9 weights have no place in the model"),
        ("llama", {"llama.attention.head_count": 0}, "cannot be converted to a checkpoint folder: .*ZeroDivisionError"),
    ],
)
def test_a_file_that_would_be_read_as_another_model_is_refused(tmp_path, name, change, message):
    write(tmp_path / "model.gguf", name, change=change)
    with pytest.raises(CheckpointError, match=message):
        sinklens.load(tmp_path / "model.gguf")


# The tokenizer

TEXTS = ["It's 1234 words,  and\nmore", "wörter <end> wörter", "the rest  12 of quite the words"]
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBER"
WORDS += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": [pre_tokenizers.Split(Regex(WORDS.replace("NUMBER", "")), "isolated"), BYTES],
    "llama-bpe": [pre_tokenizers.Split(Regex(WORDS.replace("NUMBER", "{1,3}")), "isolated"), BYTES],
}


def write_tokenized(file: Path, rule: str, named: str | None = None) -> Tokenizer:
    """Write a file of a model with a byte-level tokenizer that splits by `rule`, under the rule's name or another.

    No merge makes its last token, a word that Llama's rule takes whole.
    """
    made, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    made.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[rule])
    trainer = trainers.BpeTrainer(special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["the words of 12 1234 34 1212 are  12  words"] * 9, trainer)
    tokens = [*(made.id_to_token(one) for one in range(made.get_vocab_size())), "Ġquite"]
    merges = [tuple(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    made.model = models.BPE({one: number for number, one in enumerate(tokens)}, merges, ignore_merges=rule[0] == "l")
    given = {"model": "gpt2", "pre": named or rule, "tokens": tokens, "token_type": [3, *[1] * (len(tokens) - 1)]}
    given |= {"merges": [" ".join(pair) for pair in merges], "bos_token_id": 0}
    change = {f"tokenizer.ggml.{key}": value for key, value in given.items()} | {"llama.vocab_size": len(tokens)}
    write(file, "llama", change=change, vocab_size=len(tokens))
    return made


@pytest.mark.parametrize("rule", SPLITS)
def test_the_tokenizer_splits_text_as_the_one_it_was_written_from(tmp_path, rule):
    made = write_tokenized(tmp_path / "model.gguf", rule)
    model = sinklens.load(tmp_path / "model.gguf")
    start = [0] if rule == "llama-bpe" else []
    assert [model.to_tokens(text)[0].tolist() for text in TEXTS] == [start + made.encode(text).ids for text in TEXTS]
    assert model.to_string(model.to_tokens(TEXTS[1], prepend_bos=False)[0]) == TEXTS[1]


def test_a_tokenizer_of_an_unknown_rule_is_left_out_with_a_warning(tmp_path):
    write_tokenized(tmp_path / "model.gguf", "gpt-2", "own")
    with pytest.warns(CheckpointWarning, match=r"its tokenizer \('gpt2', rule 'own'\) cannot be carried over"):
        assert sinklens.load(tmp_path / "model.gguf").tokenizer is None


# Files of strangers


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("damage", "files"), [("cut", 50), ("flip", 200), ("huge", 100)])
def test_a_damaged_file_loads_or_is_refused_with_its_name(tmp_path, damage, files):
    write_tokenized(tmp_path / "whole.gguf", "gpt-2")
    whole, chance, refused = (tmp_path / "whole.gguf").read_bytes(), random.Random(5), []
    header = len(whole) - sum(one.n_bytes for one in gguf.GGUFReader(tmp_path / "whole.gguf").tensors)
    for number in range(files):
        file, place = tmp_path / f"damaged{number}.gguf", chance.randrange(len(whole) if damage == "cut" else header)
        flipped, huge = whole[place] ^ 1 << chance.randrange(8), 1 << chance.randrange(20, 64)
        part = {"cut": b"", "flip": bytes([flipped]), "huge": huge.to_bytes(8, "little")}[damage]
        file.write_bytes(whole[:place] + part + (b"" if damage == "cut" else whole[place + len(part) :]))
        try:
            sinklens.load(file)
        except CheckpointError as error:
            refused.append(file.stem in str(error))
        except SelfCheckError:  # numbers that make weights overflow: the file is whole, and its model is broken
            continue
    assert all(refused)
    assert len(refused) == files if damage == "cut" else len(refused) > 10
