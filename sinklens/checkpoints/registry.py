"""Families from outside the package, added by `register` or by entry points of installed packages.

`sinklens.load` looks families up in the tables `FAMILIES`, `BY_MODEL_TYPE` and `hooks.ARCHITECTURES`. `register` adds
records to them after checking that no known name changes its meaning. An installed package can add families without
being imported: its entry point in the group ``sinklens.families`` names a function without arguments that registers
them. The group is read when a name is not in the tables, and by ``sinklens models``.

Limitation: a family registered by a script exists only in that process. The command line and workers on other machines
know the shipped families and those of entry points.
"""

from importlib.metadata import entry_points

from sinklens.checkpoints.families import BY_CLASS, BY_MODEL_TYPE, FAMILIES, Family
from sinklens.errors import CheckpointError, SettingError
from sinklens.hooks.architectures import ARCHITECTURES, Architecture, architecture_of

GROUP = "sinklens.families"


def register(family: Family, architecture: Architecture | None = None) -> None:
    """Add a checkpoint family in this process, for `sinklens.load`, `family_named` and `FAMILIES`.

    Registering the same record again has no effect.

    Args:
        family: the family's record, with a new name and new model types.
        architecture: where the transformers class of `family.architecture` keeps the modules that carry the hook
            points; None if `hooks.ARCHITECTURES` already lists it.

    Raises:
        CheckpointError: another family has the name or a model type, the sampler is unknown, or the architecture has no
            hook points or has them in other places than `architecture` says.
    """
    placed = architecture_of(family.architecture) if architecture is None else architecture
    if ARCHITECTURES.get(family.architecture, placed) != placed:
        raise CheckpointError(
            f"architecture {family.architecture!r} is already registered with other module names; leave architecture= "
            f"out to use those, or start a new process to register others."
        )
    if family not in FAMILIES:
        _validate(family)
        FAMILIES.append(family)
    BY_MODEL_TYPE.update(dict.fromkeys(family.model_types, family))
    BY_CLASS.update(dict.fromkeys(family.classes, family))
    ARCHITECTURES[family.architecture] = placed


def _validate(family: Family) -> None:
    from sinklens.sampling.registry import find_sampler

    if isinstance(family.model_types, str) or not family.model_types:
        raise CheckpointError(f"model_types must be a tuple of names, such as ('newdlm',); got {family.model_types!r}.")
    try:
        find_sampler(family.sampler)
    except SettingError as error:
        raise CheckpointError(f"{error} Add one with sinklens.sampling.register.") from error
    if family.name in (known.name for known in FAMILIES):
        raise CheckpointError(
            f"a family called {family.name!r} already exists with another record; choose another name, or start a new "
            f"process to change the record."
        )
    for kind in family.model_types:
        if kind in BY_MODEL_TYPE:
            raise CheckpointError(
                f"model_type {kind!r} already belongs to the family {BY_MODEL_TYPE[kind].name!r}. Use another "
                f"model_type in your config.json."
            )
    for name in family.classes:
        if name in BY_CLASS:
            raise CheckpointError(
                f"architectures {name!r} already belongs to the family {BY_CLASS[name].name!r}. Use another name in "
                f"your config.json."
            )


def register_installed() -> None:
    """Register the families of installed packages, from the entry-point group ``sinklens.families``.

    Raises:
        CheckpointError: an entry point could not be imported, or a family that it registers is invalid.
    """
    for entry in entry_points(group=GROUP):
        try:
            registers = entry.load()
        except (ImportError, AttributeError) as error:
            raise CheckpointError(
                f"the entry point {entry.name} = {entry.value} of the group {GROUP} could not be imported ({error}); "
                f"fix or uninstall the package that defines it."
            ) from error
        registers()
