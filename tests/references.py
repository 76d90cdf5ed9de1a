"""Packed folders of reference data, and how they are unpacked: one archive per folder in tests/reference_data.

A folder holds a tiny checkpoint in a public file format and what the model's own code computed from it. Nothing in it
was produced by sinklens. ``python tests/references.py FOLDER [NAME …]`` packs each folder in `FOLDER`, or those named;
the same files give the same archive.
"""

import io
import lzma
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

PACKED = Path(__file__).resolve().parent / "reference_data"


def pack(folder: Path, out: Path) -> None:
    """Write the files of a folder as an archive, without dates and owners."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(f"{folder.name}/{file.relative_to(folder).as_posix()}")
            entry.size, entry.mode = file.stat().st_size, 0o644
            archive.addfile(entry, io.BytesIO(file.read_bytes()))
    out.write_bytes(lzma.compress(content.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def unpack(out: Path, packed: Path = PACKED) -> Path:
    """Unpack in `out` what is missing or older than its archive; several processes may do so at once."""
    for archive in sorted(packed.glob("*.tar.xz")):
        name = archive.name.removesuffix(".tar.xz")
        folder = out / f"{name}-{archive.stat().st_size}-{archive.stat().st_mtime_ns}"
        if not (out / name).exists() or (out / name).resolve() != folder.resolve():
            with tempfile.TemporaryDirectory(dir=out) as part:
                with tarfile.open(archive) as content:
                    content.extractall(part, filter="data")
                _put(Path(part) / name, folder)
                link = Path(part) / "link"
                link.symlink_to(folder.name)
                link.replace(out / name)
    return out


def _put(made: Path, folder: Path) -> None:
    """Move a folder into place unless another process was first."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(made)


if __name__ == "__main__":
    source, *names = sys.argv[1:]
    for name in names or sorted(path.name for path in Path(source).iterdir() if path.is_dir()):
        pack(Path(source) / name, PACKED / f"{name}.tar.xz")
        print(f"{name}: {(PACKED / f'{name}.tar.xz').stat().st_size / 1e6:.2f} MB")
