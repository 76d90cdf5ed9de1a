"""Upload an SAE, a probe or a sink track to a folder of a repository on the hub.

`load_sae`, `Probe.load` and `SinkTrack.open` read it by the same name. Nothing is pickled: an SAE is ``cfg.json`` with
safetensors, a probe is safetensors, and a track a NetCDF file.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from sinklens.errors import CheckpointError, require
from sinklens.features import probes
from sinklens.features.autoencoder import SparseAutoencoder
from sinklens.features.probes import Probe
from sinklens.features.saelens import save_sae
from sinklens.sinks import SinkTrack, files
from sinklens.utils.arguments import checked
from sinklens.utils.hub import on_hub, parts_of, reason_of


@checked
def push_to_hub(what: SparseAutoencoder | Probe | SinkTrack, name: str, *, private: bool = True) -> str:
    """Upload an SAE, a probe or a track in one commit; the repository is created if it is missing.

    Args:
        what: a `SparseAutoencoder`, a `Probe` or a `SinkTrack`.
        name: ``owner/repository`` or ``owner/repository/folder``.
        private: whether a repository that is created is private.

    Returns:
        The commit, which loading takes as ``revision=``.

    Raises:
        SettingError: something else.
        CheckpointError: not a name on the hub, or it could not be uploaded.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    require(on_hub(name), f"{name!r} is not a name on the hub; pass 'owner/repository/folder'.", CheckpointError)
    repository, inner = parts_of(name)
    with TemporaryDirectory() as folder:
        if isinstance(what, SparseAutoencoder):
            save_sae(what, folder)
        else:
            what.save(Path(folder) / (probes.FILE if isinstance(what, Probe) else files.FILE))
        try:
            api = HfApi()
            api.create_repo(repository, private=private, exist_ok=True)
            commit = api.upload_folder(repo_id=repository, folder_path=folder, path_in_repo=inner.as_posix())
        except (OSError, HTTPError, HFValidationError) as error:
            raise CheckpointError(
                f"could not upload {name!r} to the hub: {type(error).__name__}: {reason_of(error)}. Check the name and "
                f"the network, and run `hf auth login` (or set HF_TOKEN) with a token that may write there."
            ) from error
    return commit.oid
