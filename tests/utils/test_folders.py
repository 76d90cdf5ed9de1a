"""Folders for results: what is refused before a run, and that a check leaves nothing behind."""

from unittest.mock import Mock

import pytest

from sinklens.errors import SinklensError
from sinklens.utils.folders import MARKS, check_folder, require_writable


@pytest.mark.parametrize("name", ["new", "new/deeper", "there"])
def test_a_check_leaves_nothing_behind(tmp_path, name):
    (tmp_path / "there").mkdir()
    check_folder(tmp_path / name, "a study")
    assert [file.name for file in tmp_path.rglob("*")] == ["there"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("kept")
    for name in ("file", "file/deeper"):
        with pytest.raises(
            SinklensError, match=r"cannot write to .*file.*: Not a directory\. Make room or choose another"
        ):
            require_writable(tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"
    monkeypatch.setattr("tempfile.TemporaryFile", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(SinklensError, match="No space left on device"):
        require_writable(tmp_path)


@pytest.mark.parametrize("kind", MARKS)
def test_results_of_two_kinds_do_not_share_a_folder(tmp_path, kind):
    for number, pattern in enumerate(MARKS[kind]):
        folder = tmp_path / str(number)
        mark = folder / pattern.replace("*", "1")
        mark.parent.mkdir(parents=True)
        mark.write_text("{}")
        check_folder(folder, kind)
        for other in MARKS.keys() - {kind}:
            with pytest.raises(SinklensError, match=f"holds {kind} already; choose another folder for {other}"):
                check_folder(folder, other)
