"""Loads a checkpoint into the transformers class of its family.

In this order: the config is translated; the headers are checked against a model on the meta device; device, element
type, tokenizer and mask token are determined; and only then are the weights read, so a failure leaves nothing
half-loaded. transformers reads them (`from_pretrained` with the translated config and the family's renames).
`is_causal` is set on the config, which decides the mask, and on every attention module, where transformers' fused
attention looks for it if no mask is passed. A class that decides this itself (`Family.class_attention`) keeps its
flags.

Pitfall: transformers' own `generate` decodes any model from left to right without an error, even one that was trained
to fill masks. While a diffusion model is loaded, its `generate` raises an error; see `_refuse_decoding`.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import torch
from annotated_types import Ge
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from sinklens.errors import CheckpointError, CheckpointWarning, SettingError, require, warn_caller
from sinklens.families import FAMILIES, Family, identify, translate
from sinklens.families.registry import family_of
from sinklens.families.samplers import read_settings
from sinklens.families.translation import UNBUILDABLE, check_required, one_spelling, shape_of, value_at
from sinklens.hooks.adapter import Adapter
from sinklens.hooks.attention import segments
from sinklens.hooks.attention.blocks import Blocks, write
from sinklens.model import files, quantization
from sinklens.model.adapters import has_adapter, merge, read_adapter, read_lora
from sinklens.model.packing import joined_shape, stored_places
from sinklens.model.reading import SMALL, DeviceMap, dtype_for, read
from sinklens.utils.arguments import Count, check_arguments, read_as
from sinklens.utils.documents import parse_json, read_json, read_text
from sinklens.utils.progress import transformers_output

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip
TokenId = Annotated[int, Ge(0)]


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """The arguments of loading a model, checked; `sinklens.load` says what each means.

    Raises:
        SettingError: an argument has another type or is out of range.
    """

    revision: str | None = None
    dtype: str | torch.dtype = "auto"
    device: str | torch.device | int | None = None
    device_map: DeviceMap | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    family: str | None = None
    block_length: Count | None = None
    mask_token_id: TokenId | None = None
    quantization: Any = None
    adapter: str | Path | None = None
    check: bool = True

    def __post_init__(self) -> None:
        check_arguments(self)


def family_at(name_or_path: str | Path, options: Mapping[str, Any]) -> Family:
    """The family as which a model is loaded with these arguments of `LoadRequest`."""
    raw = _folders(name_or_path, options.get("revision"), options.get("adapter")).read_config()
    return family_of(raw, str(name_or_path), options.get("family"), options.get("block_length"))


def fitting(name_or_path: str | Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `LoadRequest` for several models, as they apply to one of them.

    Returns:
        The arguments, with ``block_length`` only if it is block-causal and ``mask_token_id`` only if it has a mask
        token.

    Raises:
        CheckpointError: the checkpoint was not found, or its family is unknown or open.
    """
    if options.get("block_length") is None and options.get("mask_token_id") is None:
        return dict(options)
    family = family_at(name_or_path, options)
    fits = {"block_length": family.block_causal, "mask_token_id": family.masked and not family.causal}
    return {name: value for name, value in options.items() if fits.get(name, True)}


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model with its tokenizer, family and special tokens.

    Attributes:
        hf: the transformers model, in evaluation mode.
        tokenizer: None if the checkpoint has none.
        family: the family's record.
        mask_token_id: None for autoregressive models.
        eos_token_ids: tokens that end an answer.
        defaults: the checkpoint's sampler settings.
        blocks: the blocks of a block-causal model; None for other attention.
        refused_tokens: token ids that prompts must not contain, and what they stand for.
        name: the name or path that was loaded.
        revision: the commit of a checkpoint from the hub, whatever branch or tag was requested; None for a folder.
        undo: closing it restores everything that `prepare` changed in the transformers model.
        adapter: the checkpoint's adapter, which draft passes use; None without one.
    """

    hf: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase | None"
    family: Family
    mask_token_id: int | None
    eos_token_ids: tuple[int, ...]
    defaults: dict[str, Any]
    name: str
    revision: str | None = None
    blocks: Blocks | None = None
    refused_tokens: dict[int, str] = field(default_factory=dict)
    undo: ExitStack = field(default_factory=ExitStack, repr=False, compare=False)
    adapter: Adapter | None = None


def build_empty(
    config: "PreTrainedConfig",
    model_class: str = "AutoModelForCausalLM",
    device: str = "meta",
    dtype: torch.dtype | None = None,
) -> "PreTrainedModel":
    """A family's model on the meta device, which has names and shapes but takes no memory.

    Args:
        config: its transformers config.
        model_class: as in `Family`.
        device: another device, for a model of fake tensors (`sinklens.utils.allocations`).
        dtype: element type; by default that of the config.

    Raises:
        CheckpointError: transformers cannot build the model, e.g. because it lacks the activation function.
    """
    import transformers

    try:
        with torch.device(device), transformers_output():
            return getattr(transformers, model_class).from_config(
                config, attn_implementation="sdpa", **({} if dtype is None else {"dtype": dtype})
            )
    except UNBUILDABLE as error:
        raise CheckpointError(
            f"transformers cannot build a {config.model_type} model from this config: {type(error).__name__}: {error}."
        ) from error


def load_checkpoint(name_or_path: str | Path, request: LoadRequest) -> Checkpoint:
    """Load a checkpoint by name or folder.

    Raises:
        CheckpointError: see `sinklens.load`.
    """

    import sinklens.hooks.attention.attention as attention

    folders = _folders(name_or_path, request.revision, request.adapter)
    folder, place, raw = folders.weights, folders.adapter, folders.read_config()
    family, blocks = identify(raw, str(folders.config), request.family, request.block_length)
    raw = _with_mask(raw, request.mask_token_id, family, str(folders.config))
    weights = files.read_headers(folder, family, quantized=raw.get("quantization_config") is not None)
    rows, size = weights.shapes.get(family.rows_of, (0,))[0], raw.get("vocab_size")
    padded = {"vocab_size": rows} if isinstance(size, int) and rows > size else {}  # config.json may name fewer tokens
    config = translate(raw | padded, family, str(folders.config))
    packed = quantization.published(raw, family, str(folder))
    try:
        empty = _fitting(config, family, weights, packed, str(folder))
    except CheckpointError as error:
        raise CheckpointError(f"{error} {shape_of(raw, family)}") from error
    tied = dict(empty.all_tied_weights_keys)
    lora = None if place is None else read_lora(place, family, weights, empty)
    adapter = read_adapter(folder, family, weights, empty)
    require(
        request.device is None or request.device_map is None,
        "pass device= or device_map=, not both.",
        CheckpointError,
    )
    device = _device(request.device)
    dtype = dtype_for(request.dtype, weights, device, packed is not None)
    if request.quantization is not None:
        quantization.check_wanted(request.quantization, packed, str(folder))
    found = request.tokenizer if request.tokenizer is not None else _tokenizer(folder, config)
    _mask_token(raw, found, family, config.get_text_config().vocab_size, str(name_or_path))
    defaults = _sampler_defaults(folders.generation, family)
    quantized = packed is not None or request.quantization is not None
    require(
        not quantized or lora is None,
        f"{place}: an adapter cannot be merged into quantized weights; load them unquantized.",
        CheckpointError,
    )
    placed = request.device_map is not None or not (quantized or device.type != "cpu")
    device_map = request.device_map if placed else {"": device}
    read_to = partial(read, folder, family, config, dtype=dtype, device_map=device_map, attention=attention.NAME)
    with transformers_output(bars=weights.parameters >= SMALL):
        hf = quantization.read_quantized(read_to, config, packed, request.quantization) if quantized else read_to()
    _tie(hf, tied, weights, str(folder))
    if lora is not None and place is not None:
        merge(hf, lora, tied, place)
    if folders.generation != folder:
        hf.generation_config = GenerationConfig.from_pretrained(folders.generation)
    revision = files.commit_of(folder) or request.revision
    return replace(prepare(hf, found, family, raw, str(name_or_path), revision, defaults, blocks), adapter=adapter)


def _fitting(
    config: "PreTrainedConfig", family: Family, weights: files.Weights, packed: Any, where: str
) -> "PreTrainedModel":
    """The model without its weights.

    Raises:
        CheckpointError: the files hold other weights than it has.
    """
    layers = config.get_text_config().num_hidden_layers
    require(
        layers <= len(weights.shapes),
        f"{where}: the files hold {len(weights.shapes)} weights, too few for {layers} layers.",
        CheckpointError,
    )
    empty = build_empty(config, family.model_class)
    if packed is None:
        expected = {name: tuple(value.shape) for name, value in empty.state_dict().items()}
        stored = {name: joined_shape(places) for name, places in stored_places(expected, family.fused).items()}
        files.check_weights(weights, stored, set(empty.all_tied_weights_keys), where)
    return empty


class _Folders(NamedTuple):
    """Where the files of a checkpoint are.

    Attributes:
        weights: the folder of the weights and the tokenizer.
        adapter: that of the adapter to merge, which the caller names or the checkpoint has; None without one.
        config: that of config.json: the adapter's, if it has one, as it can be of another family than its base.
        generation: that of generation_config.json, likewise.
    """

    weights: Path
    adapter: Path | None
    config: Path
    generation: Path

    def read_config(self) -> dict[str, Any]:
        """config.json, with the quantization of the weights."""
        held, own = files.read_config(self.weights), files.read_config(self.config)
        packed = {name: value for name, value in held.items() if name == "quantization_config"}
        return {name: value for name, value in own.items() if name != "quantization_config"} | packed


def _folders(name_or_path: str | Path, revision: str | None, adapter: str | Path | None) -> _Folders:
    folder = files.find_checkpoint(name_or_path, revision)
    if adapter is None:
        return _Folders(folder, folder if has_adapter(folder) else None, folder, folder)
    try:
        place = files.find_checkpoint(adapter, otherwise="download it with `hf download`, and pass its folder")
    except CheckpointError as error:
        raise CheckpointError(f"adapter={str(adapter)!r}: {error}") from error
    require(
        not has_adapter(folder) or place.resolve() == folder.resolve(),
        f"{folder} has an adapter of its own, which is merged; leave adapter= out, or move its adapter files away.",
        CheckpointError,
    )
    names = ("config.json", "generation_config.json")
    return _Folders(folder, place, *(place if (place / name).is_file() else folder for name in names))


def outline(
    name_or_path: str | Path, request: LoadRequest, device: str = "meta", dtype: torch.dtype | None = None
) -> Checkpoint:
    """A checkpoint on the meta device: everything but its weights, which may be missing.

    Args:
        device, dtype: as in `build_empty`.

    Raises:
        CheckpointError: see `sinklens.load`.
    """
    folders = _folders(name_or_path, request.revision, request.adapter)
    folder, raw = folders.weights, folders.read_config()
    family, blocks = identify(raw, str(folders.config), request.family, request.block_length)
    config = translate(raw, family, str(folders.config))
    found = request.tokenizer if request.tokenizer is not None else _tokenizer(folder, config)
    empty = build_empty(config, family.model_class, device, dtype)
    revision = files.commit_of(folder) or request.revision
    return prepare(
        empty, found, family, raw, str(name_or_path), revision, _sampler_defaults(folders.generation, family), blocks
    )


def _tie(hf: "PreTrainedModel", tied: dict[str, str], weights: files.Weights, where: str) -> None:
    """Share the weights that the config ties, even where the files hold another value, which transformers 5 would use.

    Raises:
        CheckpointError: they differ, and one of them stays on disk.
    """
    value = hf.get_parameter_or_buffer
    parted = [target for target, source in tied.items() if value(target) is not value(source)]
    if not parted:
        return
    names = ", ".join(weights.original.get(name, name) for name in parted)
    untie = "set tie_word_embeddings (in LLaDA's format: weight_tying) in config.json to false"
    require(
        not any(value(name).is_meta for target in parted for name in (target, tied[target])),
        f"{where}: config.json ties {names} to other weights, but the files hold another value. Load without "
        f"device_map=; or, to use the stored value, {untie}.",
        CheckpointError,
    )
    hf.tie_weights()
    warn_caller(
        f"{where}: config.json ties {names} to other weights, so the different value in the files is not used. To use "
        f"it, {untie}.",
        CheckpointWarning,
    )


def prepare(
    hf: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    family: Family,
    raw: dict[str, Any],
    name: str,
    revision: str | None = None,
    defaults: dict[str, Any] | None = None,
    blocks: Blocks | None = None,
) -> Checkpoint:
    """Put a transformers model into the state that sinklens requires, and return it with its special tokens."""
    import sinklens.hooks.attention.attention as attention

    # first: a rejected model stays unchanged
    mask = _mask_token(raw, tokenizer, family, hf.config.get_text_config().vocab_size, name)
    undo = ExitStack()  # sets the mode, config and causal flags back to what they are now
    for module in hf.modules():
        kept = {key: module.__dict__[key] for key in ("training", "is_causal") if key in module.__dict__}
        undo.callback(module.__dict__.update, kept)
    for config in {id(module.config): module.config for module in hf.modules() if hasattr(module, "config")}.values():
        undo.callback(config.__dict__.update, dict(config.__dict__))
        undo.callback(config.__dict__.clear)  # called first
    hf.eval()
    hf.config.is_causal = None if family.class_attention else family.causal
    write(hf.config, blocks)
    if family.modes:
        segments.write(hf.config)
    hf.set_attn_implementation(attention.NAME)
    if hf.dtype == torch.float64:
        hf.set_experts_implementation("eager")  # torch has no grouped matrix products in float64
    for module in hf.modules():
        if hasattr(module, "is_causal") and not family.class_attention:
            module.is_causal = family.causal
    if not family.causal:
        _refuse_decoding(hf, name, undo)
    named = (
        getattr(getattr(hf, "generation_config", None), "eos_token_id", None),
        raw.get("eos_token_id"),
        getattr(tokenizer, "eos_token_id", None),
    )
    end = next((one for one in named if one is not None), ())
    ends = tuple(end) if isinstance(end, list | tuple) else (end,)
    chosen = {setting: raw[key] for key, setting in family.config_settings.items() if key in raw} | (defaults or {})
    refused = {raw[key]: what for key, what in family.refused_tokens.items() if raw.get(key) is not None}
    return Checkpoint(hf, tokenizer, family, mask, ends, chosen, name, revision, blocks, refused, undo)


def _refuse_decoding(hf: "PreTrainedModel", name: str, undo: ExitStack) -> None:
    """Make transformers' left-to-right decoding of a diffusion model an error, including in its pipelines.

    A class with a `generate` of its own keeps it, and one without any cannot decode.
    """
    from transformers import GenerationMixin

    if not isinstance(hf, GenerationMixin) or type(hf).generate is not GenerationMixin.generate:
        return
    before = {"generate": hf.__dict__["generate"]} if "generate" in hf.__dict__ else {}
    hf.__dict__["generate"] = partial(_refused_decoding, name)
    undo.callback(hf.__dict__.update, before)
    undo.callback(hf.__dict__.pop, "generate", None)


def _refused_decoding(name: str, *_: Any, **__: Any) -> NoReturn:
    raise SettingError(
        f"{name} is a diffusion model, and transformers' generate would decode it from left to right, which gives text "
        f"that the model was not trained to write. Call sinklens.generate(model, prompt, gen_length=...); "
        f"model.release() restores transformers' method."
    )


def _with_mask(raw: dict[str, Any], mask: int | None, family: Family, where: str) -> dict[str, Any]:
    """config.json with the mask token that the caller names."""
    if mask is None:
        return raw
    require(
        not family.causal and family.masked,
        f"{where}: {family.name} models have no mask token; leave mask_token_id= out.",
        CheckpointError,
    )
    return raw | {"mask_token_id": mask, "mask_id": mask}


def _mask_token(
    raw: dict[str, Any], tokenizer: "PreTrainedTokenizerBase | None", family: Family, vocabulary: int, name: str
) -> int | None:
    """The mask token: the config's, else the tokenizer's, else the family's; None for models without one."""
    if family.causal or not family.masked:
        return None
    listed = [raw[key] for key in ("mask_token_id", "mask_id") if raw.get(key) is not None]
    require(
        not listed or listed.count(listed[0]) == len(listed),
        f"{name}: config.json has mask_token_id = {listed[0] if listed else None!r}, but mask_id = "
        f"{listed[-1] if listed else None!r}; pass mask_token_id=, as the model card says.",
        CheckpointError,
    )
    last = vocabulary - 1 if family.mask_is_last else None
    named = (*listed, getattr(tokenizer, "mask_token_id", None), family.mask_token_id, last)
    mask = next((token for token in named if token is not None), None)
    if type(mask) is not int or not 0 <= mask < vocabulary:
        raise CheckpointError(
            f"{name}: no usable mask token (found {mask!r}, vocabulary {vocabulary}); "
            f"pass mask_token_id=, set it in config.json, or pass a tokenizer that has a mask token."
        )
    return mask


def from_pretrained_model(
    hf: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    family_name: str | None = None,
    block_length: int | None = None,
    mask_token_id: int | None = None,
) -> Checkpoint:
    """Use a transformers model that is already in memory; its config determines the family, unless it is named.

    A bidirectional model of the Llama or Qwen classes has ``config.is_causal = False``.

    Raises:
        CheckpointError: no family has its ``model_type``, the named family has another class, it has no language-model
            head, or it has hook points already.
    """
    import sinklens.hooks.attention.attention as attention

    raw = hf.config.to_dict()
    kind = raw.get("model_type")
    if getattr(hf.config, "is_causal", True) is False and f"a2d-{kind}" in FAMILIES:
        family_name = family_name or (f"a2d-{kind}" if block_length is None else f"bd3lm-{kind}")
    family, blocks = identify(raw, type(hf).__name__, family_name, block_length)
    raw = _with_mask(raw, mask_token_id, family, type(hf).__name__)
    require(
        family.architecture == kind,
        f"the {family.name} family needs a {family.architecture} model, but this {type(hf).__name__} has "
        f"model_type {kind!r}; name another family, or leave family= out.",
        CheckpointError,
    )
    if raw.get("quantization_config") is not None:
        quantization.check_library(raw["quantization_config"], type(hf).__name__)
    require(
        not type(hf).__module__.startswith("transformers_modules"),
        f"{type(hf).__name__} runs code from its checkpoint; pass its name or folder to sinklens.load instead, "
        f"which loads the same weights into transformers' own class.",
        CheckpointError,
    )
    require(
        hf.get_output_embeddings() is not None,
        f"{type(hf).__name__} has no language-model head; pass a model of a …ForCausalLM class.",
        CheckpointError,
    )
    require(
        not any(type(module).__module__.startswith("peft.") for module in hf.modules()),
        f"this {type(hf).__name__} has an adapter of peft, whose product is not in the weights. Merge it with "
        f"peft's merge_and_unload(), or pass the folders: sinklens.load(base, adapter=folder).",
        CheckpointError,
    )
    require(
        not any(attention.TAPPED in module.__dict__ for module in hf.modules()),
        f"this {type(hf).__name__} already has hook points, and a second set would disconnect the first; "
        f"use the model that sinklens.load returned for it (set its .tokenizer to change the tokenizer).",
        CheckpointError,
    )
    name = getattr(hf.config, "name_or_path", "") or kind
    check_required(one_spelling(raw, name), family, name)
    generation = getattr(hf, "generation_config", None)
    defaults = {} if generation is None else _generation_defaults(generation.to_dict(), family)
    return prepare(hf, tokenizer, family, raw, name, defaults=defaults, blocks=blocks)


def _device(device: str | torch.device | int | None) -> torch.device:
    """The requested device; by default a GPU if there is one, else the CPU."""
    try:
        found = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError as error:
        raise CheckpointError(f"torch does not know the device {device!r}; pass 'cpu', 'cuda' or 'cuda:1'.") from error
    require(
        found.type != "meta",
        "the device 'meta' holds no values, so a model on it cannot run; pass 'cpu' or 'cuda'.",
        CheckpointError,
    )
    require(
        found.type != "cuda" or (found.index or 0) < torch.cuda.device_count(),
        f"device {str(found)!r} is not available: torch sees {torch.cuda.device_count()} GPUs.",
        CheckpointError,
    )
    return found


def _tokenizer(folder: Path, config: "PreTrainedConfig") -> "PreTrainedTokenizerBase | None":
    """The folder's tokenizer, read without the code that tokenizer_config.json names; None if it has none.

    Raises:
        CheckpointError: the tokenizer cannot be read.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        if (settings := folder / "tokenizer_config.json").is_file():
            parse_json(read_text(settings), settings, python=True)  # its model_max_length may have 31 digits
        if (folder / "tokenizer.json").is_file():
            found = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        elif (folder / "vocab.json").is_file():  # Dream: Qwen2's byte-level BPE under Dream's class name
            found = AutoTokenizer.from_pretrained(folder, tokenizer_type=config.model_type, local_files_only=True)
        else:
            found = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False, local_files_only=True)
        found("a"), found.convert_tokens_to_ids("")  # settings of another type fail here
    except Exception as error:  # the tokenizers library raises nothing narrower
        reason = " ".join(str(error).split())
        names = sorted({file.name for file in folder.iterdir()} & set(TOKENIZER_FILES))
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be read ({type(error).__name__}: {reason:.300}). One of its files "
            f"({', '.join(names)}) may be incomplete: download them again, or pass another tokenizer as "
            f"sinklens.load(..., tokenizer=...)."
        ) from error
    return found


def _sampler_defaults(folder: Path, family: Family) -> dict[str, Any]:
    """Sampler settings in generation_config.json: the family's keys, and those that it lists under ``"sinklens"``."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    generation = read_json(file)
    try:
        with transformers_output():
            GenerationConfig.from_dict(generation)  # as transformers does, once the weights are read
        ends = generation.get("eos_token_id")
        tokens = [("eos_token_id", token) for token in (ends if isinstance(ends, list) else [ends])]
        for key, token in [*tokens, *((key, generation.get(key)) for key in ("bos_token_id", "pad_token_id"))]:
            read_as(int | None, key, token)
        listed = read_as(dict, "sinklens", generation.get("sinklens") or {})
        return read_settings(family.sampler, _generation_defaults(generation, family) | listed)
    except (SettingError, *UNBUILDABLE) as error:
        raise CheckpointError(f"{file} has no valid settings: {error!s:.300}") from error


def _generation_defaults(generation: dict[str, Any], family: Family) -> dict[str, Any]:
    """The sampler settings among the entries of a generation config."""
    found = {setting: value_at(generation, key) for key, setting in family.generation_settings.items()}
    return {setting: value for setting, value in found.items() if value is not None}
