"""Fixtures of the reference data: a module names its folder as ``FOLDER``."""

import pytest
from published import Reference


@pytest.fixture(scope="module")
def reference(request, shared):
    return Reference(shared / "conformance" / request.module.FOLDER)


@pytest.fixture(scope="module")
def load(reference, tmp_path_factory):
    return reference.loader(tmp_path_factory.mktemp(reference.folder.name))
