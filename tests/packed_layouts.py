"""Checkpoints in the layouts of GPTQ and AWQ, packed here without their libraries.

A group of rows of the transposed matrix [in, out] shares a scale and a zero point per output; 4-bit integers q stand
for scale · (q − zero). Eight of them are one 32-bit word: along the inputs in GPTQ, along the outputs, in the order
`AWQ_ORDER`, in AWQ. GPTQ stores its zero points minus 1. The kernels named in `CONFIGS` are written in PyTorch; others
are compiled when a checkpoint is first loaded.
"""

import re
from pathlib import Path

import torch
from layouts import change_config
from safetensors.torch import load_file, save_file
from torch import Tensor

GROUP = 32
LINEAR = r"(_proj|attn_out|blocks\.\d+\.ff_out)\.weight$"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
CONFIGS = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False,
             "checkpoint_format": "gptq", "backend": "torch"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
            "backend": "torch_awq"},
}  # fmt: skip


def quantize(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Integers [in, out], scales and zero points [group, out] of a matrix [out, in], and what they stand for."""
    columns = matrix.T.float()
    groups = columns.unflatten(0, (-1, GROUP))
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scale = ((high - low) / 15).half()
    zero = (-low / scale).round().clamp(1, 15)  # 0 − 1 would not fit into GPTQ's four bits
    integers = (groups / scale[:, None] + zero[:, None]).round().clamp(0, 15)
    meant = (integers - zero[:, None]) * scale[:, None].float()
    return integers.flatten(0, 1).long(), scale, zero.long(), meant.flatten(0, 1).T.contiguous()


def words(integers: Tensor, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight 4-bit integers along an axis as one signed 32-bit word."""
    eights = integers.unflatten(axis, (-1, 8)).movedim(axis + 1, -1)
    total = sum(eights[..., one] << 4 * place for place, one in enumerate(order))
    return torch.where(total >= 2**31, total - 2**32, total).int().contiguous()


def packed(kind: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors that stand for a matrix, and the matrix that they mean."""
    integers, scale, zero, meant = quantize(matrix)
    if kind == "awq":
        return {"qweight": words(integers, 1, AWQ_ORDER), "qzeros": words(zero, 1, AWQ_ORDER), "scales": scale}, meant
    group = (torch.arange(matrix.shape[1]) // GROUP).int()
    return {"qweight": words(integers, 0), "qzeros": words(zero - 1, 1), "scales": scale, "g_idx": group}, meant


def pack_folder(folder: Path, kind: str, layers: str = LINEAR) -> dict[str, Tensor]:
    """Quantize the linear layers of a checkpoint in its file; returns all weights with the matrices that they mean.

    Args:
        layers: regular expression of the names of the matrices.
    """
    file = folder / "model.safetensors"
    stored, plain = {}, {}
    for name, value in load_file(file).items():
        if not re.search(layers, name):
            stored[name] = plain[name] = value
            continue
        tensors, plain[name] = packed(kind, value)
        stored |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in tensors.items()}
    save_file(stored, file, metadata={"format": "pt"})
    change_config(folder, quantization_config=CONFIGS[kind])
    return plain
