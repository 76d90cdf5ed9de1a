"""The registry: all families and samplers by name, and to which family a checkpoint belongs.

Each module in `MODULES` brings its records (``FAMILIES``) and samplers (``SAMPLERS``). `register` adds one of a user's
own. An installed package adds some without being imported: its entry point in the group ``sinklens.families`` names a
function without arguments that calls `register`. The group is read when a name is not in the tables, and by
``sinklens models``.

`identify` uses config.json and the caller's arguments, and guesses nothing: a wrong guess would compute another model
without an error. Where these leave the question open, or keys of config.json contradict each other, the error says what
to pass. For example, a config.json of Qwen2 that names its own code may be that of a bidirectional model.

Limitations: a diffusion model whose config.json equals that of an ordinary causal one loads as causal. A family
registered by a script exists only in that process; the command line and workers on other machines read entry points.
"""

from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from inspect import isabstract
from typing import Any, NamedTuple

from sinklens.errors import CheckpointError, SettingError, nearest, require
from sinklens.families.base import FAMILY_KEY, Family
from sinklens.families.translation import value_at
from sinklens.hooks.architectures import ARCHITECTURES, Architecture, architecture_of
from sinklens.hooks.attention.blocks import Blocks, check_length
from sinklens.sampling.sampler import Sampler
from sinklens.utils.arguments import checked

GROUP = "sinklens.families"
DIFFUSION_KEYS = ("mask_token_id", "canvas_length", "dlm_paradigm", "dlm_type", "num_diffusion_steps")
"""Keys of config.json that only diffusion models have, besides those of `Family.block_length_key`."""
MODULES = (  # a family is its own file, and its line here
    "llada",
    "dream",
    "autoregressive",
    "rnd1",
    "open_dcoder",
    "sdar",
    "llada2",
    "a2d",
    "fast_dllm_v2",
    "diffusion_gemma",
    "mdlm",
    "sedd",
    "bd3lm_owt",
    "duo",
    "gidd",
    "diffullama",
    "nemotron",
)
_MODULES = [import_module(f"sinklens.families.{name}") for name in MODULES]
FAMILIES: dict[str, Family] = {family.name: family for module in _MODULES for family in module.FAMILIES}
SAMPLERS: dict[str, type[Sampler]] = {sampler.name: sampler for module in _MODULES for sampler in module.SAMPLERS}
_REORDERED = (
    "moves {what} in front of the masks of a causal pass and keeps each token's own position, so a column of a pass is "
    "not a position of the text, as every hook point, track and picture assumes"
)
REFUSED_FAMILIES = {
    "nemotron_labs_diffusion_vlm": "has a vision tower, and sinklens reads text only; load the text model",
    "wedlm": f"belongs to WeDLM, which {_REORDERED.format(what='decided tokens')}; it is not supported",
    "refusion": f"belongs to ReFusion, which {_REORDERED.format(what='decided slots')}; it is not supported",
}
"""Values of ``model_type``, or beginnings of the names of classes -> why such a checkpoint is refused."""
REFUSED_SAMPLERS = {
    "d3llm": "is not available: it works on several blocks at a time, decides by entropy, and recomputes cached keys "
    "on a schedule, and no stored run of its authors' code says how these rules combine. Its checkpoints are LLaDA's "
    "and Dream's; load them and use those samplers, with threshold= or a cache policy (cache=)."
}
"""Names of known samplers that are not available -> why."""


def register(new: Family | type[Sampler], architecture: Architecture | None = None) -> None:
    """Add a family or a sampler in this process; registering the same one again has no effect.

    Args:
        new: a family's record, with a new name and new model types; or a dataclass derived from `Sampler`.
        architecture: for a family: where the transformers class of `Family.architecture` keeps the modules that carry
            the hook points; None if `hooks.architectures.ARCHITECTURES` already lists it.

    Raises:
        CheckpointError: another family has the name or a model type, its sampler is unknown, or the architecture has no
            hook points or has them in other places than `architecture` says.
        SettingError: another sampler has the name, or the class is not a complete sampler.
    """
    if not isinstance(new, Family):
        complete = isinstance(new, type) and issubclass(new, Sampler) and not isabstract(new) and "name" in vars(new)
        require(
            complete,
            f"{getattr(new, '__name__', new)} must be a dataclass derived from Sampler with a name and denoise.",
        )
        require(
            SAMPLERS.setdefault(new.name, new) is new,
            f"a sampler called {new.name!r} already exists; choose another name.",
        )
        return
    placed = architecture_of(new.architecture) if architecture is None else architecture
    require(
        ARCHITECTURES.get(new.architecture, placed) == placed,
        f"architecture {new.architecture!r} is already registered with other module names; leave architecture= "
        f"out to use those, or start a new process to register others.",
        CheckpointError,
    )
    if FAMILIES.get(new.name) != new:
        require(
            not isinstance(new.model_types, str) and new.model_types,
            f"model_types must be a tuple of names, such as ('newdlm',); got {new.model_types!r}.",
            CheckpointError,
        )
        try:
            find_sampler(new.sampler)
        except SettingError as error:
            raise CheckpointError(f"{error} Add one with sinklens.families.register.") from error
        require(
            new.name not in FAMILIES,
            f"a family called {new.name!r} already exists with another record; choose another name, or start a new "
            f"process to change the record.",
            CheckpointError,
        )
        for key, names in (("model_type", new.model_types), ("architectures", new.classes)):
            for name in names:
                if taken := next(_named_by(key, name), None):
                    raise CheckpointError(
                        f"{key} {name!r} already belongs to the family {taken.name!r}. Use another one in your "
                        f"config.json."
                    )
    FAMILIES[new.name], ARCHITECTURES[new.architecture] = new, placed


def register_installed() -> None:
    """Register what installed packages bring, from the entry-point group ``sinklens.families``.

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


def find_sampler(name: str) -> type[Sampler]:
    """The sampler called `name`.

    Raises:
        SettingError: no sampler has this name, or it is known and not supported.
    """
    require(isinstance(name, str), f"sampler must be a name, one of {', '.join(SAMPLERS)}; got {name!r}.")
    if name not in SAMPLERS:
        register_installed()
    if name not in SAMPLERS:
        refused = REFUSED_SAMPLERS.get(name.lower())
        raise SettingError(
            f"the sampler {name!r} {refused}"
            if refused
            else f"no sampler is called {name!r}; known: {', '.join(SAMPLERS)}.{nearest(name, SAMPLERS)}"
        )
    return SAMPLERS[name]


@checked
def family_named(name: str) -> Family:
    """The family called `name`; a hyphen and an underscore are the same.

    Raises:
        CheckpointError: there is no such family.
    """
    plain = name.replace("_", "-")
    if plain not in FAMILIES and name not in FAMILIES:
        register_installed()
    known = {family.replace("_", "-"): record for family, record in FAMILIES.items()}
    require(
        plain in known,
        f"no family is called {name!r}; known: {', '.join(FAMILIES)}.{nearest(name, FAMILIES)}",
        CheckpointError,
    )
    return FAMILIES.get(name, known[plain])


class Identity(NamedTuple):
    """What a checkpoint is.

    Attributes:
        family: its family.
        blocks: the blocks of its attention; None if it is not block-causal.
    """

    family: Family
    blocks: Blocks | None


def identify(
    config: dict[str, Any], file: str = "config.json", name: str | None = None, block_length: int | None = None
) -> Identity:
    """The family and the blocks of a checkpoint.

    Args:
        config: the parsed config.json.
        file: the checkpoint, for messages.
        name: the family, where the caller knows it.
        block_length: positions per block, where the caller knows it.

    Raises:
        CheckpointError: the family is unknown or open, see `family_of`; or its attention has no blocks and a length was
            given; or it has, and nothing says the length, or it is not a number of positions.
    """
    family = family_of(config, file, name, block_length)
    if not family.block_causal:
        require(
            block_length is None,
            f"{file}: the {family.name} family has {family.attention} attention, which has no blocks; leave "
            f"block_length= out. Runs take one as a setting of their sampler.",
            CheckpointError,
        )
        return Identity(family, None)
    key = family.block_length_key
    lengths = (block_length, config.get(key), family.block_length)
    found = next((length for length in lengths if length is not None), None)
    require(
        found is not None,
        f"{file}: config.json does not give the block length of this {family.name} checkpoint{f' ({key})' * bool(key)}"
        f"; pass it, as in sinklens.load(..., block_length=4). The checkpoint's name or its model card says it.",
        CheckpointError,
    )
    try:
        return Identity(family, Blocks(check_length(found), family.blocks_start))
    except SettingError as error:
        source = f"config.json has {key} = {found!r}: " if block_length is None else ""
        raise CheckpointError(f"{file}: {source}{error}") from error


def family_of(
    config: dict[str, Any], where: str, name: str | None = None, block_length: int | None = None
) -> Family:  # fmt: skip
    """The family called `name`, or the one that config.json names: by `FAMILY_KEY`, ``architectures`` or
    ``model_type``.

    Raises:
        CheckpointError: there is no such family; or several share the ``model_type``, and neither `name` nor
            `block_length` says which; or no `name` is given, and another key contradicts the ``model_type``.
    """
    if (named := name or config.get(FAMILY_KEY)) is not None:
        return family_named(str(named))
    family = named_family(config, where)
    _refuse_other_model(config, family, where)
    sharing = [one for one in FAMILIES.values() if one.regime and set(one.model_types) & set(family.model_types)]
    if not family.regime or len(sharing) < 2:
        return family
    if block_length is not None:
        sharing = [one for one in sharing if one.block_causal]
    if len(sharing) == 1:
        return sharing[0]
    choices = "; ".join(f"family={one.name!r}, {one.regime}" for one in sharing)
    raise CheckpointError(
        f"{where}: model_type {config.get('model_type')!r} does not say how the checkpoint was trained, and a wrong "
        f"choice computes another model. Its model card says how; pass one of {choices}."
    )


def _named_by(key: str, value: Any) -> Iterator[Family]:
    """The families that a value of ``model_type`` or ``architectures`` names."""
    for family in FAMILIES.values():
        if value in (family.model_types if key == "model_type" else family.classes):
            yield family


def named_family(config: dict[str, Any], where: str) -> Family:
    """The first family that ``architectures`` or ``model_type`` in config.json names.

    Raises:
        CheckpointError: it does not name a family; the message says if the checkpoint asks for code that it ships.
    """
    kind, classes = config.get("model_type"), class_names(config)
    by_class = next((family for name in classes for family in _named_by("architectures", name)), None)
    if by_class is not None:
        return by_class
    named = {f"model_type {kind!r}": str(kind), **{f"the class {name!r} in architectures": name for name in classes}}
    for what, value in named.items():
        if known := next((one for one in REFUSED_FAMILIES if value.lower().startswith(one)), None):
            raise CheckpointError(f"{where}: {what} {REFUSED_FAMILIES[known]}.")
    if next(_named_by("model_type", kind), None) is None:
        register_installed()
    if by_type := next(_named_by("model_type", kind), None):
        return by_type
    require(
        not {"graph", "tokens", "model"} <= config.keys(),
        f"{where}: config.json has no model_type, but looks like SEDD's training configuration; if it is, pass "
        f"family='sedd'.",
        CheckpointError,
    )
    needs_code = (
        " It asks for code in its repository (auto_map), which sinklens never runs." if config.get("auto_map") else ""
    )
    known_types = list(dict.fromkeys(one for family in FAMILIES.values() for one in family.model_types))
    raise CheckpointError(
        f"{where}: model_type {kind!r:.100} is not a known family.{needs_code} Known: {', '.join(known_types)}."
        f"{nearest(str(kind), known_types)} Correct config.json, or add a family with sinklens.families.register."
    )


def class_names(config: dict[str, Any]) -> list[str]:
    """The entries of ``architectures``.

    Raises:
        CheckpointError: it is not a name or a list.
    """
    entries = config.get("architectures")
    require(
        isinstance(entries, str | list | None),
        f"config.json has architectures = {entries!r}; it is a list of names of classes.",
        CheckpointError,
    )
    return [str(name) for name in ([entries] if isinstance(entries, str) else entries or ())]


def _refuse_other_model(config: dict[str, Any], family: Family, where: str) -> None:
    """Refuse a checkpoint whose config.json says that its model is not the one that ``model_type`` names."""
    named = next(_named_by("model_type", config.get("model_type")), None)
    if named is not None and named.stock:
        family = named
    signs = _signs_of_another(config, family)
    if not signs:
        return
    choices = ", ".join(
        f"{one.name!r} ({one.attention}{', predicts the next position' * one.shift})"
        for one in FAMILIES.values()
        if one.architecture == family.architecture and (one.convert == family.convert or _has_keys(config, one))
    )
    raise CheckpointError(
        f"{where}: config.json is that of {family.name}, but {', and '.join(signs)}, so its model may differ. Pass "
        f"family=, as the model card says: {choices}."
    )


def _has_keys(config: dict[str, Any], family: Family) -> bool:
    """Whether a config has the keys that a family needs; rotation and number of experts also by transformers' keys."""
    own = {"rope_theta": "rope_parameters or rope_theta", "num_experts": "num_local_experts or num_experts"}
    needed = [own.get(keys, keys).split(" or ") for keys in family.needed]
    return all(any(value_at(config, key) is not None for key in keys) for keys in needed)


def _signs_of_another(config: dict[str, Any], family: Family) -> list[str]:
    """What in config.json says that the model is not `family`'s."""
    foreign = [name for name in class_names(config) if family.own_classes and name not in family.own_classes]
    directed = not family.class_attention and isinstance(config.get("is_causal"), bool)
    brought = config.get("auto_map")
    entries = brought.items() if isinstance(brought, dict) and family.stock else ()
    code = {str(name) for key, name in entries if key.startswith(("AutoConfig", "AutoModel"))}
    keys = {*DIFFUSION_KEYS, *(one.block_length_key for one in FAMILIES.values() if one.block_length_key)}
    unusual = family.stock and family.causal and config.get("is_causal") is not True
    signs = {
        f"architectures names {', '.join(foreign)} instead of {' or '.join(family.own_classes)}": foreign,
        f"is_causal is {config.get('is_causal')}": directed and config["is_causal"] != family.causal,
        f"auto_map names code of its own ({', '.join(sorted(code))})": code,
        **{f"it has {key}, which causal models lack": unusual and config.get(key) is not None for key in sorted(keys)},
    }
    return [sign for sign, seen in signs.items() if seen]
