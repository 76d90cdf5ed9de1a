"""A checkpoint's files are found and checked against the model before any weight is read."""

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from building import random_hf
from huggingface_hub import errors as hub
from huggingface_hub.utils import filter_repo_objects
from layouts import public_weights, write_checkpoint, write_family
from safetensors.torch import save_file

from sinklens.errors import CheckpointError
from sinklens.families import family_named
from sinklens.model import files
from sinklens.model.files import commit_of, find_checkpoint, read_headers, shipped_names

LLADA = family_named("llada")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same checkpoint in three files and an index."""
    write_family(tmp_path / "sharded", "llada", shards=3)
    return tmp_path / "sharded"


def test_a_model_of_the_repository_is_found_in_a_checkout_and_named_elsewhere(monkeypatch, tmp_path):
    assert find_checkpoint("tiny-text") == files.REPOSITORY / "tiny-text"
    assert "tiny-text" in shipped_names()
    monkeypatch.setattr(files, "REPOSITORY", tmp_path)
    assert set(files.REPOSITORY_MODELS).isdisjoint(shipped_names())
    with pytest.raises(CheckpointError, match=r"tiny-text comes with sinklens's repository, .* models/tiny-text of a"):
        find_checkpoint("tiny-text")


# The hub


def _client() -> Any:
    """The HTTP library that huggingface_hub uses; it differs between versions."""
    return importlib.import_module(hub.HTTPError.__module__.split(".")[0])


def _refusal(status: int, kind: type[hub.HfHubHTTPError], text: str) -> hub.HfHubHTTPError:
    client = _client()
    request = client.Request("GET", "https://huggingface.co/api/models/someone/model")
    return kind(text, response=client.Response(status, request=request))


FAILURES = [
    hub.LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder."),
    hub.OfflineModeIsEnabled("offline mode is enabled"),
    hub.HFValidationError("Repo id must use alphanumeric chars"),
    _refusal(404, hub.RepositoryNotFoundError, "404 Client Error.\n\nRepository Not Found"),
    _refusal(403, hub.GatedRepoError, "403 Client Error.\n\nCannot access gated repo"),
    _refusal(404, hub.RevisionNotFoundError, "404 Client Error.\n\nRevision Not Found"),
    _refusal(503, hub.HfHubHTTPError, ""),
    _client().ProxyError("407 Proxy Authentication Required"),
    _client().ReadTimeout("timed out"),
    OSError("No space left on device"),
]


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_failed_download_says_why_and_what_to_do(monkeypatch, failure, offline):
    def fail(*args: Any, **kwargs: Any) -> str:
        assert kwargs["local_files_only"] is offline
        raise failure

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    reason = str(failure).splitlines()[0].rstrip(".") if str(failure) else "no reason given"
    message = rf"could not download 'someone/model' at revision 'v9' from the hub: {type(failure).__name__}: "
    message += rf"{re.escape(reason)}\. "
    advice = "HF_HUB_OFFLINE is set and the cache lacks it: run `hf download" if offline else "Check the name"
    message += "The repository is gated or private: accept its terms" if "403" in reason else advice
    with pytest.raises(CheckpointError, match=message) as caught:
        find_checkpoint("someone/model", "v9")
    assert caught.value.__cause__ is failure


def test_the_commit_of_a_snapshot_is_recorded_and_that_of_other_folders_is_not(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert commit_of(tmp_path / "snapshots" / commit) == commit
    assert commit_of(tmp_path / commit) is None
    assert commit_of(tmp_path / "snapshots" / "main") is None


def test_a_download_uses_the_revision_and_skips_code_and_pickles(monkeypatch, tmp_path):
    requested: dict[str, Any] = {}

    def download(name: str, **kwargs: Any) -> str:
        requested.update(kwargs, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_checkpoint("someone/model", "v9") == tmp_path
    assert (requested["name"], requested["revision"]) == ("someone/model", "v9")
    wanted = [
        "config.json", "generation_config.json", INDEX, "model-00001-of-00002.safetensors", "tokenizer.json",
        "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
    ]  # fmt: skip
    unwanted = ["modeling_llada.py", "pytorch_model.bin", "consolidated.00.pth", "README.md", "model.gguf"]
    assert list(filter_repo_objects([*wanted, *unwanted], allow_patterns=requested["allow_patterns"])) == wanted


def test_the_type_is_that_of_most_values(tmp_path):
    weights = {name: value.bfloat16() for name, value in public_weights("llada", random_hf("llama")).items()}
    weights["model.transformer.ln_f.weight"] = weights["model.transformer.ln_f.weight"].float()
    write_checkpoint(tmp_path, {}, weights)
    assert read_headers(tmp_path, LLADA).dtype is torch.bfloat16


def test_a_single_file_takes_precedence_over_an_index_as_in_transformers(sharded):
    """Otherwise the headers of one file would be checked and another file loaded."""
    save_file({"other.weight": torch.zeros(2)}, sharded / "model.safetensors")
    assert list(read_headers(sharded, LLADA).shapes) == ["other.weight"]


def _cut(name: str, kept: int) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:kept])


def _without(*names: str) -> Callable[[Path], Any]:
    return lambda folder: [(folder / name).unlink() for name in names]


def _index(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / INDEX).write_text(text)


SHARD = "model-0000{}-of-00003.safetensors"
CORRUPT = r"model\.safetensors\.index\.json is corrupt \(.*; download it again"
TRUNCATED = r"safetensors is truncated or corrupt \(.*Download it again"
MAPS = ['{"metadata": {}, "weight_map": []}', '{"metadata": {}, "weight_map": {"a": null}}', '{"weight_map": {}}',
        '{"metadata": [], "weight_map": {}}', "", "{", "[]", "{}", "[" * 10**5]  # fmt: skip
OUTSIDE = [json.dumps({"metadata": {}, "weight_map": {"a": name}})
           for name in ("../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "")]  # fmt: skip
SPOILED: list[tuple[Callable[[Path], Any], str]] = [
    *((_cut(SHARD.format(2), kept), "model-00002-of-00003." + TRUNCATED) for kept in (0, 4, 200, -1)),
    (_without(SHARD.format(1), SHARD.format(3)), "2 of 3 shards are missing: model-00001-of-00003.*, model-00003-of"),
    (_without(INDEX), r"has shards but no model\.safetensors\.index\.json"),
    (_without(INDEX, *(SHARD.format(n) for n in (1, 2, 3))), r"has no model\.safetensors\. Convert the weights"),
    *((_index(text), CORRUPT) for text in MAPS),
    *((_index(text), r"corrupt \(the name '.*' leads outside the folder\)") for text in OUTSIDE),
    (lambda folder: save_file({"model.weight": torch.zeros(4, 4, dtype=torch.int8)}, folder / "model.safetensors"),
     "weights of type I8 are not supported; use F64, F32, F16, BF16"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), SPOILED)
def test_spoiled_files_are_named(sharded, spoil, message):
    spoil(sharded)
    with pytest.raises(CheckpointError, match=message):
        read_headers(sharded, LLADA)


UNKNOWN = "is neither a folder nor a shipped checkpoint \\("


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        *((name, None, f"'{name}' {UNKNOWN}") for name in ("./nowhere", "/no/such/folder", "a/b/c", "~/models/llada")),
        ("tiny-lada", None, f"'tiny-lada' {UNKNOWN}.*Nearest: tiny-llada"),
        (".", "v1", r"revision 'v1' applies to names on the hub, and .* is on disk"),
        ("tests/nowhere", None, r"^tests/nowhere does not exist, .* because there is a folder tests\. Check its spell"),
        (__file__, None, r"test_files\.py is a file; pass the folder that contains config\.json"),
    ],
)
def test_a_name_that_is_no_checkpoint_is_rejected(name, revision, message):
    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(name, revision)


def test_folders_and_shipped_names_are_found(tmp_path):
    assert find_checkpoint(tmp_path) == find_checkpoint(str(tmp_path)) == tmp_path
    assert all((find_checkpoint(name) / "config.json").is_file() for name in shipped_names())
