"""Check the Triton kernels and PyTorch's operators against the formula in float64, at odd sizes.

On a CPU the kernels run in Triton's interpreter at a few sizes only, and they are compiled for an H100, which does not
require a GPU.
"""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from sinklens.devices import samples
from sinklens.devices.findings import Claim, NotChecked, near
from sinklens.devices.parts import Setting
from sinklens.hooks import column_sums, fused, tiles, trust

LENGTHS = (1, 17, 63, 65, 127, 300)
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-4, torch.bfloat16: 1e-4}  # of the largest value; products are exact
MIXED = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # for attention's output
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Case(NamedTuple):
    """A combination that a kernel is compiled for.

    Attributes:
        mask: "none", "key" (one row, with −inf) or "full".
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


def claims(setting: Setting) -> Iterator[Claim]:
    """PyTorch's operators, then the kernels, their tiles, their first-use test and their compilation."""
    for dtype in DTYPES:
        for causal in (False, True):
            for masked in (False,) if causal else (False, True):
                what = (
                    f"{str(dtype).removeprefix('torch.')}{', causal' if causal else ''}{', a mask' if masked else ''}"
                )
                yield Claim(
                    f"fused attention with its log-sum-exp: {what}",
                    lambda dtype=dtype, causal=causal, masked=masked: _fused(setting, dtype, causal, masked),  # type: ignore[misc]
                )
    yield Claim("fused attention with its log-sum-exp: outputs equal the public function's", lambda: _public(setting))
    for case in _cases(setting.small):
        yield Claim(f"kernels: {case}", lambda case=case: _kernels(case, setting))  # type: ignore[misc]
    yield Claim("kernels: padding and fully masked rows do not count", lambda: _padding(setting))
    yield Claim("kernels: long masks are addressed in 64 bits", lambda: _long(setting))
    yield Claim("kernels: every tile gives the same sums", lambda: _tiles(setting))
    yield Claim("kernels: the first-use test enables them for sink scores", lambda: _switched_on(setting))
    yield Claim("kernels: they compile for an H100", lambda: _compiled(setting))


def _cases(small: bool) -> list[Case]:
    exact, brain, half = torch.float32, torch.bfloat16, torch.float16
    if small:
        return [Case(exact, 32, "key"), Case(half, 64, "full", True, 2), Case(brain, 128)]
    kinds = product((exact, brain), (("none", False), ("none", True), ("key", False), ("full", False), ("full", True)))
    listed = [Case(dtype, 64, mask, causal, 2) for dtype, (mask, causal) in kinds]
    listed += [Case(dtype, width, "key") for dtype, width in ((exact, 32), (brain, 96), (brain, 128))]
    return [*listed, Case(half, 64), Case(half, 64, "key", True, 1)]


def _operands(case: Case, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    like = torch.zeros((), dtype=case.dtype, device=device)
    rows = 1 if device.type == "cpu" else 2
    query = trust.numbers(rows, 4, queries, case.width, like=like, seed=queries)
    key = trust.numbers(rows, case.kv_heads, keys, case.width, like=like, seed=keys + 1)
    if case.mask == "none":
        return query, key, None
    mask = trust.numbers(rows, 4, 1 if case.mask == "key" else queries, keys, like=like, seed=2)
    mask[..., 1::4] = -torch.inf
    return query, key, mask


def _kernels_module(setting: Setting, dtype: torch.dtype | None = None) -> Any:
    """The module of the kernels.

    Raises:
        NotChecked: the kernels cannot run here.
    """
    try:
        from sinklens.hooks import column_sums_triton
    except ImportError as error:
        raise NotChecked(f"Triton is not installed ({error})") from error
    if setting.device.type not in ("cuda", "cpu"):
        raise NotChecked(f"the kernels are for CUDA devices; this is {setting.device.type}")
    if setting.small and dtype == torch.bfloat16:
        raise NotChecked("Triton's interpreter does not multiply bfloat16; this needs a GPU")
    if setting.small and os.environ.get("TRITON_INTERPRET") != "1":
        raise NotChecked("without a GPU the kernels need TRITON_INTERPRET=1 in the environment")
    return column_sums_triton


def _kernels(case: Case, setting: Setting) -> str:
    kernels, scale, worst = _kernels_module(setting, case.dtype), case.width**-0.5, ""
    lengths = [(n, n) for n in LENGTHS] + [(1, 300), (65, 300)]
    for queries, keys in lengths[1:4] if setting.small else lengths:
        query, key, mask = _operands(case, queries, keys, setting.device)
        repeated = key.repeat_interleave(4 // case.kv_heads, dim=1)
        scores = trust.explicit_scores(query, repeated, scale, mask, case.causal)
        lse = kernels.log_sum_exp(query, key, scale, mask, case.causal)
        lse_difference = near(lse, scores.logsumexp(-1), TOLERANCE[case.dtype])
        found = kernels.column_sums(query, key, lse, scale, mask, None, case.causal)
        wanted = scores.softmax(-1).nan_to_num(0.0).sum(-2)
        worst = f"{near(found, wanted, TOLERANCE[case.dtype])}; lse {lse_difference}"
        plain = column_sums.plain_column_sums(query, repeated, lse, scale, mask, None, case.causal)
        near(found, plain, 10 * TOLERANCE[case.dtype])
    return f"at {queries} × {keys}: {worst}"


def _padding(setting: Setting) -> str:
    kernels = _kernels_module(setting)
    like = torch.zeros((), device=setting.device)
    query, key = (trust.numbers(2, 1, 65, 32, like=like, seed=seed) for seed in range(2))
    real = samples.left_padding(2, 65, 9).to(setting.device)
    mask = torch.zeros(2, 1, 65, 65, device=setting.device).masked_fill(~real[:, None, None, :], -torch.inf)
    mask[1, :, 40] = -torch.inf
    lse = kernels.log_sum_exp(query, key, 0.2, mask)
    sums = kernels.column_sums(query, key, lse, 0.2, mask, real)
    assert bool((lse[1, :, 40] == -torch.inf).all()), "a fully masked row has a finite log-sum-exp"
    assert bool((sums[0, :, :9] == 0).all()), "padding has a score"
    return near(sums.sum(-1)[:, 0], torch.tensor([56.0, 64.0]), 1e-4)


def _long(setting: Setting) -> str:
    if setting.small:
        raise NotChecked("it takes a mask of 2³¹ numbers, 4 GB; this needs a GPU")
    if torch.cuda.mem_get_info(setting.device)[0] < 12e9:
        raise NotChecked("it takes 12 GB of free memory")
    kernels, length, like = _kernels_module(setting), 4096, torch.zeros((), dtype=torch.bfloat16, device=setting.device)
    query = trust.numbers(9, 16, length, 32, like=like)
    mask = torch.zeros(9, 16, length, length, dtype=torch.bfloat16, device=setting.device)
    mask[-1, -1, :, 7] = -torch.inf
    sums = kernels.column_sums(query, query, kernels.log_sum_exp(query, query, 0.2, mask), 0.2, mask)
    assert float(sums[-1, -1, 7]) == 0, "the mask of the last head was not read"
    return near(sums.sum(-1), torch.full((9, 16), float(length)), 1e-3)


def _tiles(setting: Setting) -> str:
    dtype = torch.float32 if setting.small else torch.bfloat16
    kernels = _kernels_module(setting, dtype)
    lengths = (65, 130) if setting.small else (127, 300)
    query, key, mask = _operands(Case(dtype, 128, "key"), *lengths, setting.device)
    lse = kernels.log_sum_exp(query, key, 0.1, mask)
    wanted, fit = kernels.column_sums(query, key, lse, 0.1, mask), 0
    for tile in (*tiles.TILES, tiles.SMALL)[3 if setting.small else 0 :]:
        try:
            found = kernels.column_sums(query, key, lse, 0.1, mask, None, False, tile)
        except kernels.OutOfResources:
            continue  # such a tile is never chosen
        near(found, wanted, 1e-5)
        fit += 1
    return f"{fit} tiles fit"


def _switched_on(setting: Setting) -> str:
    dtypes = (torch.float32,) if setting.small else DTYPES
    kernels = _kernels_module(setting)
    before = column_sums.TRITON_DEVICES
    column_sums.TRITON_DEVICES = (setting.device.type,)
    try:
        for dtype in dtypes:
            query, _, mask = _operands(Case(dtype, 64, "key"), 65, 65, setting.device)
            reasons = "; ".join(verdict.reason for verdict in trust.VERDICTS.values() if not verdict.passed)
            assert kernels.usable(query, mask, False), reasons
    finally:
        column_sums.TRITON_DEVICES = before
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


COMPILE = """
import math
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sinklens.hooks import column_sums_triton as kernels, tiles

for kernel in (kernels._lse_kernel, kernels._sums_kernel):
    tile, names = tiles.DEFAULT, kernel.arg_names
    fixed = dict(WIDTH=128, CHANNELS=128, ROWS=tile.rows, COLUMNS=tile.columns, KIND=kernels.KEY, CAUSAL=True,
                 EXACT=False, LOG2=kernels.LOG2_E, q_channel=1, k_channel=1)
    types = dict(query="*bf16", key="*bf16", mask="*bf16", lse="*fp32", out="*fp32", scale="fp32")
    signature = {name: "constexpr" if name in fixed else types.get(name, "i32") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()})
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "cubin" in compiled.asm
    print(compiled.metadata.shared)
"""


def _compiled(setting: Setting) -> str:
    if not setting.small:
        raise NotChecked("they are compiled for this device instead")
    _kernels_module(setting)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-400:]
    return f"{' and '.join(done.stdout.split())} bytes of shared memory"


@cache
def _attention(device: torch.device, dtype: torch.dtype, masked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    like = torch.zeros((), dtype=dtype, device=device)
    query, key, value = (trust.numbers(2, 4, 127, 64, like=like, seed=seed) for seed in range(3))
    mask = trust.numbers(2, 4, 1, 127, like=like, seed=3) if masked else None
    if mask is not None:
        mask[..., 1::4] = -torch.inf
    return query, key, value, mask


def _fused(setting: Setting, dtype: torch.dtype, causal: bool, masked: bool) -> str:
    query, key, value, mask = _attention(setting.device, dtype, masked)
    given = fused.Operands(query, key, value, mask, causal, 1 / math.sqrt(64))
    route = fused.choice(given._replace(mask=fused._spread(mask, query, key, fused.ALIGNED)))
    found = fused.attend(query, key, value, mask, causal, given.scale)
    refused = "; ".join(verdict.reason for verdict in trust.VERDICTS.values() if not verdict.passed)
    assert found is not None or not refused, f"PyTorch's {route.name} failed its first-use test: {refused}"
    if found is None:
        raise NotChecked(f"PyTorch chooses its {route.name} route here, which has no log-sum-exp")
    wanted = fused.explicit(given)
    difference = near(found.mixed, wanted.mixed, MIXED[dtype])
    return f"{route.name.lower()}: outputs {difference}; lse {near(found.lse, wanted.lse, 1e-3)}"


def _public(setting: Setting) -> str:
    differences = []
    for dtype in DTYPES:
        query, key, value, mask = _attention(setting.device, dtype, False)
        found = fused.attend(query, key, value, mask, False, 0.125)
        if found is None:
            continue
        wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.125)
        difference = "bit for bit" if torch.equal(found.mixed, wanted) else near(found.mixed, wanted, 1e-5)
        differences.append(f"{str(dtype).removeprefix('torch.')} {difference}")
    if not differences:
        raise NotChecked(f"no route with a log-sum-exp, of {', '.join(SDPBackend.__members__)}")
    return "; ".join(differences)
