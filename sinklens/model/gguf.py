"""Turns a GGUF file, llama.cpp's format, into a checkpoint folder of float32 weights.

A GGUF file holds metadata (settings, vocabulary, merges, chat template) and tensors, most of them quantized in blocks.
`converted` writes its content as config.json, safetensors and a tokenizer; the folder is then loaded like any other. A
setting or tensor that cannot be carried over is an error, because without it the folder would hold another model. The
folder lies in the user's cache under the file's name and SHA-256, so a second load only hashes the file.

In Llama models, LLaDA included, llama.cpp rotates row 2i of a query or key head with row 2i + 1, but transformers
rotates row i with row i + d_head / 2. The rows are put in transformers' order.

Failure mode: a tokenizer whose rule for splitting text is not listed here would give other tokens without an error.
Such a tokenizer is left out with a warning, and the model needs ``tokenizer=`` to read text.
"""

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from safetensors.torch import save_file

from sinklens.errors import CheckpointError, CheckpointWarning, require, warn_caller
from sinklens.families import FAMILIES, Family
from sinklens.families.llada import CONFIG as LLADA_CONFIG
from sinklens.families.llada import LLADA_DEFAULTS, LLADA_REQUIRED
from sinklens.utils.folders import cache_folder

VERSION = 1  # of what is written; folders of another version are not reused
ARCHITECTURES = ("llama", "qwen2", "qwen3", "llada", "dream")
"""llama.cpp's names of the architectures that can be read; they are those of the families."""
SETTINGS = {
    "{}.block_count": "num_hidden_layers",
    "{}.embedding_length": "hidden_size",
    "{}.feed_forward_length": "intermediate_size",
    "{}.attention.head_count": "num_attention_heads",
    "{}.attention.head_count_kv": "num_key_value_heads",
    "{}.attention.key_length": "head_dim",
    "{}.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "{}.attention.causal": "is_causal",
    "{}.context_length": "max_position_embeddings",
    "{}.rope.freq_base": "rope_theta",
    "{}.vocab_size": "vocab_size",
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
    "tokenizer.ggml.mask_token_id": "mask_token_id",
}
"""Metadata key, with a gap for the architecture -> key of config.json."""
BLOCKS = ("model.layers", "model.transformer.blocks")
NAMES = {
    "token_embd": ("model.embed_tokens", "model.transformer.wte"),
    "output_norm": ("model.norm", "model.transformer.ln_f"),
    "output": ("lm_head", "model.transformer.ff_out"),
    "attn_norm": ("input_layernorm", "attn_norm"),
    "attn_q": ("self_attn.q_proj", "q_proj"),
    "attn_k": ("self_attn.k_proj", "k_proj"),
    "attn_v": ("self_attn.v_proj", "v_proj"),
    "attn_q_norm": ("self_attn.q_norm", "q_norm"),
    "attn_k_norm": ("self_attn.k_norm", "k_norm"),
    "attn_output": ("self_attn.o_proj", "attn_out"),
    "ffn_norm": ("post_attention_layernorm", "ff_norm"),
    "ffn_gate": ("mlp.gate_proj", "ff_proj"),
    "ffn_up": ("mlp.up_proj", "up_proj"),
    "ffn_down": ("mlp.down_proj", "ff_out"),
}
"""Name of a tensor without its layer -> its names in transformers and in LLaDA's checkpoints, below `BLOCKS`."""
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3")
"""Rules for splitting text under which llama.cpp takes words of the vocabulary whole and adds the start token."""
SPLITS = (*WHOLE_WORDS, "gpt-2", "smollm", "qwen2", "deepseek-r1-qwen")


class _Reader(gguf.GGUFReader):
    """The library's reader, which neither notices the end of a file nor limits what it reads."""

    left = 2**22  # reads; the header of Gemma, which has the largest published vocabulary, takes half of them

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        self.left -= 1
        found = super()._get(offset, dtype, count, override_order)
        require(
            len(found) == count and self.left and self.byte_order == "I",
            "it ends early, has too long lists or another byte order",
            ValueError,
        )
        return found


def converted(file: Path, folder: Path | None = None) -> Path:
    """The checkpoint folder of a GGUF file.

    Args:
        file: of an architecture in `ARCHITECTURES`.
        folder: where to write it; must not exist or be empty. By default a folder in the user's cache, which later
            calls for an equal file return as it is.

    Raises:
        CheckpointError: the file is truncated or malformed, has another architecture, or has a setting or tensor that
            cannot be carried over; or `folder` is not empty or cannot be written.
    """
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        target = folder or cache_folder() / "gguf" / f"{file.stem[:99]}-{digest}-{VERSION}"
        if folder is None and target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True) as made:
            _convert(file, Path(made))
            if folder is not None or not target.exists():  # else another process was quicker
                Path(made).rename(target)
    except Exception as error:  # a forged file can raise anything, and so can the tokenizers library
        raise CheckpointError(
            f"{file} cannot be converted to a checkpoint folder: {error!s:.300} ({type(error).__name__}). It may be "
            f"incomplete: download it again, or load the original checkpoint."
        ) from error
    return target


def _convert(file: Path, folder: Path) -> None:
    """Write a file's checkpoint into `folder`."""
    reader = _Reader(file)
    found = {  # 32-bit numbers as the shortest decimal that rounds to them, as in the original config.json
        key: float(str(field.parts[-1][0])) if field.types[0] == gguf.GGUFValueType.FLOAT32 else field.contents()
        for key, field in reader.fields.items()
    }
    name = str(found.get("general.architecture"))
    require(
        name in ARCHITECTURES,
        f"its architecture {name!r:.60} is not one of {', '.join(ARCHITECTURES)}",
        ValueError,
    )
    family, tensors = FAMILIES[name], {one.name: dequantize(one.data, one.tensor_type) for one in reader.tensors}
    config = _config(found, family, tensors)
    save_file(_weights(tensors, family, config), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if "tokenizer.ggml.tokens" in found:
        _write_tokenizer(found, file, folder)


def _config(found: dict[str, Any], family: Family, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """The contents of config.json."""
    name, shift = family.name, None if family.causal else family.shift
    config = {new: found[key] for old, new in SETTINGS.items() if (key := old.format(name)) in found}
    heads = config["num_attention_heads"]
    size = config.setdefault("head_dim", config["hidden_size"] // heads)
    fixed = {f"{name}.attention.value_length": size, f"{name}.rope.dimension_count": size}
    fixed |= {f"{name}.rope.scaling.type": "none", "diffusion.shift_logits": shift, "general.type": "model"}
    prefixes = (f"{name}.", "diffusion.", "split.", "general.type")
    read = {old.format(name) for old in SETTINGS}
    lost = [
        f"{key} = {value!r:.40}"
        for key, value in found.items()
        if key.startswith(prefixes) and key not in read and fixed.get(key, ...) != value
    ]
    require(
        not lost,
        f"{', '.join(lost[:5])} cannot be carried over, so another model would be computed",
        ValueError,
    )
    config = {"num_key_value_heads": heads, "rope_theta": 10000.0} | config  # llama.cpp's defaults
    config.setdefault("vocab_size", len(tensors["token_embd.weight"]))
    config["tie_word_embeddings"] = "output.weight" not in tensors
    ends = [found[key] for one in ("eos", "eot", "eom") if (key := f"tokenizer.ggml.{one}_token_id") in found]
    config["eos_token_id"] = list(dict.fromkeys(ends)) or None
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if "rope_freqs.weight" in tensors:  # Llama 3's factors: transformers calls a division of each frequency longrope
        factors, longest = tensors.pop("rope_freqs.weight").tolist(), config["max_position_embeddings"]
        scaling = {"factor": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": longest}
        config["rope_scaling"] = scaling | {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    if name == "llada":
        config |= {key: LLADA_REQUIRED[key][0] for key in LLADA_DEFAULTS if key in LLADA_REQUIRED}
        config |= {old: config[new] for old, new in LLADA_CONFIG.items()}
    return config | {"model_type": family.model_types[0], "dtype": "float32"}


def _weights(tensors: dict[str, np.ndarray], family: Family, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors in the published checkpoints' names and order of rows."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    column, weights = int(family.name == "llada"), {}
    for stored, values in tensors.items():
        parts = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", stored)
        if parts is None or parts[2] not in NAMES:
            raise ValueError(f"the tensor {stored!r:.80} has no place in the model")
        layer, name, role = parts.groups()
        if family.architecture == "llama" and name in heads:
            values = values.reshape(heads[name], -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        prefix = "" if layer is None else f"{BLOCKS[column]}.{layer}."
        weights[f"{prefix}{NAMES[name][column]}.{role}"] = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))
    return weights


def _write_tokenizer(found: dict[str, Any], file: Path, folder: Path) -> None:
    """Write the tokenizer as transformers reads it from the file, with what it leaves out."""
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind, rule = str(found.get("tokenizer.ggml.model")), found.get("tokenizer.ggml.pre")
    known = {"gpt2": rule in SPLITS, "llama": found.get("tokenizer.ggml.add_space_prefix", True)}
    if not known.get(kind):
        warn_caller(
            f"{file}: its tokenizer ({kind!r:.40}, rule {rule!r:.40}) cannot be carried over, so the model has none. "
            f"To read text, load it with tokenizer= that of the original checkpoint.",
            CheckpointWarning,
        )
        return
    tokens, mask = found["tokenizer.ggml.tokens"], found.get("tokenizer.ggml.mask_token_id")
    settings = {"add_bos_token": True} if rule in WHOLE_WORDS else {}
    made = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name, **settings)
    made.mask_token = None if mask is None else tokens[mask]
    if rule == "smollm":
        made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if rule in WHOLE_WORDS:
        made.backend_tokenizer.model.ignore_merges = True
    special = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
    kinds = enumerate(zip(tokens, found.get("tokenizer.ggml.token_type", ()), strict=False))
    whole = {text: number for number, (text, what) in kinds if what in special}
    apart = [text for text, number in whole.items() if made.encode(text, add_special_tokens=False) != [number]]
    require(not apart, f"its tokenizer splits {len(apart)} special tokens, such as {apart[:1]}", ValueError)
    made.save_pretrained(folder)
