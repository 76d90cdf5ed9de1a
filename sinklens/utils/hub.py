"""Folders of repositories on the hub (huggingface_hub), by name and revision: a branch, a tag or a commit.

A name on the hub is ``owner/repository`` or ``owner/repository/folder``. Only the files that are asked for are fetched.

Pitfall: a name on the hub looks like a relative path. What exists on disk is read from there. A path into a folder that
exists, or that begins or ends as paths do, is never asked of the hub, so a mistyped one fails at once.
"""

from collections.abc import Sequence
from pathlib import Path

from sinklens.errors import CheckpointError, require

ON_DISK = (".json", ".nc", ".pt", ".safetensors", ".zarr")
"""How names of files and stores end."""


def local(path: str | Path, revision: str | None, files: Sequence[str]) -> Path:
    """`path` if it exists or cannot be a name on the hub, else the local copy of the folder on the hub, with `files`.

    Raises:
        CheckpointError: the files could not be downloaded, a revision of a local path, or a path into an existing
            folder that does not exist.
    """
    if Path(path).exists() or not on_hub(path):
        refuse_revision(path, revision)
        return Path(path)
    refuse_missing(path, revision)
    repository, inner = parts_of(path)
    return download(repository, revision, [str(inner / name) for name in files]) / inner


def on_hub(path: str | Path) -> bool:
    """Whether `path` can be a name on the hub."""
    named = not str(path).startswith((".", "~", "/")) and Path(path).suffix not in ON_DISK
    return named and len(Path(path).parts) > 1


def parts_of(name: str | Path) -> tuple[str, Path]:
    """The repository of a name on the hub, and the folder in it."""
    owner, repository, *inner = Path(name).parts
    return f"{owner}/{repository}", Path(*inner)


def refuse_revision(path: str | Path, revision: str | None) -> None:
    says = f"revision {revision!r} applies to names on the hub, and {path} is on disk. Leave revision out."
    require(revision is None, says, CheckpointError)


def refuse_missing(path: str | Path, revision: str | None, otherwise: str = "pass revision='main'") -> None:
    """Refuse a missing `path` whose first folder exists, unless a revision is given: it is no name on the hub."""
    first = Path(path).parts[0]
    require(
        revision is not None or not Path(first).is_dir(),
        f"{path} does not exist, and is read as a path because there is a folder {first}. Check its spelling; for the "
        f"repository of that name on the hub, {otherwise}.",
        CheckpointError,
    )


def reason_of(error: Exception) -> str:
    """The first line of what an error says."""
    return next(iter(str(error).splitlines()), "no reason given").rstrip(".")


def download(name: str, revision: str | None, wanted: list[str]) -> Path:
    """The local folder of a repository on the hub, with the files whose names match one of the patterns `wanted`.

    Raises:
        CheckpointError: it could not be downloaded.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError  # HTTPError: of the hub's HTTP client

    offline = bool(constants.HF_HUB_OFFLINE)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, local_files_only=offline))
    except (OSError, HTTPError, HFValidationError) as error:
        at_revision = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"could not download {name!r}{at_revision} from the hub: {type(error).__name__}: {reason_of(error)}. "
            f"{_way_out(name, error, offline)}"
        ) from error


def _way_out(name: str, error: Exception, offline: bool) -> str:
    """What to do about a download that failed."""
    from huggingface_hub.errors import GatedRepoError

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError) or status in (401, 403):
        return (
            f"The repository is gated or private: accept its terms at https://huggingface.co/{name} with your account, "
            f"then run `hf auth login` (or set HF_TOKEN) on this machine, and load it again."
        )
    if offline:
        return (
            f"HF_HUB_OFFLINE is set and the cache lacks it: run `hf download {name}` where there is a network, or "
            f"unset HF_HUB_OFFLINE."
        )
    return (
        "Check the name and the network, or download the files elsewhere and pass their folder; gated models need "
        "`hf auth login` first."
    )
