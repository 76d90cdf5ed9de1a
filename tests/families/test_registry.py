"""A registered family works like a built-in one and never replaces another."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import sinklens
from sinklens.cli import main
from sinklens.errors import CheckpointError
from sinklens.families import FAMILIES, family_named, register
from sinklens.hooks import Architecture
from sinklens.hooks.architectures import ARCHITECTURES
from sinklens.model.files import find_checkpoint

pytestmark = pytest.mark.usefixtures("families")
LLADA = family_named("llada")
OURS = replace(LLADA, name="ours", model_types=("ours", "ours2"), renames={r"^ours\.": "model.", **LLADA.renames})
PLUGIN = """
from dataclasses import replace
from sinklens.families import family_named, register


def families():
    register(replace(family_named("llada"), name="plugged", model_types=("plugged",)))
"""


@pytest.fixture
def checkpoint(tmp_path):
    """tiny-llada with another model type and other weight names."""
    folder = shutil.copytree(find_checkpoint("tiny-llada"), tmp_path / "ours")
    weights = {
        name.replace("model.", "ours.", 1): value for name, value in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors")
    rewrite(folder, model_type="ours2")
    return folder


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that writes an entry point into a folder on the path, which looks like an installed package."""
    folder = tmp_path / "installed"
    (folder / "plugged-1.0.dist-info").mkdir(parents=True)
    (folder / "plugged-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (folder / "plugged_families.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(folder)

    def point(value):
        (folder / "plugged-1.0.dist-info" / "entry_points.txt").write_text(f"[sinklens.families]\nplugged = {value}\n")
        return folder

    return point


def rewrite(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_registered_family_is_loaded_found_and_listed(checkpoint, tiny_llada, capsys):
    with pytest.raises(CheckpointError, match="'ours2' is not a known family"):
        sinklens.load(checkpoint)
    register(OURS)
    model = sinklens.load(checkpoint)
    ids = torch.randint(5, 200, (1, 9))
    assert model.family == "ours"
    assert torch.equal(model(ids), tiny_llada(ids))
    assert family_named("ours") is FAMILIES["ours"] is OURS
    assert main(["models"]) == 0
    assert "model_type ours, ours2; sampler llada" in capsys.readouterr().out


def test_registering_the_same_family_again_changes_nothing():
    register(OURS, Architecture())
    before = dict(FAMILIES), dict(ARCHITECTURES)
    register(replace(OURS))
    assert before == (FAMILIES, ARCHITECTURES)


def test_a_new_architecture_is_registered_with_its_family():
    placed = Architecture(q="wq")
    register(replace(OURS, architecture="mistral"), placed)
    assert ARCHITECTURES["mistral"] is placed


@pytest.mark.parametrize(
    ("changes", "architecture", "text"),
    [
        ({"name": "dream"}, None, r"a family called 'dream' already exists with another record; choose"),
        ({"model_types": ("new", "llama")}, None, r"model_type 'llama' already belongs to the family 'llama'"),
        ({"sampler": "gpt"}, None, r"no sampler is called 'gpt'; known: llada, dream, dream-blocks, autoregressive"),
        ({"model_types": ()}, None, r"model_types must be a tuple of names, such as \('newdlm',\); got \(\)"),
        ({"model_types": "ours"}, None, r"model_types must be a tuple of names, .*; got 'ours'"),
        ({"architecture": "opt"}, None, r"'opt' has no hook points; .*families\.register"),
        ({}, Architecture(q="wq"), r"'llama' is already registered with other module names; leave architecture= out"),
    ],
)  # fmt: skip
def test_an_invalid_family_is_rejected_and_leaves_the_tables_unchanged(changes, architecture, text):
    family = replace(OURS)
    for name, value in changes.items():  # bypasses the tests' run-time type checks, which users do not have
        object.__setattr__(family, name, value)
    before = dict(FAMILIES), dict(ARCHITECTURES)
    with pytest.raises(CheckpointError, match=text):
        register(family, architecture)
    assert before == (FAMILIES, ARCHITECTURES)


@pytest.mark.parametrize(
    "look_up", [lambda folder: sinklens.load(folder).family, lambda _: family_named("plugged").name]
)
def test_a_family_from_an_entry_point_is_found_when_needed(checkpoint, package, look_up):
    package("plugged_families:families")
    rewrite(shutil.copytree(find_checkpoint("tiny-llada"), checkpoint, dirs_exist_ok=True), model_type="plugged")
    assert "plugged" not in FAMILIES
    assert look_up(checkpoint) == "plugged"
    assert "plugged" in FAMILIES


def test_the_command_line_lists_the_families_of_entry_points(package, capsys):
    package("plugged_families:families")
    assert main(["models"]) == 0
    assert "plugged    model_type plugged" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["plugged_families:nothing", "no_such_module:families"])
def test_an_entry_point_that_cannot_be_imported_is_named(package, value):
    package(value)
    with pytest.raises(
        CheckpointError, match=f"entry point plugged = {value} of the group sinklens.families could not be imported"
    ):
        family_named("elsewhere")
