"""A checkpoint's files are found and checked against the model before any weight is read."""

import importlib
import json
import os
import re
import subprocess
import sys
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
from sinklens.model.files import commit_of, find_checkpoint, read_config, read_headers, shipped_names

LLADA = family_named("llada")
INDEX = "model.safetensors.index.json"


@pytest.fixture
def intact(tmp_path: Path) -> Path:
    """A LLaDA checkpoint in one file."""
    write_family(tmp_path / "intact", "llada")
    return tmp_path / "intact"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same checkpoint in three files and an index."""
    write_family(tmp_path / "sharded", "llada", shards=3)
    return tmp_path / "sharded"


# Finding


def test_a_folder_is_returned_as_it_is(intact):
    assert find_checkpoint(intact, None) == intact
    assert find_checkpoint(str(intact), None) == intact


def test_shipped_names_are_folders_of_the_package():
    for name in shipped_names():
        assert (find_checkpoint(name, None) / "config.json").is_file()


def test_a_model_of_the_repository_is_found_in_a_checkout_and_named_elsewhere(monkeypatch, tmp_path):
    assert find_checkpoint("tiny-text") == files.REPOSITORY / "tiny-text"
    assert "tiny-text" in shipped_names()
    monkeypatch.setattr(files, "REPOSITORY", tmp_path)
    assert set(files.REPOSITORY_MODELS).isdisjoint(shipped_names())
    with pytest.raises(CheckpointError, match=r"tiny-text comes with sinklens's repository, .* models/tiny-text of a"):
        find_checkpoint("tiny-text")


def test_a_file_is_rejected_with_a_hint_to_pass_its_folder(intact):
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is a file; pass the folder that contains config\.json"
    ):
        find_checkpoint(intact / "model.safetensors", None)


@pytest.mark.parametrize("name", ["tiny-lada", "./nowhere", "/no/such/folder", "a/b/c", "~/models/llada"])
def test_an_unknown_name_is_rejected(name):
    with pytest.raises(CheckpointError, match=rf"'{re.escape(name)}' is neither a folder nor a shipped checkpoint \("):
        find_checkpoint(name, None)


def test_the_error_for_a_misspelled_name_suggests_the_nearest(monkeypatch):
    monkeypatch.setattr("sinklens.model.files.shipped_names", lambda: ["tiny-llada", "tiny-llama"])
    with pytest.raises(CheckpointError, match="Nearest: tiny-llada"):
        find_checkpoint("tiny-lada", None)


def test_a_revision_of_a_folder_is_rejected(intact):
    with pytest.raises(CheckpointError, match=r"revision 'v1' applies to names on the hub, and .*intact is a folder"):
        find_checkpoint(intact, "v1")


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


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_failed_download_says_why_and_what_to_do(monkeypatch, failure):
    def fail(*args: Any, **kwargs: Any) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    reason = str(failure).splitlines()[0].rstrip(".") if str(failure) else "no reason given"
    message = rf"could not download 'someone/model' from the hub: {type(failure).__name__}: {re.escape(reason)}\. "
    message += "The repository is gated or private: accept its terms" if "403" in reason else "Check the name"
    with pytest.raises(CheckpointError, match=message) as caught:
        find_checkpoint("someone/model", None)
    assert caught.value.__cause__ is failure


def test_the_commit_of_a_snapshot_is_recorded_and_that_of_other_folders_is_not(tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert commit_of(tmp_path / "snapshots" / commit) == commit
    assert commit_of(tmp_path / commit) is None
    assert commit_of(tmp_path / "snapshots" / "main") is None


def test_without_the_network_only_the_cache_is_read_and_the_way_out_is_named(monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> str:
        assert kwargs["local_files_only"]
        raise hub.LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set and the cache lacks it: run `hf download"):
        find_checkpoint("someone/model", None)


def test_a_failed_download_names_the_revision(monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> str:
        raise _refusal(404, hub.RevisionNotFoundError, "404 Client Error.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="could not download 'someone/model' at revision 'v9' from the hub"):
        find_checkpoint("someone/model", "v9")


def test_a_download_uses_the_revision_and_skips_code_and_pickles(monkeypatch, tmp_path):
    requested: dict[str, Any] = {}

    def download(name: str, **kwargs: Any) -> str:
        requested.update(kwargs, name=name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_checkpoint("someone/model", "v9") == tmp_path
    assert (requested["name"], requested["revision"]) == ("someone/model", "v9")
    wanted = ["config.json", "generation_config.json", INDEX, "model-00001-of-00002.safetensors", "tokenizer.json"]
    wanted += ["tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja"]
    unwanted = ["modeling_llada.py", "pytorch_model.bin", "consolidated.00.pth", "README.md", "model.gguf"]
    assert list(filter_repo_objects([*wanted, *unwanted], allow_patterns=requested["allow_patterns"])) == wanted


@pytest.mark.extended
def test_a_hub_name_without_a_network_is_rejected_at_once(tmp_path):
    """Runs in a real process that may not go online."""
    code = "import time, sinklens.model.files as files\nfrom sinklens.errors import CheckpointError\n"
    code += "import huggingface_hub\nstart = time.monotonic()\n"
    code += "try: files.find_checkpoint('GSAI-ML/LLaDA-8B-Instruct', None)\n"
    code += "except CheckpointError as error: print(round(time.monotonic() - start), error)"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    seconds, _, message = done.stdout.partition(" ")
    assert message.startswith("could not download 'GSAI-ML/LLaDA-8B-Instruct' from the hub: LocalEntryNotFoundError: ")
    assert int(seconds) < 5


# config.json


@pytest.mark.parametrize("broken", [b'{"d_model": 24, "n_', b"", b"\xff\xfe\x00"], ids=["cut", "empty", "not text"])
def test_a_broken_config_is_rejected(tmp_path, broken):
    (tmp_path / "config.json").write_bytes(broken)
    with pytest.raises(CheckpointError, match=r"config\.json is not valid JSON \(.*may be incomplete"):
        read_config(tmp_path)


def test_a_config_that_is_not_an_object_is_rejected(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json contains a JSON list, not an object"):
        read_config(tmp_path)


# Headers


def test_the_type_is_that_of_most_values(tmp_path):
    weights = {name: value.bfloat16() for name, value in public_weights("llada", random_hf("llama")).items()}
    weights["model.transformer.ln_f.weight"] = weights["model.transformer.ln_f.weight"].float()
    write_checkpoint(tmp_path, {}, weights)
    assert read_headers(tmp_path, LLADA).dtype is torch.bfloat16


def test_a_single_file_takes_precedence_over_an_index_as_in_transformers(intact, sharded):
    """Otherwise the headers of one file would be checked and another file loaded."""
    save_file({"other.weight": torch.zeros(2)}, sharded / "model.safetensors")
    assert list(read_headers(sharded, LLADA).shapes) == ["other.weight"]


def test_integer_weights_are_rejected(tmp_path):
    write_checkpoint(tmp_path, {}, {"model.weight": torch.zeros(4, 4, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match="weights of type I8 are not supported; use F64, F32, F16, BF16"):
        read_headers(tmp_path, LLADA)


@pytest.mark.parametrize("kept", [0, 4, 200, -1], ids=["nothing", "no length", "half a header", "all but a byte"])
def test_a_truncated_file_is_rejected(intact, kept):
    file = intact / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated or corrupt \(.*Download it again"):
        read_headers(intact, LLADA)


def test_a_truncated_shard_is_named(sharded):
    file = sharded / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is truncated or corrupt"):
        read_headers(sharded, LLADA)


def test_missing_shards_are_named(sharded):
    (sharded / "model-00001-of-00003.safetensors").unlink()
    (sharded / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"2 of 3 shards are missing: model-00001-of-00003.*, model-00003-of-00003"
    ):
        read_headers(sharded, LLADA)


def test_shards_without_their_index_are_rejected(sharded):
    (sharded / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"has shards but no model\.safetensors\.index\.json"):
        read_headers(sharded, LLADA)


BROKEN_MAPS = ["[]", '{"a": null}', '{"a": []}']
BROKEN_INDEXES = ["", "{", "[]", "{}", *(f'{{"metadata": {{}}, "weight_map": {broken}}}' for broken in BROKEN_MAPS)]


@pytest.mark.parametrize("broken", BROKEN_INDEXES)
def test_a_broken_index_is_rejected(sharded, broken):
    (sharded / INDEX).write_text(broken)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is corrupt \(.*; download it again"):
        read_headers(sharded, LLADA)


@pytest.mark.parametrize("metadata", [None, [], 3])
def test_an_index_without_the_metadata_that_transformers_requires_is_rejected(sharded, metadata):
    index = json.loads((sharded / INDEX).read_text()) | {"metadata": metadata}
    (sharded / INDEX).write_text(json.dumps({key: value for key, value in index.items() if value is not None}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is corrupt \(.*; download it again"):
        read_headers(sharded, LLADA)


def test_a_folder_without_weights_is_rejected(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors\. Convert the weights to safetensors"):
        read_headers(tmp_path, LLADA)


# Checking weights
