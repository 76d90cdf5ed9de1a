"""Loading gives a model that computes what transformers' class computes from the same weights, or fails completely."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from building import random_hf, random_ids
from layouts import (
    ARCHITECTURES,
    BLOCK_CAUSAL,
    WORDS,
    arguments,
    causal,
    change_config,
    eager_logits,
    public_config,
    public_weights,
    word_tokenizer,
    write_checkpoint,
    write_family,
    write_tokenizer,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

import sinklens
from sinklens.errors import CheckpointError, SettingError
from sinklens.model import loading, reading

LLADA_HEAD = "model.transformer.ff_out.weight"


@pytest.fixture
def llada(tmp_path: Path) -> Path:
    """A LLaDA checkpoint."""
    write_family(tmp_path / "llada", "llada")
    return tmp_path / "llada"


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes reading weights an error."""

    def read(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read)


# The model


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_logits_equal_those_of_the_transformers_class_with_the_same_weights(tmp_path, family):
    hf, ids = write_family(tmp_path, family), random_ids()
    write_family(tmp_path / "sharded", family, shards=3)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) == 3
    model, sharded = (sinklens.load(folder, **arguments(family)) for folder in (tmp_path, tmp_path / "sharded"))
    wanted = eager_logits(hf, ids, causal(family), family in BLOCK_CAUSAL)
    torch.testing.assert_close(model(ids), wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(sharded(ids), model(ids))
    assert not any(module.training for module in model.tree.hf.modules())
    assert (model.family, model.mask_token_id) == (family, None if causal(family) else 60)
    assert model.eos_token_ids == (2,)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("family", ["llada", "dream", "llama", "qwen3"])
@pytest.mark.parametrize("twice", [False, True], ids=["stored once", "stored twice"])
def test_a_tied_head_is_the_embedding(tmp_path, family, twice):
    hf = random_hf(ARCHITECTURES[family], causal(family), tie_word_embeddings=True)
    weights = public_weights(family, hf)
    if twice:
        weights[LLADA_HEAD if family == "llada" else "lm_head.weight"] = hf.lm_head.weight.data.clone()
    write_checkpoint(tmp_path, public_config(family, hf), weights)
    model, ids = sinklens.load(tmp_path), random_ids()
    assert model.tree.W_U.data_ptr() == model.tree.W_E.data_ptr()
    torch.testing.assert_close(model(ids), eager_logits(hf, ids, causal(family)), rtol=1e-4, atol=1e-5)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("given", "small", "expected"),
    [
        ({"dtype": "bf16"}, True, torch.bfloat16),
        ({"dtype": torch.float16}, True, torch.float16),
        ({"dtype": torch.float64}, True, torch.float64),
        ({}, False, torch.bfloat16),
        ({"device_map": "cpu"}, True, torch.float32),
        ({}, True, torch.float32),
    ],
    ids=str,
)
def test_the_element_type_is_the_requested_one(tmp_path, monkeypatch, given, small, expected):
    """By default the stored one, or float32 for a small model on a CPU."""
    hf, ids = random_hf("llama", dtype=torch.bfloat16), random_ids()
    write_checkpoint(tmp_path, public_config("llada", hf), public_weights("llada", hf))
    monkeypatch.setattr(reading, "SMALL", 10**9 if small else 1)
    model = sinklens.load(tmp_path, device=None if "device_map" in given else "cpu", **given)
    assert {parameter.dtype for parameter in model.tree.hf.parameters()} == {model.cfg.dtype} == {expected}
    wanted = eager_logits(hf.to(expected), ids, causal=False).float()
    rough = expected.itemsize == 2
    close = {"rtol": 0.05 if rough else 1e-4, "atol": 0.1 if rough else 1e-5}
    torch.testing.assert_close(model(ids).float(), wanted, **close)


SPREAD = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
SPREAD |= {f"model.layers.{layer}": "cpu" for layer in range(3)}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "device_map",
    [SPREAD | {"model.layers.1": "disk"}, "cpu", {"": "cpu"}, "auto", SPREAD],
    ids=["disk", "cpu", "all", "auto", "by module"],
)
def test_a_device_map_gives_the_same_values(llada, device_map):
    """accelerate wraps the layers of a model that is distributed over devices."""
    ids = random_ids()
    mapped, plain = sinklens.load(llada, device_map=device_map), sinklens.load(llada, device="cpu")
    names = [f"blocks.1.{name}" for name in ("attn.hook_pattern", "hook_resid_mid", "mlp.hook_post", "hook_attn_out")]
    with torch.no_grad():
        (logits, cache), (wanted, expected) = (one.run_with_cache(ids, names_filter=names) for one in (mapped, plain))
    torch.testing.assert_close(logits.cpu(), wanted, rtol=1e-4, atol=1e-5)
    for name in names:
        torch.testing.assert_close(cache[name].cpu(), expected[name], rtol=1e-4, atol=1e-5)


# Tokenizer, special tokens and defaults


def test_the_tokenizer_is_the_given_one_or_the_folders_and_names_what_the_config_does_not(llada, tmp_path):
    change_config(llada, mask_token_id=None, eos_token_id=None)
    given = word_tokenizer(tmp_path / "other")
    assert sinklens.load(llada, mask_token_id=60).eos_token_ids == ()
    (llada / "tokenizer.json").write_text("{}")
    assert sinklens.load(llada, tokenizer=given).tokenizer is given
    model = sinklens.load(write_tokenizer(llada))
    assert model.tokenizer("w7 w9").input_ids == [7, 9]
    assert model.mask_token_id == model.tokenizer.mask_token_id == WORDS.index("<mask>")
    assert model.eos_token_ids == (2,)


def _spoil_tokenizer(name: str, content: str | int) -> Callable[[Path], Any]:
    def spoil(folder: Path) -> None:
        file = write_tokenizer(folder) / name
        file.write_text(file.read_text()[:content] if isinstance(content, int) else content)

    return spoil


def test_the_generation_config_provides_end_tokens_and_sampler_settings(llada):
    made = {"eos_token_id": [5, 6], "sinklens": {"gen_length": 8, "block_length": 4}}
    (llada / "generation_config.json").write_text(json.dumps(made))
    model = sinklens.load(llada)
    assert (model.eos_token_ids, model.checkpoint.defaults) == ((5, 6), {"gen_length": 8, "block_length": 4})
    assert sinklens.generate(model, torch.tensor([3, 4])).settings.block_length == 4


def test_a_tokenizer_that_names_code_is_read_without_running_it(tmp_path):
    """Dream's layout: Qwen2's vocabulary files under a class that exists only in its repository."""
    write_family(tmp_path, "dream")
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4, "<|endoftext|>": 5}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ ab\n")
    added = {"content": "<|mask|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    settings = {
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": {"6": {**added, "special": True}},
        "mask_token": "<|mask|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenization_dream.py").write_text("raise SystemExit('code of the checkpoint was run')")
    tokenizer = sinklens.load(tmp_path).tokenizer
    assert tokenizer("ab ab<|mask|>b").input_ids == [3, 4, 6, 1]
    assert tokenizer.mask_token_id == 6


# Quiet


@pytest.mark.extended
def test_loading_small_checkpoints_prints_nothing(tmp_path):
    """Runs in a separate process, so that warnings and messages that transformers prints once are seen."""
    for family in ARCHITECTURES:
        write_family(tmp_path / family, family, shards=2)
        write_tokenizer(tmp_path / family)
    given = {family: arguments(family) for family in ARCHITECTURES}
    code = f"import sinklens\nfor name, given in {given}.items(): sinklens.load(name, **given)"
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # with such small models, threads mostly wait for each other
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=alone, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_a_progress_bar_is_shown_for_large_models_and_transformers_settings_are_restored(llada, monkeypatch, capfd):
    def own(make: Any, args: Any, kwargs: Any) -> Any:
        return make(*args, **kwargs)

    monkeypatch.setattr(logging, "_tqdm_hook", own)
    enabled = logging.is_progress_bar_enabled()
    sinklens.load(llada)
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(loading, "SMALL", 1)
    sinklens.load(llada)
    assert "Loading weights" in capfd.readouterr().err
    assert logging._tqdm_hook is own
    assert logging.is_progress_bar_enabled() is enabled


# Rejected before weights are read


def _drop(folder: Path, *names: str) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({name: value for name, value in weights.items() if name not in names}, folder / "model.safetensors")


def _add(folder: Path, **more: Tensor) -> None:
    save_file(load_file(folder / "model.safetensors") | more, folder / "model.safetensors")


def _write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


SPOILED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
    "broken config": (_write("config.json", "{"), r"config\.json is not valid JSON \(.*may be incomplete"),
    "config in another encoding": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"),
        r"config\.json cannot be read: 'utf-8' codec",
    ),
    "unknown family": (lambda folder: change_config(folder, model_type="mamba"), "model_type 'mamba' is not a known"),
    "unsupported": (
        lambda folder: change_config(folder, alibi=True),
        "alibi = True; the llada family can express only",
    ),
    "missing key": (lambda folder: change_config(folder, d_model=None), r"config\.json lacks .*d_model"),
    "wrong size": (
        lambda folder: change_config(folder, n_layers=2),
        r"9 weights have no place in the model \(model\.tra",
    ),
    "missing weight": (
        lambda folder: _drop(folder, LLADA_HEAD, "model.transformer.ln_f.weight"),
        r"2 weights are missing \(lm_head\.weight, model\.norm\.weight\)\. Nothing was loaded",
    ),
    "unexpected weight": (
        lambda folder: _add(folder, **{"model.transformer.blocks.0.q_proj.bias": torch.zeros(24)}),
        r"1 weights have no place in the model \(model\.transformer\.blocks\.0\.q_proj\.bias\)",
    ),
    "wrong shape": (
        lambda folder: _add(folder, **{LLADA_HEAD: torch.zeros(60, 24)}),
        r"model\.transformer\.ff_out\.weight is \[60, 24\], the config requires \[61, 24\]",
    ),
    "head of an untied model tied": (
        lambda folder: _drop(folder, LLADA_HEAD),
        r"1 weights are missing \(lm_head\.weight\)",
    ),
    "truncated": (
        lambda folder: os.truncate(folder / "model.safetensors", 9000),
        r"model\.safetensors is truncated or corrupt",
    ),
    "pickles": (
        lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
        r"It has pickles \(pytorch_model\.bin\), which can run code and are rejected",
    ),
    "mask token outside": (
        lambda folder: change_config(folder, mask_token_id=61),
        r"llada: no usable mask token \(found 61, vocabulary 61\); pass mask_token_id=",
    ),
    "mask token of the family outside": (
        lambda folder: change_config(folder, mask_token_id=None),
        r"no usable mask token \(found 126336, vocabulary 61\)",
    ),
    "mask token not a number": (
        lambda folder: change_config(folder, mask_token_id="<mask>"),
        r"no usable mask token \(found '<mask>', vocabulary 61\)",
    ),
    "broken generation config": (
        _write("generation_config.json", "{"),
        r"generation_config\.json is not valid JSON",
    ),
    **{
        f"generation config {given}": (
            _write("generation_config.json", given),
            rf"generation_config\.json has no valid settings: .*{named}",
        )
        for given, named in (
            ('{"max_new_tokens": -1}', "max_new_tokens"),
            ('{"max_new_tokens": "x"}', "'str' and 'int'"),
            ('{"cache_implementation": 5}', "cache_implementation"),
            ('{"compile_config": 5}', "compile_config"),
            ('{"watermarking_config": {"a": 1}}', "argument 'a'"),
        )
    },
    "generation config not an object": (
        _write("generation_config.json", "[]"),
        r"generation_config\.json contains a JSON list",
    ),
    **{
        f"tokenizer {number}": (
            _spoil_tokenizer(*spoiled),
            r"the tokenizer in .*llada cannot be read \(.*\)\. One of its files \(.*tokenizer_config\.json\) may be "
            r"incomplete: download them again, or pass another tokenizer as sinklens\.load\(\.\.\., tokenizer=",
        )
        for number, spoiled in enumerate(
            (
                ("tokenizer.json", 0),
                ("tokenizer.json", 100),
                ("tokenizer_config.json", 0),
                ("tokenizer_config.json", 100),
                ("tokenizer.json", "{}"),
                ("tokenizer.json", '{"added_tokens": [], "model": {"type": "x"}}'),
                ("tokenizer_config.json", '{"model_max_length": "x"}'),
                ("tokenizer_config.json", '{"unk_token": ""}'),
                ("tokenizer_config.json", '{"added_tokens_decoder": {"a": 5}}'),
            )
        )
    },
    "defaults of no sampler": (
        _write("generation_config.json", '{"sinklens": {"seed": 5}}'),
        r"generation_config\.json has no valid settings: seed is not a setting",
    ),
    "defaults not an object": (
        _write("generation_config.json", '{"sinklens": 3}'),
        r"generation_config\.json has no valid",
    ),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["tiny-llada-moe", "tiny-llada", "tiny-canvas"])
def test_a_recorded_run_in_float64_equals_the_one_in_float32(name):
    """For experts, torch lacks the grouped matrix products that transformers uses by default."""
    exact, usual = (sinklens.load(name, dtype=dtype) for dtype in (torch.float64, torch.float32))
    prompt = "Question: Tom has 5 apples. He buys 7 more. How many apples does Tom have now?\nAnswer:"
    runs = [sinklens.generate(model, prompt, seed=0, record_sinks=True, progress=False) for model in (exact, usual)]
    assert runs[0].text == runs[1].text
    scores = [torch.from_numpy(run.sinks.scores().to_numpy()) for run in runs]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=1e-4, equal_nan=True)


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "float8"}, "dtype 'float8' is not one of auto, float64, float32, float16, bfloat16, fp32, fp16, bf16"),
    ({"dtype": torch.int8}, r"dtype torch\.int8 is not one of auto"),
    ({"device": "cpu", "device_map": "cpu"}, "pass device= or device_map=, not both"),
    ({"device": "gpu"}, "torch does not know the device 'gpu'; pass 'cpu', 'cuda' or 'cuda:1'"),
    ({"device": "cuda:77"}, r"device 'cuda:77' is not available: torch sees \d+ GPUs"),
    ({"revision": "v1"}, "revision 'v1' applies to names on the hub"),
    ({"tokenizer": "words"}, "tokenizer must be a PreTrainedTokenizerBase or None; got 'words'"),
    (
        {"adapter": "tests/nowhere"},
        r"tests/nowhere does not exist, .* there is a folder tests\. .* download it with `hf download`",
    ),
]
REJECTED = [
    *((spoil, {}, message) for spoil, message in SPOILED.values()),
    *((lambda folder: None, given, message) for given, message in ARGUMENTS),
]


@pytest.mark.parametrize(
    ("spoil", "given", "message"), REJECTED, ids=[*SPOILED, *(str(given) for given, _ in ARGUMENTS)]
)
@pytest.mark.usefixtures("nothing_loads", "unchecked")
def test_a_spoiled_checkpoint_or_argument_is_rejected_before_weights_are_read(llada, spoil, given, message):
    spoil(llada)
    with pytest.raises((CheckpointError, SettingError), match=message):
        sinklens.load(llada, **given)


@pytest.mark.usefixtures("nothing_loads")
def test_weights_are_read_if_nothing_is_wrong_and_an_interruption_restores_transformers_bars(llada):
    """The test above relies on this."""
    with pytest.raises(AssertionError, match="weights were read"):
        sinklens.load(llada)
    assert logging._tqdm_hook is None


def test_arguments_for_several_models_apply_where_they_fit():
    given = {"mask_token_id": 5, "block_length": 4, "dtype": "auto"}
    assert loading.fitting("tiny-llama", given) == {"dtype": "auto"}
    assert loading.fitting("tiny-llada", given) == {"mask_token_id": 5, "dtype": "auto"}
    assert loading.fitting("tiny-sdar", given) == given
