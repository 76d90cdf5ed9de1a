"""The Triton kernels against the formula in float64, at one combination of type, width and mask; their compilation."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from building import left_padding
from gpu.agreement import near
from torch import Tensor

from sinklens.hooks.attention import column_sums, trust

LENGTHS = (1, 17, 63, 65, 127, 300)
TOLERANCE = 1e-4  # of the largest value; products are exact


class Case(NamedTuple):
    """A combination that a kernel is compiled for.

    Attributes:
        mask: "none", "key" (one row, with −inf) or "full" (one row is −inf everywhere).
        kv_heads: number of key heads, shared by four query heads.
    """

    dtype: torch.dtype
    width: int
    mask: str = "none"
    causal: bool = False
    kv_heads: int = 4

    def __str__(self) -> str:
        """A short description."""
        grouped = "" if self.kv_heads == 4 else f", 4 heads on {self.kv_heads}"
        order = ", causal" if self.causal else ""
        return f"{str(self.dtype).removeprefix('torch.')}, heads of {self.width}, mask: {self.mask}{order}{grouped}"


def compare_kernels(case: Case, kernels: ModuleType, device: torch.device) -> str:
    """Check the kernels against the formula and the plain version, a quarter of the first row being padding."""
    scale, worst, queries, keys = case.width**-0.5, "", 0, 0
    lengths = [(n, n) for n in LENGTHS] + [(1, 300), (65, 300)]
    for queries, keys in lengths[1:4] if device.type == "cpu" else lengths:
        query, key, mask = operands(case, queries, keys, device)
        repeated = key.repeat_interleave(4 // case.kv_heads, dim=1)
        scores = trust.explicit_scores(query, repeated, scale, mask, case.causal)
        lse = kernels.log_sum_exp(query, key, scale, mask, case.causal)
        lse_difference = near(lse, scores.logsumexp(-1), TOLERANCE, "the log-sum-exp")
        real = left_padding(len(query), queries, queries // 4)
        wanted = (scores.softmax(-1).nan_to_num(0.0) * real[:, None, :, None]).sum(-2)
        real = real.to(device)
        found = kernels.column_sums(query, key, lse, scale, mask, real, case.causal)
        worst = f"{near(found, wanted, TOLERANCE)}; lse {lse_difference}"
        plain = column_sums.plain_column_sums(query, repeated, lse, scale, mask, real, case.causal)
        near(found, plain, 10 * TOLERANCE, "the plain version")
    return f"at {queries} × {keys}: {worst}"


def operands(case: Case, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    like = torch.zeros((), dtype=case.dtype, device=device)
    rows = 1 if device.type == "cpu" else 2
    query = trust.numbers(rows, 4, queries, case.width, like=like, seed=queries)
    key = trust.numbers(rows, case.kv_heads, keys, case.width, like=like, seed=keys + 1)
    if case.mask == "none":
        return query, key, None
    mask = trust.numbers(rows, 4, 1 if case.mask == "key" else queries, keys, like=like, seed=2)
    mask[..., 1::4] = -torch.inf
    if case.mask == "full":
        mask[:, :, queries // 2] = -torch.inf
    return query, key, mask


COMPILE = """
import subprocess
from pathlib import Path
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sinklens.hooks.attention import column_sums_triton as kernels, tiles

ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
for dtype in names:
    for width in (32, 64, 128, 256)[: 3 if dtype == torch.float32 else 4]:
        operand = torch.zeros(1, 1, 1, width, dtype=dtype)
        for kernel in (kernels._lse_kernel, kernels._sums_kernel):
            call = kernels._Call(kernel, (operand, operand), operand, 1.0, None, False)
            tile, parts = kernels._chosen(call), kernel.arg_names
            fixed = dict(WIDTH=width, CHANNELS=call.channels, ROWS=tile.rows, COLUMNS=tile.columns, KIND=kernels.KEY,
                         CAUSAL=True, EXACT=dtype == torch.float32, LOG2=kernels.LOG2_E, q_channel=1, k_channel=1)
            types = {part: "*" + names[dtype] for part in ("query", "key", "mask")}
            types |= dict(lse="*fp32", out="*fp32", scale="fp32")
            signature = {part: "constexpr" if part in fixed else types.get(part, "i32") for part in parts}
            source = ASTSource(kernel, signature, {(parts.index(part),): value for part, value in fixed.items()})
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            Path("kernel.ptx").write_text(compiled.asm["ptx"])
            given = [ptxas, "-v", "-arch=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
            report = subprocess.run(given, capture_output=True, text=True, check=True).stderr
            spilled = report.partition(" bytes spill stores")[0].rpartition(" ")[2]
            print(names[dtype], width, kernel.__name__, compiled.metadata.shared, spilled, sep=",")
"""


class Resources(NamedTuple):
    """What a compiled kernel takes: bytes of shared memory, and bytes that do not fit the registers."""

    shared: int
    spilled: int


def compiled_for_an_h100(folder: Path) -> dict[str, Resources]:
    """What each kernel takes in each type and width, compiled in another process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given = [sys.executable, "-c", COMPILE]
    done = subprocess.run(given, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-400:]
    rows = [line.rsplit(",", 2) for line in done.stdout.splitlines()]
    return {name: Resources(int(shared), int(spilled)) for name, shared, spilled in rows}
