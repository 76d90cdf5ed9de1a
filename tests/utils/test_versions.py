"""A library of another version than sinklens needs is named when a model is first used, not by a later failure."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sinklens.errors import SinklensError
from sinklens.hooks import neighbors
from sinklens.utils import versions


@pytest.mark.parametrize(
    ("package", "version"), [("transformer-lens", "3.9.0"), ("nnsight", "0.9.0"), ("transformers", "4.57.1")]
)
def test_a_package_of_another_version_is_named_with_the_way_back(monkeypatch, package, version):
    monkeypatch.setattr(versions, "version_of", lambda name: version)
    with pytest.raises(SinklensError, match=rf"needs {package} .*version {version} is installed; .*Run pip install"):
        versions.check_versions(package)


def test_the_installed_versions_and_a_development_version_within_the_range_are_accepted(monkeypatch):
    versions.check_versions(*neighbors.CHECKED)
    monkeypatch.setattr(versions, "version_of", lambda name: "5.24.0.dev0")
    versions.check_versions("transformers")


@pytest.mark.extended
def test_importing_sinklens_does_not_check_and_loading_does(tmp_path: Path):
    folder = tmp_path / "transformer_lens-3.9.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-lens\nVersion: 3.9.0\n")
    script = "import sinklens; print('imported'); sinklens.load('tiny-llada')"
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "imported\n"
    assert "SinklensError: sinklens needs transformer-lens <5,>=4.3, but version 3.9.0 is installed" in done.stderr
