"""Takes over the weights of a TransformerLens `TransformerBridge`.

A bridge replaces modules inside its model, so the weights go into a fresh shell of the transformers class, which shares
them. Bridges over other code than transformers' (native models, code of a checkpoint) are refused.
"""

from typing import Any

import torch

from sinklens.errors import CheckpointError, require
from sinklens.model import files
from sinklens.model.loading import Checkpoint, build_empty, from_pretrained_model


def from_bridge(bridge: Any, tokenizer: Any = None) -> Checkpoint:
    """Take over the weights of a `TransformerBridge`.

    Hooks set on the bridge stay with the bridge; set them on the returned model, where the same names hold.

    Raises:
        CheckpointError: its weights were folded or otherwise processed, so the class cannot hold them, or it does
            not wrap a class of transformers.
    """
    original = bridge.original_model
    require(
        type(original).__module__.startswith("transformers."),
        f"this TransformerBridge is over {type(original).__name__}, which is not a class of transformers; pass the "
        f"name or folder of its checkpoint, or a transformers model.",
        CheckpointError,
    )
    weights = {name.replace("._original_component", ""): value for name, value in original.named_parameters()}
    first, config = next(iter(weights.values())), original.config
    hf = build_empty(config, dtype=first.dtype)
    expected = {name: tuple(value.shape) for name, value in hf.named_parameters(remove_duplicate=False)}
    tied = set(getattr(hf, "_tied_weights_keys", None) or ()) if config.tie_word_embeddings else set()
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    files.check_weights(
        files.Weights(shapes, torch.float32, {name: name for name in weights}), expected, tied,
        "the TransformerBridge (weights must not be folded or centered)",
    )  # fmt: skip
    parted = sorted(tied & set(weights))  # named_parameters lists shared weights once, under the first name
    require(
        not parted,
        f"the config of the TransformerBridge ties its weights, but {', '.join(parted)} has separate values: weights "
        f"must not be folded or centered. Pass the bridge as it was booted.",
        CheckpointError,
    )
    hf.load_state_dict(weights, assign=True, strict=not tied)
    hf.tie_weights()
    for module in list(hf.modules()):  # the rotary frequencies, which are not among the weights
        for name, child in module.named_children():
            if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                setattr(module, name, type(child)(config=hf.config).to(first.device))
    return from_pretrained_model(hf, tokenizer if tokenizer is not None else bridge.tokenizer)
