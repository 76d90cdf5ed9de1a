"""Reference data come out of their archives as they went in, also if several processes unpack them."""

import filecmp
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from references import PACKED, pack, unpack


def folder_with(path: Path, text: str) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(text)
    (path / "model.safetensors").write_bytes(bytes(range(256)))
    return path


def test_a_folder_is_unpacked_as_it_was_packed_and_replaced_when_its_archive_changes(tmp_path):
    packed, out = tmp_path / "packed", tmp_path / "out"
    packed.mkdir()
    out.mkdir()
    for text in ("first", "second, longer"):
        source = folder_with(tmp_path / text / "model", text)
        pack(source, packed / "model.tar.xz")
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: unpack(out, packed), range(8)))
        assert filecmp.dircmp(source, out / "model").diff_files == []
        assert (out / "model" / "config.json").read_text() == text
        assert (out / "model" / "model.safetensors").read_bytes() == bytes(range(256))


def test_the_packed_folders_equal_the_originals_where_those_are_at_hand(shared, conformance):
    names = [file.name.removesuffix(".tar.xz") for file in PACKED.glob("*.tar.xz")]
    assert len(names) >= 15
    for name in names:
        original = shared / "conformance" / name
        files = [str(path.relative_to(original)) for path in original.rglob("*") if path.is_file()]
        assert filecmp.cmpfiles(shared / "conformance" / name, conformance / name, files, shallow=False)[1:] == ([], [])
