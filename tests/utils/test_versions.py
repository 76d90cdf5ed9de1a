"""A library of another version than sinklens needs is named when a model is first used, not by a later failure."""

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
