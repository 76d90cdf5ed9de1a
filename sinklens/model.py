"""The model a user holds: hook points, tokenizer and family in one object.

`Model` is an nnsight root over the tree of hook points, so `model.trace(ids)`, ``.edit()`` and ``.output`` are
nnsight's own, and `run_with_cache`, `run_with_hooks` and `hooks` are TransformerLens's own. Calling it is one forward
pass. Denoising runs start from `sinklens.trace` and `sinklens.generate`.

One way this fails: on an nnsight root a child module wins over a method of the same name; no method here may be
called ``blocks``, ``denoise``, ``hf``, ``hook_embed`` or ``ln_final``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sinklens.checkpoints import Checkpoint, Family, from_bridge, from_pretrained_model, load_checkpoint
from sinklens.errors import CheckpointError, SelfCheckError
from sinklens.fingerprint import fingerprint
from sinklens.hooks.architectures import architecture_of
from sinklens.hooks.normalizers import normalizer_name
from sinklens.hooks.offload import value_of
from sinklens.hooks.tree import HookTree, Sizes
from sinklens.passes import SinglePasses
from sinklens.selfcheck import check as run_check
from sinklens.tokens import ModuleMethods, TokenMethods

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


NOT_FINGERPRINTED = (
    "transformers_version",
    "dtype",
    "torch_dtype",
    "_name_or_path",
)  # of a config: no part of a fingerprint
ELSEWHERE = {  # what TransformerLens and transformers have in a model, and what to write instead
    **dict.fromkeys(
        ("generate", "generate_stream", "hf_generate", "diffusion_generate"),
        "a run is sinklens.generate(model, prompt, ...), and sinklens.trace opens one.",
    ),
    **dict.fromkeys(
        ("enable_compatibility_mode", "process_weights", "process_weights_", "fold_layer_norm", "center_unembed"),
        "weights are as the checkpoint stores them, and nothing is folded or centred.",
    ),
    "set_tokenizer": "give it to sinklens.load(..., tokenizer=...).",
    "input_to_embed": "read the point hook_embed.",
}
MODEL_KEY = "sinklens_model"  # key in the __dict__ of a transformers model: the Model that names its points


class Model(SinglePasses, TokenMethods, ModuleMethods):
    """A loaded model with named hook points.

    Attributes:
        tokenizer: None where the checkpoint has none; it then takes token ids only.
        family: name of its checkpoint family, e.g. "llada".
        mask_token_id: the mask; None for autoregressive models.
        eos_token_ids: tokens that end an answer.
        config: its transformers config.
        cfg: lengths of its axes under TransformerLens's names (n_layers, n_heads, d_model, ...).
        name: how it was asked for.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        tree = HookTree(checkpoint.hf, architecture_of(checkpoint.hf.config.model_type))
        tree.train(checkpoint.hf.training)  # points are modules too, and PyTorch makes modules in training mode
        super().__init__(tree)
        tree.watch.handover = self.handover
        tree.tokenizer_of = lambda: self.tokenizer
        self.checkpoint = checkpoint
        self.tokenizer: PreTrainedTokenizerBase | None = checkpoint.tokenizer
        self.family: str = checkpoint.family.name
        self.mask_token_id: int | None = checkpoint.mask_token_id
        self.eos_token_ids: tuple[int, ...] = checkpoint.eos_token_ids
        self.name: str = checkpoint.name

    def release(self) -> "PreTrainedModel":
        """Return the transformers model as it was before `sinklens.load` took it, and give up this `Model`.

        Loading a transformers model changes it in place: evaluation mode, attention implementation, causal flags, the
        class of its layers, hooks, and nnsight's wrappers. All of that is undone; weights, device and hooks that others
        set stay as they are. Using this `Model` afterwards is an error; load the model again to go on.
        """
        hf = self.tree.hf
        if not self.tree.disconnected:
            self.unwrap(hf)
            self.tree.disconnect()
            self.checkpoint.undo.close()
            hf.__dict__.pop(MODEL_KEY, None)
        return hf

    @property
    def tree(self) -> HookTree:
        """The tree of hook points itself, a TransformerLens `HookedRootModule`."""
        return self.wrapped

    @property
    def config(self) -> "PreTrainedConfig":
        """The transformers config."""
        return self.tree.hf.config

    @property
    def cfg(self) -> Sizes:
        """Lengths of the axes; device and dtype are where the weights are now."""
        cfg, first = self.tree.cfg, next(self.tree.hf.parameters())
        if (cfg.device, cfg.dtype) != (first.device, first.dtype):
            self.tree.cfg = replace(cfg, device=first.device, dtype=first.dtype)
        return self.tree.cfg

    @property
    def family_record(self) -> Family:
        """Everything known of the checkpoint's family."""
        return self.checkpoint.family

    @property
    def special_tokens(self) -> dict[str, list[int]]:
        """Ids of special tokens: "mask", "start" and "end" of a text, and "markup", the others (chat headers, …)."""
        mask = [] if self.mask_token_id is None else [self.mask_token_id]
        end = list(self.eos_token_ids)
        if self.tokenizer is None:
            return {"mask": mask, "start": [], "end": end, "markup": []}
        start = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        added = {token for token, entry in self.tokenizer.added_tokens_decoder.items() if entry.special}
        markup = sorted((added | set(self.tokenizer.all_special_ids)) - {*mask, *start, *end})
        return {"mask": mask, "start": [token for token in start if token not in end], "end": end, "markup": markup}

    @property
    def fingerprint(self) -> str:
        """Tells two checkpoints of one name apart: a hash over all weights, the config and the tokenizer.

        It is the same on every device, and in every dtype that holds the weights exactly.
        """
        config = {name: value for name, value in self.config.to_diff_dict().items() if name not in NOT_FINGERPRINTED}
        told = [sorted(config.items()), self.mask_token_id, self.eos_token_ids, self.checkpoint.defaults]
        if self.tokenizer is not None:
            told += [self.tokenizer.backend_tokenizer.to_str(), self.tokenizer.chat_template]
        hf = self.tree.hf
        return fingerprint(((name, value_of(hf, name)) for name in hf.state_dict()), repr(told))

    def hook_names(self) -> list[str]:
        """Names of all hook points, in the order a step reaches them."""
        return self.tree.point_names()

    def __getattr__(self, name: str) -> Any:
        if name in ELSEWHERE:
            raise AttributeError(f"a sinklens model has no {name}: {ELSEWHERE[name]}")
        return super().__getattr__(name)

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.tree.hf.parameters())
        way = normalizer_name(self.config)
        told = "" if way == "softmax" else f"attention={way!r}, "
        return (
            f"Model({self.name!r}, family={self.family!r}, {told}{size:,} parameters, {self.cfg.n_layers} layers, "
            f"{self.cfg.n_heads} heads, {len(self.hook_names())} hook points, {self.cfg.dtype}, {self.cfg.device})"
        )

    # What TransformerLens's tools ask of a model beside what the tree has.
    @property
    def original_model(self) -> "PreTrainedModel":
        """The transformers model, under the name by which TransformerLens's guards look for training mode."""
        return self.tree.hf


def load(
    name_or_path: Any,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: Any = None,
    tokenizer: Any = None,
    check: bool = True,
) -> Model:
    """Load a model and name every point in it.

    Args:
        name_or_path: a shipped checkpoint ("tiny-llada", "tiny-llama"), a hub name, a local folder in the public
            layout (config.json and one or several *.safetensors), a transformers `PreTrainedModel`, or a
            TransformerLens `TransformerBridge`.
        revision: branch, tag or commit on the hub.
        dtype: "auto", "float32", "float16", "bfloat16" or a torch dtype. "auto" is the stored type; on a CPU, models
            below 10⁹ parameters are computed in float32.
        device: e.g. "cpu", "cuda:1"; by default a GPU if there is one.
        device_map: passed to transformers, e.g. "auto" to spread a model over several GPUs.
        tokenizer: used instead of the checkpoint's own.
        check: run the self-check (selfcheck.py), one short pass.

    Returns:
        The model, in evaluation mode; for a transformers model that was given before, the same `Model` as then.

    Raises:
        CheckpointError: not found, no network, unknown family, a config value that cannot be expressed, pickles
            only, or weights missing, surplus, misshapen or truncated.
        SelfCheckError: the hook points do not show what the model computes.
    """
    if isinstance(name_or_path, str | Path):
        checkpoint = load_checkpoint(
            name_or_path, revision=revision, dtype=dtype, device=device, device_map=device_map, tokenizer=tokenizer
        )
    elif revision is not None or device_map is not None or device is not None or dtype != "auto":
        raise CheckpointError(
            "revision, dtype, device and device_map belong to loading; the model given is loaded already. "
            "Move or convert it before handing it over."
        )
    else:
        known = (
            name_or_path if isinstance(name_or_path, Model) else getattr(name_or_path, "__dict__", {}).get(MODEL_KEY)
        )
        if known is not None and tokenizer in (None, known.tokenizer):
            return known
        checkpoint = _take_over(name_or_path, tokenizer)
    model = Model(checkpoint)
    if check:
        try:
            run_check(model.tree, checkpoint.family.causal)
        except SelfCheckError:
            model.release()  # a model that is refused stays as it was
            raise
    checkpoint.hf.__dict__[MODEL_KEY] = model
    return model


@contextmanager
def borrow(held: "PreTrainedModel", *, tokenizer: Any = None, check: bool = True) -> Iterator[Model]:
    """Use a transformers model for a while, and leave it as it was.

        with sinklens.borrow(hf, tokenizer=tokenizer) as model:
            run = sinklens.generate(model, prompt)

    Args:
        held: the model; see `load` for what is accepted and what may be raised.
        tokenizer: its tokenizer.
        check: run the self-check.

    Raises:
        CheckpointError: the model is loaded already; use that `Model`, or release it first.
    """
    if MODEL_KEY in getattr(held, "__dict__", {}):
        raise CheckpointError(
            "this model is loaded already, and borrowing it would end with that Model released; use the Model that "
            "sinklens.load returned, or call its .release() first."
        )
    model = load(held, tokenizer=tokenizer, check=check)
    try:
        yield model
    finally:
        model.release()


def _take_over(held: Any, tokenizer: Any) -> Checkpoint:
    """The checkpoint of a model that the caller holds already."""
    from transformers import PreTrainedModel

    if isinstance(held, PreTrainedModel):
        return from_pretrained_model(held, tokenizer)
    if hasattr(held, "original_model") and not isinstance(held, Model):
        return from_bridge(held, tokenizer)
    raise CheckpointError(
        f"cannot load a {type(held).__name__}; give a name, a folder, a transformers PreTrainedModel "
        f"or a TransformerLens TransformerBridge."
    )
