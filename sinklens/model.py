"""The model a user holds: hook points, tokenizer and family in one object.

`Model` is an nnsight root over the tree of hook points, so `model.trace(ids)`, ``.edit()`` and ``.output`` are
nnsight's own, and `run_with_cache`, `run_with_hooks` and `hooks` are TransformerLens's own. Calling it is one forward
pass. Denoising runs start from `sinklens.trace` and `sinklens.generate`.

One way this fails: on an nnsight root a child module wins over a method of the same name; no method here may be
called ``blocks``, ``denoise``, ``hf``, ``hook_embed`` or ``ln_final``.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.checkpoints import Checkpoint, Family, from_bridge, from_pretrained_model, load_checkpoint
from sinklens.errors import CheckpointError, PromptError, SinklensError
from sinklens.hooks.architectures import architecture_of
from sinklens.hooks.interleaving import Root
from sinklens.hooks.tree import HookTree, Sizes
from sinklens.hooks.weighing import way_named
from sinklens.selfcheck import check as run_check

if TYPE_CHECKING:
    from transformer_lens import ActivationCache
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


UNTOLD = ("transformers_version", "dtype", "torch_dtype", "_name_or_path")  # of a config: no part of a fingerprint
HELD = "sinklens_model"  # key in the __dict__ of a transformers model: the Model that names its points


class Model(Root):
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
        self.checkpoint = checkpoint
        self.tokenizer: PreTrainedTokenizerBase | None = checkpoint.tokenizer
        self.family: str = checkpoint.family.name
        self.mask_token_id: int | None = checkpoint.mask_token_id
        self.eos_token_ids: tuple[int, ...] = checkpoint.eos_token_ids
        self.name: str = checkpoint.name

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
        """Lengths of the axes."""
        return self.tree.cfg

    @property
    def record(self) -> Family:
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
        config = {name: value for name, value in self.config.to_diff_dict().items() if name not in UNTOLD}
        told = [sorted(config.items()), self.mask_token_id, self.eos_token_ids, self.checkpoint.defaults]
        if self.tokenizer is not None:
            told += [self.tokenizer.backend_tokenizer.to_str(), self.tokenizer.chat_template]
        found = hashlib.sha256(repr(told).encode())
        for name, value in self.tree.hf.state_dict().items():
            found.update(f"{name}{tuple(value.shape)}{_bit_sums(value)}".encode())
        return found.hexdigest()[:16]

    def hook_names(self) -> list[str]:
        """Names of all hook points, in the order a step reaches them."""
        return self.tree.point_names()

    def run_with_cache(self, *args: Any, **kwargs: Any) -> "tuple[Float[Tensor, 'batch pos vocab'], ActivationCache]":
        """One pass that keeps the points chosen by ``names_filter`` (all, if None): (logits, ActivationCache)."""
        self._refuse_edits("run_with_cache")
        return self.tree.run_with_cache(*args, **kwargs)

    def run_with_hooks(self, *args: Any, **kwargs: Any) -> Float[Tensor, "batch pos vocab"]:
        """One pass under ``fwd_hooks=[(name or predicate, fn(value, hook)), …]``, as in TransformerLens."""
        self._refuse_edits("run_with_hooks")
        return self.tree.run_with_hooks(*args, **kwargs)

    def _refuse_edits(self, what: str) -> None:
        """Edits of ``edit()`` act where nnsight runs the model, which TransformerLens's passes do not ask for."""
        if self.has_edits:
            raise SinklensError(
                f"this model carries edits of model.edit(), which {what} would leave out. Give the change as a hook "
                f"function, or use model.trace; model.clear_edits() takes edits away."
            )

    def encode(
        self,
        prompt: str | Sequence[str] | Sequence[int] | Sequence[list[int]] | Tensor,
        chat_template: bool | str = False,
    ) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
        """Token ids of a prompt or of several, left-padded to one length, and which of them are real.

        Args:
            prompt: a string, a list of strings, token ids [pos] or [batch, pos], or rows of ids, which may differ in
                length.
            chat_template: True puts a text prompt as one user turn through the tokenizer's template; a string is
                used as the template.

        Raises:
            PromptError: empty, not token ids, out of the vocabulary, or text without a tokenizer.
        """
        if isinstance(prompt, Tensor):
            return self._check_ids(prompt)
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        if not texts:
            raise PromptError("the list of prompts is empty; give at least one.")
        if all(isinstance(part, int) for part in texts):
            return self._check_ids(torch.tensor(texts))
        if all(isinstance(part, list) and part and all(isinstance(one, int) for one in part) for part in texts):
            return self._left_padded([self._check_ids(torch.tensor(part))[0][0].tolist() for part in texts])
        if not all(isinstance(part, str) for part in texts):
            kinds = ", ".join(sorted({type(part).__name__ for part in texts}))
            raise PromptError(f"a prompt is a string, a list of strings, or token ids; got a list of {kinds}.")
        return self._left_padded([self._encode_one(str(text), chat_template) for text in texts])

    def to_tokens(self, prompt: str | Sequence[str]) -> Int[Tensor, "batch pos"]:
        """TransformerLens's name for the token ids of text; several prompts are left-padded."""
        return self.encode(prompt)[0]

    def to_str_tokens(self, prompt: str | Sequence[int] | Int[Tensor, "*one pos"]) -> list[str]:
        """TransformerLens's name for the tokens of one text, or of one row of ids, each as its own string.

        A row of ``run.canvas`` may hold -1, a position that does not exist yet; its string is "".

        Raises:
            PromptError: the model has no tokenizer, or several rows were given.
        """
        missing: Tensor | None = None
        if not isinstance(prompt, str) and len(prompt) and not isinstance(prompt[0], str):
            given = torch.as_tensor(prompt)
            missing = (given == -1).flatten()
            prompt = given.masked_fill(given == -1, 0)
        ids, _ = self.encode(prompt)
        if self.tokenizer is None or len(ids) != 1:
            raise PromptError("to_str_tokens takes one text or one row of ids, and needs a tokenizer.")
        texts = [str(self.tokenizer.decode([token])) for token in ids[0].tolist()]
        return texts if missing is None else ["" if gone else text for gone, text in zip(missing, texts, strict=True)]

    def _encode_one(self, text: str, chat_template: bool | str) -> list[int]:
        if self.tokenizer is None:
            raise PromptError(
                f"{self.name} came without a tokenizer, so it takes token ids [batch, pos], not text; "
                f"or load it with sinklens.load(..., tokenizer=...)."
            )
        if not text:
            raise PromptError("the prompt is empty; give at least one character.")
        if chat_template is False:
            return list(self.tokenizer(text).input_ids)
        template = chat_template if isinstance(chat_template, str) else self.tokenizer.chat_template
        if template is None:
            raise PromptError(f"chat_template=True, but the tokenizer of {self.name} has none; give one as a string.")
        turns = [{"role": "user", "content": text}]
        made = self.tokenizer.apply_chat_template(
            turns, chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=True
        )
        return list(made["input_ids"])

    def _check_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        if ids.dtype.is_floating_point or ids.dtype is torch.bool or ids.ndim not in (1, 2) or ids.numel() == 0:
            raise PromptError(
                f"token ids are a non-empty integer tensor [pos] or [batch, pos]; "
                f"got {ids.dtype} of shape {list(ids.shape)}."
            )
        ids = (ids[None] if ids.ndim == 1 else ids).long().to(self.cfg.device)
        if int(ids.min()) < 0 or int(ids.max()) >= self.cfg.d_vocab:
            raise PromptError(
                f"token ids run from {int(ids.min())} to {int(ids.max())}; "
                f"this model's vocabulary is 0 to {self.cfg.d_vocab - 1}."
            )
        return ids, torch.ones_like(ids, dtype=torch.bool)

    def _left_padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Rows of token ids as one batch, and which of its positions are real."""
        own = getattr(self.tokenizer, "pad_token_id", None)
        pad = own if own is not None else next(iter(self.eos_token_ids), 0)
        length = max(len(row) for row in rows)
        ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows])
        real = torch.tensor([[False] * (length - len(row)) + [True] * len(row) for row in rows])
        return ids.to(self.cfg.device), real.to(self.cfg.device)

    def count_rows(self, *inputs: Any, **kwargs: Any) -> int:
        """Rows of the batch that the inputs of an invoke make; 0 without inputs."""
        if not inputs and not kwargs:
            return 0
        first = inputs[0] if inputs else kwargs.get("input_ids")
        return 1 if first is None else len(self.encode(first)[0])

    def join(self, invokes: list[tuple[Any, Any]]) -> tuple[Any, Any]:
        """Arguments and keyword arguments of one pass over the inputs of several invokes."""
        if not invokes:
            return (), {}
        inputs, kwargs = invokes[0]
        first = inputs[0] if inputs else kwargs.get("input_ids")
        if len(invokes) == 1 and isinstance(first, Tensor) and first.ndim == 2:
            return inputs, kwargs
        rows = [row for inputs, kwargs in invokes for row in self._real_tokens(*inputs, **kwargs)]
        ids, real = self._left_padded(rows)
        return (ids,), {"attention_mask": real}

    def _real_tokens(self, input_ids: Any, attention_mask: Tensor | None = None) -> list[list[int]]:
        """The tokens of one invoke, row by row, without its padding."""
        ids, real = self.encode(input_ids)
        if attention_mask is not None:
            real = attention_mask.to(ids.device).bool().reshape(ids.shape)
        return [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.tree.hf.parameters())
        way = way_named(self.config)
        told = "" if way == "softmax" else f"attention={way!r}, "
        return (
            f"Model({self.name!r}, family={self.family!r}, {told}{size:,} parameters, {self.cfg.n_layers} layers, "
            f"{self.cfg.n_heads} heads, {len(self.hook_names())} hook points, {self.cfg.dtype}, {self.cfg.device})"
        )


def _bit_sums(value: Tensor) -> tuple[int, int]:
    """The bits of all values, in float32, as whole numbers: their sum, and their sum weighted by place, modulo 2⁶⁴.

    Sums of whole numbers are exact in any order, so they are the same on every device.
    """
    plain, weighted, flat = 0, 0, value.detach().flatten()
    for start in range(0, len(flat), 1 << 22):
        bits = flat[start : start + (1 << 22)].to(torch.float32).view(torch.int32).long()
        place = torch.arange(start, start + len(bits), device=bits.device) % 65521 + 1
        plain, weighted = plain + int(bits.sum()), weighted + int((bits * place).sum())
    return plain % 2**64, weighted % 2**64


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
        known = name_or_path if isinstance(name_or_path, Model) else getattr(name_or_path, "__dict__", {}).get(HELD)
        if known is not None and tokenizer in (None, known.tokenizer):
            return known
        checkpoint = _take_over(name_or_path, tokenizer)
    model = Model(checkpoint)
    if check:
        run_check(model.tree, checkpoint.family.causal)
    checkpoint.hf.__dict__[HELD] = model
    return model


def _take_over(held: Any, tokenizer: Any) -> Checkpoint:
    """The checkpoint of a model that the caller holds already."""
    from transformers import PreTrainedModel

    if isinstance(held, PreTrainedModel):
        return from_pretrained_model(held, tokenizer)
    if hasattr(held, "original_model"):
        return from_bridge(held, tokenizer)
    raise CheckpointError(
        f"cannot load a {type(held).__name__}; give a name, a folder, a transformers PreTrainedModel "
        f"or a TransformerLens TransformerBridge."
    )
