"""The user-facing model: hook points, tokenizer and family in one object.

`Model` is an nnsight root around the tree of hook points: `model.trace(ids)`, ``.edit()`` and ``.output`` come from
nnsight, `run_with_cache`, `run_with_hooks` and `hooks` from TransformerLens. Calling the model runs one forward pass.
Modules of the transformers model have two names: `model.hf.lm_head` is also `model.lm_head`, as on nnsight's models.
Denoising runs start with `sinklens.trace` and `sinklens.generate`, or with ``model.generate``.

Pitfall: on an nnsight root a child module shadows a method of the same name, so no method here may be called
``blocks``, ``denoise``, ``hf``, ``hook_embed`` or ``ln_final``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from sinklens.errors import CheckpointError, SelfCheckError, require
from sinklens.families import Family
from sinklens.families.registry import find_sampler
from sinklens.hooks.architectures import architecture_of
from sinklens.hooks.attention.normalizers import normalizer_name
from sinklens.hooks.interleaving import wait_for
from sinklens.hooks.losses import Masks
from sinklens.hooks.offload import device_of, stored_values
from sinklens.hooks.sizes import Sizes
from sinklens.hooks.tree import HookTree
from sinklens.hooks.turn import Turn
from sinklens.hooks.weights import MlpWeights
from sinklens.model.bridges import from_bridge
from sinklens.model.fingerprint import weights_fingerprint
from sinklens.model.loading import Checkpoint, LoadRequest, TokenId, from_pretrained_model, load_checkpoint
from sinklens.model.outline import outline
from sinklens.model.passes import SinglePasses
from sinklens.model.prompts import Prompt, adds_start
from sinklens.model.quantization import quantized_weights
from sinklens.model.reading import DeviceMap
from sinklens.model.selfcheck import check as run_check
from sinklens.model.tokens import ModuleMethods
from sinklens.utils.arguments import Count, plainly_shown
from sinklens.utils.memory import collection_paused

NOT_FINGERPRINTED = (
    "transformers_version",
    "dtype",
    "torch_dtype",
    "_name_or_path",
    "distributed_config",
)  # config keys that the fingerprint leaves out
WRITTEN = "generator.output"  # the location that serves the ids after a run
MODEL_KEY = "sinklens_model"  # key in the __dict__ of a transformers model under which its `Model` is kept


class Model(ModuleMethods, SinglePasses):
    """A loaded model with named hook points.

    Attributes:
        tokenizer: None if the checkpoint has none; the model then accepts only token ids.
        family: name of the checkpoint family, e.g. "llada".
        mask_token_id: the mask token; None for autoregressive models.
        eos_token_ids: tokens that end an answer.
        config: the transformers config.
        cfg: sizes of the axes under TransformerLens's names (n_layers, n_heads, d_model, ...).
        name: the name or path it was loaded from.
    """

    ARGUMENT: ClassVar[str] = "a model, as returned by sinklens.load"

    def __init__(self, checkpoint: Checkpoint) -> None:
        tree = HookTree(checkpoint.hf, architecture_of(checkpoint.hf.config.model_type), checkpoint.family.drawn)
        tree.train(checkpoint.hf.training)  # points are modules too, and PyTorch creates modules in training mode
        super().__init__(tree, inner="hf", as_modules=("ln_final",), weighted=(MlpWeights,))
        tree.watch.follow(self.handover)
        tree.to_single_token = lambda text: self.to_single_token(text)
        if checkpoint.mask_token_id is not None:
            tree.masks = Masks(checkpoint.mask_token_id, checkpoint.family.shift, checkpoint.blocks)
        if checkpoint.adapter is not None:
            tree.attach(checkpoint.adapter)
        self.checkpoint = checkpoint
        self.tokenizer: PreTrainedTokenizerBase | None = checkpoint.tokenizer
        self.family: str = checkpoint.family.name
        self.mask_token_id: int | None = checkpoint.mask_token_id
        self.eos_token_ids: tuple[int, ...] = checkpoint.eos_token_ids
        self.name: str = checkpoint.name
        self._start_of: tuple[Any, bool] = None, False  # a tokenizer, and whether it adds a start token

    def release(self) -> "PreTrainedModel":
        """Restore the transformers model to its state before `sinklens.load` and return it; invalidates this `Model`.

        Loading a transformers model changes it in place: evaluation mode, attention implementation, causal flags, the
        class of its layers, hooks, and nnsight's wrappers. All of that is undone; weights, device and other libraries'
        hooks are left unchanged. Using this `Model` afterwards is an error; load the model again to continue.
        """
        hf = self.tree.hf
        if not self.tree.disconnected:
            self.unwrap(hf)
            self.tree.disconnect()
            self.checkpoint.undo.close()
            hf.__dict__.pop(MODEL_KEY, None)
        return hf

    @property
    def turn(self) -> Turn:
        """A lock that whoever runs the model holds, so that other threads wait; see hooks/turn.py."""
        return self.tree.turn

    @property
    def tree(self) -> HookTree:
        """The tree of hook points, a TransformerLens `HookedRootModule`."""
        return self.wrapped

    @property
    def config(self) -> "PreTrainedConfig":
        """The transformers config."""
        return self.tree.hf.config

    @property
    def cfg(self) -> Sizes:
        """Sizes of the axes, with the current device and dtype of the weights and what the current tokenizer does."""
        cfg, hf = self.tree.cfg, self.tree.hf
        device, dtype = device_of(hf.get_input_embeddings()), next(hf.parameters()).dtype
        if self._start_of[0] is not self.tokenizer:
            self._start_of = self.tokenizer, adds_start(self.tokenizer)
        if (cfg.device, cfg.dtype, cfg.tokenizer_prepends_bos) != (device, dtype, self._start_of[1]):
            self.tree.cfg = replace(cfg, device=device, dtype=dtype, tokenizer_prepends_bos=self._start_of[1])
        return self.tree.cfg

    @property
    def family_record(self) -> Family:
        """The record of the checkpoint's family."""
        return self.checkpoint.family

    @property
    def causal(self) -> bool:
        """Whether queries attend only to their own and earlier keys, as in autoregressive models."""
        return self.tree.causal

    @property
    def block_length(self) -> int | None:
        """Positions per block of a block-causal model; None for other attention."""
        blocks = self.checkpoint.blocks
        return None if blocks is None else blocks.length

    @property
    def quantization(self) -> dict[str, str]:
        """Name of each quantized weight -> its library and form; empty in full precision."""
        return quantized_weights(self.tree.hf)

    @property
    def mask_is_text(self) -> bool:
        """Whether the mask token is also an ordinary token that texts may contain, as in DiffuLLaMA."""
        return find_sampler(self.checkpoint.family.sampler).marks_undecided

    @property
    def special_tokens(self) -> dict[str, list[int]]:
        """Ids of special tokens: "mask", "start" and "end" of a text, and "markup" for all others (chat headers, …).

        "words" are mask tokens that are also words (DiffuLLaMA): where such a token is not undecided, it is one.
        """
        mask = [] if self.mask_token_id is None else [self.mask_token_id]
        end = list(self.eos_token_ids)
        if self.tokenizer is None:
            return {"mask": mask, "start": [], "end": end, "markup": []}
        start = [] if self.tokenizer.bos_token_id in (None, *end) else [self.tokenizer.bos_token_id]
        added = {token for token, entry in self.tokenizer.added_tokens_decoder.items() if entry.special}
        markup = sorted((added | set(self.tokenizer.all_special_ids)) - {*mask, *start, *end})
        words = [token for token in mask if self.mask_is_text and token not in added]
        return {"mask": mask, "start": start, "end": end, "markup": markup} | ({"words": words} if words else {})

    @property
    def fingerprint(self) -> str:
        """Hash of all weights, the config and the tokenizer; distinguishes checkpoints that share a name.

        It is the same on every device and in every dtype that represents the weights exactly.
        """
        config = {name: value for name, value in self.config.to_diff_dict().items() if name not in NOT_FINGERPRINTED}
        described = [sorted(config.items()), self.mask_token_id, self.eos_token_ids, self.checkpoint.defaults]
        if self.tokenizer is not None:
            described += [self.tokenizer.backend_tokenizer.to_str(), self.tokenizer.chat_template]
        described += [] if self.tree.adapter is None else [self.tree.adapter.fingerprint]
        return weights_fingerprint(stored_values(self.tree.hf), repr(described))

    def hook_names(self) -> list[str]:
        """Names of all hook points, in the order in which a step reaches them."""
        return self.tree.point_names()

    def generate(self, input: Any = None, max_new_tokens: int | None = None, **options: Any) -> Any:
        """A run with the arguments and results of TransformerLens; `sinklens.generate` returns all that a run records.

            model.generate("Question: ...", max_new_tokens=8)                       # the text with its answer
            model.generate(ids, max_new_tokens=8)                                   # ids [batch, pos]
            with model.generate("Question: ...", max_new_tokens=8) as tracer:       # nnsight's block: sinklens.trace
                for step in tracer.iter[:3]:                                        # denoising steps
                    hidden = model.model.layers[0].output
                ids = tracer.result

        Args:
            input: text, texts, ids or a tokenizer's output. Texts give texts, ids give ids.
            max_new_tokens: the setting ``gen_length``; by default the checkpoint's value, or the sampler's.
            options: ``return_type`` ("input", "str" or "tokens"), ``do_sample`` (False is temperature 0; True is 1 if
                no ``temperature`` is given; by default the sampler's), ``prepend_bos``, ``attention_mask``,
                ``use_past_kv_cache`` (the setting ``use_cache``), ``return_cache`` (also the cache of a pass over the
                result, of the points in ``names_filter``, on ``device``), ``return_input_tokens`` (also the prompt's
                ids), ``verbose`` (a progress bar), ``hooks``, ``seed``, and settings of the model's sampler.

        Returns:
            Each prompt with its answer up to the end token. Ids of rows that end early are filled with the end token.

        Raises:
            SettingError: an argument has no meaning in a run of this model, or a setting is invalid.
            PromptError: the prompt is missing or invalid.
        """
        prompt = options.pop("input_ids", None) if input is None else input
        # found by name when it is called, as is likelihood: they use models
        return resolve_name("sinklens.runs.generating:generate_as")(
            self, prompt, max_new_tokens=max_new_tokens, **options
        )

    @plainly_shown
    def likelihood(self, prompts: Prompt, answers: Prompt, **options: Any) -> Any:
        """Log-likelihood of an answer given its prompt, or a lower bound on it, in nats, with its standard error.

            model.likelihood("Question: ...", " 7").value
            model.likelihood("Question: ...", [" 7", " 8"], hooks=MaskSinks(top_k=1, same_step=True))    # choices

        Args:
            prompts, answers: text or token ids; several prompts need as many answers, several answers may share one.
            options: those of `sinklens.experiments.likelihood`: ``hooks``, ``mc_num``, ``exact``, …

        Returns:
            A `sinklens.experiments.Likelihood`, or one for each of several answers.
        """
        return resolve_name("sinklens.experiments.nll.estimate:likelihood")(self, prompts, answers, **options)

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.tree.hf.parameters())
        normalizer = normalizer_name(self.config)
        attention = "" if normalizer == "softmax" else f"attention={normalizer!r}, "
        return (
            f"Model({self.name!r}, family={self.family!r}, {attention}{size:,} parameters, {self.cfg.n_layers} layers, "
            f"{self.cfg.n_heads} heads, {len(self.hook_names())} hook points, {self.cfg.dtype}, {self.cfg.device})"
        )

    def __str__(self) -> str:
        return f"{self!r}\n{outline(self.tree)}"

    @property
    def generator(self) -> "Written":
        """As in nnsight, ``model.generator.output`` holds the ids of prompt and answer after the run of `generate`."""
        return Written()

    # TransformerLens's tools also read this from a model.
    @property
    def original_model(self) -> "PreTrainedModel":
        """The transformers model, under the name where TransformerLens's guards look for training mode."""
        return self.tree.hf


class Written:
    """What a run has written, for a block of `Model.generate`."""

    @property
    def output(self) -> Any:
        """The ids [batch, pos], once the run has ended."""
        return wait_for(WRITTEN, 0)


@plainly_shown
def load(
    name_or_path: Any,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | int | None = None,
    device_map: DeviceMap | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    family: str | None = None,
    block_length: Count | None = None,
    mask_token_id: TokenId | None = None,
    quantization: Any = None,
    adapter: str | Path | None = None,
    check: bool = True,
) -> Model:
    """Load a model and name every point in it.

    Args:
        name_or_path: a shipped checkpoint ("tiny-llada", "tiny-llama"), a hub name, a local folder in the published
            layout (config.json and one or more *.safetensors), a GGUF file (see `sinklens.model.gguf`), a transformers
            `PreTrainedModel`, or a TransformerLens `TransformerBridge`.
        revision: branch, tag or commit on the hub; by default the main branch.
        dtype: "auto", "float32", "float16", "bfloat16" or a torch dtype. "auto" is the stored dtype, except that models
            below 10⁹ parameters run in float32 on a CPU.
        device: e.g. "cpu", "cuda:1"; by default a GPU if one is available.
        device_map: passed to transformers, e.g. "auto" to spread a model over several GPUs; by default it is on
            one device.
        tokenizer: replaces the checkpoint's tokenizer.
        family: name of the checkpoint's family (``sinklens models`` lists them), where its config.json does not
            determine it; by default the family that config.json names.
        block_length: positions per block of a block-causal model; by default the number that config.json names.
        mask_token_id: the mask token; by default the one that config.json or the tokenizer names, or the family's.
        quantization: how to quantize full-precision weights while they are read: "bnb-int8", "bnb-nf4" or a config of
            transformers for bitsandbytes; by default they are not quantized.
        adapter: folder or hub name of a LoRA adapter in peft's format, which is merged into the weights; by default
            the one beside the checkpoint's weights, if there is one. A config.json in its folder replaces the
            checkpoint's.
        check: run the self-check (selfcheck.py), which takes a few short passes.

    Returns:
        The model, in evaluation mode; for a transformers model that was loaded before, the same `Model` again.

    Raises:
        CheckpointError: the checkpoint was not found, there is no network, the family is unknown, a config value is
            unsupported, the weights are pickles only, or weights are missing, surplus, misshapen or truncated.
        SelfCheckError: the hook points do not show what the model computes.
        SettingError: an argument has another type or is out of range.
    """
    request = LoadRequest(
        revision=revision, dtype=dtype, device=device, device_map=device_map, tokenizer=tokenizer, family=family,
        block_length=block_length, mask_token_id=mask_token_id, quantization=quantization, adapter=adapter, check=check,
    )  # fmt: skip
    if isinstance(name_or_path, str | Path):
        with collection_paused():
            return _with_hook_points(load_checkpoint(name_or_path, request), check)
    require(
        (revision, device_map, device, dtype) == (None, None, None, "auto"),
        "revision, dtype, device and device_map apply only while loading, and this model is already loaded. "
        "Move or convert it before passing it to load.",
        CheckpointError,
    )
    for what, value in (("quantization", quantization), ("adapter", adapter)):
        require(
            value is None,
            f"{what} applies only while loading, and this model is already loaded; pass its name or folder.",
            CheckpointError,
        )
    known = name_or_path if isinstance(name_or_path, Model) else getattr(name_or_path, "__dict__", {}).get(MODEL_KEY)
    described = (family, request.block_length, request.mask_token_id)
    if known is not None and tokenizer in (None, known.tokenizer) and not any(one is not None for one in described):
        return known
    return _with_hook_points(_checkpoint_of(name_or_path, tokenizer, *described), check)


def _with_hook_points(checkpoint: Checkpoint, check: bool) -> Model:
    """The model of a checkpoint, checked if requested; a model that fails the check is left as it was."""
    model = Model(checkpoint)
    if check:
        try:
            run_check(model.tree, checkpoint.family.causal)
        except SelfCheckError:
            model.release()
            raise
    checkpoint.hf.__dict__[MODEL_KEY] = model
    return model


@contextmanager
def borrow(held: "PreTrainedModel", *, tokenizer: Any = None, check: bool = True) -> Iterator[Model]:
    """Load a transformers model inside a block and restore it when the block ends.

        with sinklens.borrow(hf, tokenizer=tokenizer) as model:
            run = sinklens.generate(model, prompt)

    Args:
        held: the transformers model; see `load` for accepted models and errors.
        tokenizer: its tokenizer.
        check: run the self-check.

    Raises:
        CheckpointError: the model is already loaded; use that `Model`, or release it first.
    """
    require(
        MODEL_KEY not in getattr(held, "__dict__", {}),
        "this model is already loaded, and leaving the borrow block would release that Model; use the Model that "
        "sinklens.load returned, or call its .release() first.",
        CheckpointError,
    )
    model = load(held, tokenizer=tokenizer, check=check)
    try:
        yield model
    finally:
        model.release()


def _checkpoint_of(
    loaded: Any, tokenizer: Any, family: str | None, block_length: int | None, mask_token_id: int | None
) -> Checkpoint:
    """The checkpoint of a model that is already loaded."""
    if isinstance(loaded, PreTrainedModel):
        require(
            loaded.tp_size is None,
            "a model that is divided among processes (tp_plan) cannot be hooked; use device_map.",
            CheckpointError,
        )
        return from_pretrained_model(loaded, tokenizer, family, block_length, mask_token_id)
    if hasattr(loaded, "original_model") and not isinstance(loaded, Model):
        require(
            not any(one is not None for one in (family, block_length, mask_token_id)),
            "a TransformerBridge has the family of its config; leave family=, block_length= and mask_token_id= "
            "out, or load the transformers model.",
            CheckpointError,
        )
        return from_bridge(loaded, tokenizer)
    unwrap = " first call peft's merge_and_unload(), and then" if type(loaded).__module__.startswith("peft.") else ""
    raise CheckpointError(
        f"cannot load a {type(loaded).__name__};{unwrap} pass a name, a folder, a transformers PreTrainedModel "
        f"or a TransformerLens TransformerBridge."
    )
