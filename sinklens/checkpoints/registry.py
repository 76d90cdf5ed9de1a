"""Families from outside the package: by `register`, or by the entry points of an installed package.

`FAMILIES`, `BY_MODEL_TYPE` and `hooks.ARCHITECTURES` are the tables that `sinklens.load` looks into. `register` adds
records to them, after a look that nothing known would come to mean something else. An installed package makes its
families known without being imported: in the entry-point group ``sinklens.families`` it names a function without
arguments that registers them. The group is read where a name is met that the tables lack, and by ``sinklens models``.

One way this fails: what a script registers is known in its own process. The command line and workers on other machines
know what ships and what entry points name.
"""

from importlib.metadata import entry_points
from typing import get_args

from sinklens.checkpoints.families import BY_MODEL_TYPE, FAMILIES, Family, Sampler
from sinklens.errors import CheckpointError
from sinklens.hooks.architectures import ARCHITECTURES, Architecture, architecture_of

GROUP = "sinklens.families"


def register(family: Family, architecture: Architecture | None = None) -> None:
    """Make a checkpoint family known in this process: to `sinklens.load`, `family_named` and `FAMILIES`.

    The same records may be registered again, which changes nothing.

    Args:
        family: how the files become a model; its name and its model types are new.
        architecture: where the transformers class of `family.architecture` keeps the modules that the hook points
            stand on; None where `hooks.ARCHITECTURES` tells already.

    Raises:
        CheckpointError: another family has the name or a model type, there is no such sampler, or the architecture has
            no hook points, or has them elsewhere than `architecture` says.
    """
    placed = architecture_of(family.architecture) if architecture is None else architecture
    if ARCHITECTURES.get(family.architecture, placed) != placed:
        raise CheckpointError(
            f"architecture {family.architecture!r} is known with other module names than those given; leave "
            f"architecture= out to use them."
        )
    if family not in FAMILIES:
        _refuse_if_unfit(family)
        FAMILIES.append(family)
    BY_MODEL_TYPE.update(dict.fromkeys(family.model_types, family))
    ARCHITECTURES[family.architecture] = placed


def _refuse_if_unfit(family: Family) -> None:
    if isinstance(family.model_types, str) or not family.model_types:
        raise CheckpointError(f"model_types is a tuple of names, such as ('newdlm',); got {family.model_types!r}.")
    if family.sampler not in get_args(Sampler):
        raise CheckpointError(f"sampler {family.sampler!r} is none of {', '.join(get_args(Sampler))}.")
    if family.name in (known.name for known in FAMILIES):
        raise CheckpointError(
            f"a family called {family.name!r} is known already, with another record; give this one another name, or "
            f"begin a new process to change it."
        )
    for kind in family.model_types:
        if kind in BY_MODEL_TYPE:
            raise CheckpointError(
                f"model_type {kind!r} means the family {BY_MODEL_TYPE[kind].name!r} already; a checkpoint cannot be of "
                f"two families. Give the config.json of yours another model_type."
            )


def register_installed() -> None:
    """Register what installed packages name in the entry-point group ``sinklens.families``.

    Raises:
        CheckpointError: an entry point leads to nothing, or what it registers is refused.
    """
    for entry in entry_points(group=GROUP):
        try:
            registers = entry.load()
        except (ImportError, AttributeError) as error:
            raise CheckpointError(
                f"the entry point {entry.name} = {entry.value} of the group {GROUP} leads to nothing ({error}); mend "
                f"the package that names it, or uninstall it."
            ) from error
        registers()
