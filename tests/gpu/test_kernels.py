"""Check the Triton kernels and PyTorch's operators against the formula in float64, at odd sizes.

On a CPU the kernels run in Triton's interpreter at a few sizes only.
"""

import math
from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest
import torch
from gpu.agreement import near
from gpu.kernels import Case, compare_kernels, operands
from torch import Tensor

from sinklens.hooks.attention import column_sums, fused, tiles, trust

MIXED = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}  # for attention's output
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EXACT, HALF, BRAIN = DTYPES
CASES = (
    *(pytest.param(case, marks=pytest.mark.small) for case in (
        Case(EXACT, 32, "key"), Case(HALF, 64, "full", True, 2), Case(BRAIN, 128),
    )),
    *(pytest.param(Case(dtype, 64, mask, causal, 2), marks=pytest.mark.large)
      for dtype in (EXACT, BRAIN)
      for mask, causal in (("none", False), ("none", True), ("key", False), ("full", False), ("full", True))),
    *(pytest.param(case, marks=pytest.mark.large) for case in (
        *(Case(dtype, width, "key") for dtype in (HALF, BRAIN) for width in (64, 80, 96, 256)),
        Case(HALF, 128, "key"), Case(EXACT, 128, "key"), Case(HALF, 64, "key", True, 1),
    )),
    *(pytest.param(case, marks=[pytest.mark.large, pytest.mark.figures]) for case in (  # of the models at hand
        Case(BRAIN, 32), *(Case(dtype, 32, "key") for dtype in DTYPES), Case(BRAIN, 128, "key"),
    )),
)  # fmt: skip


@cache
def _attention(device: torch.device, dtype: torch.dtype, masked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    like = torch.zeros((), dtype=dtype, device=device)
    query, key, value = (trust.numbers(2, 4, 127, 64, like=like, seed=seed) for seed in range(3))
    mask = trust.numbers(2, 4, 1, 127, like=like, seed=3) if masked else None
    if mask is not None:
        mask[..., 1::4] = -torch.inf
    return query, key, value, mask


@pytest.mark.parametrize("kind", ["", ", causal", ", a mask"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fused(dtype: torch.dtype, kind: str, device: torch.device, finding: Callable[..., None]) -> None:
    """fused attention with its log-sum-exp: {dtype}{kind}"""
    causal = kind == ", causal"
    query, key, value, mask = _attention(device, dtype, kind == ", a mask")
    given = fused.FusedInputs(query, key, value, mask, causal, 1 / math.sqrt(64))
    route = fused.choice(given._replace(mask=fused._spread(mask, query, key, fused.ALIGNED)))
    found = fused.attend(query, key, value, mask, causal, given.scale)
    refused = "; ".join(filter(None, trust.VERDICTS.values()))
    assert found is not None or not refused, f"PyTorch's {route.name} failed its first-use test: {refused}"
    if found is None:
        pytest.skip(f"PyTorch chooses its {route.name} route here, which has no log-sum-exp")
    wanted = fused.explicit(given)
    difference = near(found.mixed, wanted.mixed, MIXED[dtype])
    finding(f"{route.name.lower()}: outputs {difference}; lse {near(found.lse, wanted.lse, 1e-3)}")


@pytest.fixture
def kernels(device: torch.device) -> ModuleType:
    """The module of the kernels, compiled on CUDA and interpreted on a CPU."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if device.type not in ("cuda", "cpu"):
        pytest.skip(f"the kernels are for CUDA devices; this is {device.type}")
    from sinklens.hooks.attention import column_sums_triton

    return column_sums_triton


@pytest.mark.parametrize("case", CASES)
def test_formula(case: Case, kernels: ModuleType, device: torch.device, finding: Callable[..., None]) -> None:
    """kernels: {case}"""
    if device.type == "cpu" and case.dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter does not multiply bfloat16; this needs a GPU")
    finding(compare_kernels(case, kernels, device))


@pytest.mark.cuda("it takes a mask of 2³¹ numbers, 4 GB; this needs a GPU")
def test_long(kernels: ModuleType, device: torch.device, finding: Callable[..., None]) -> None:
    """kernels: long masks are addressed in 64 bits"""
    if torch.cuda.mem_get_info(device)[0] < 12e9:
        pytest.skip("it takes 12 GB of free memory")
    length, like = 4096, torch.zeros((), dtype=torch.bfloat16, device=device)
    query = trust.numbers(9, 16, length, 32, like=like)
    mask = torch.zeros(9, 16, length, length, dtype=torch.bfloat16, device=device)
    mask[-1, -1, :, 7] = -torch.inf
    sums = kernels.column_sums(query, query, kernels.log_sum_exp(query, query, 0.2, mask), 0.2, mask)
    assert float(sums[-1, -1, 7]) == 0, "the mask of the last head was not read"
    finding(near(sums.sum(-1), torch.full((9, 16), float(length)), 1e-3))


def test_tiles(kernels: ModuleType, device: torch.device, finding: Callable[..., None]) -> None:
    """kernels: every tile gives the same sums"""
    small = device.type == "cpu"
    case = Case(torch.float32 if small else torch.bfloat16, 128, "key")
    query, key, mask = operands(case, *((65, 130) if small else (127, 300)), device)
    lse = kernels.log_sum_exp(query, key, 0.1, mask)
    wanted, fit = kernels.column_sums(query, key, lse, 0.1, mask), 0
    for tile in (*tiles.TILES, tiles.SMALL)[3 if small else 0 :]:
        try:
            found = kernels.column_sums(query, key, lse, 0.1, mask, None, False, tile)
        except kernels.OutOfResources:
            continue  # such a tile is never chosen
        near(found, wanted, 1e-5, str(tile))
        fit += 1
    finding(f"{fit} tiles fit")


def test_first_use(
    kernels: ModuleType, device: torch.device, finding: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """kernels: the first-use test enables them for sink scores"""
    monkeypatch.setattr(column_sums, "TRITON_DEVICES", (device.type,))
    dtypes = DTYPES[: 1 if device.type == "cpu" else None]
    for dtype in dtypes:
        query, _, mask = operands(Case(dtype, 64, "key"), 65, 65, device)
        reasons = "; ".join(filter(None, trust.VERDICTS.values()))
        assert kernels.usable(query, mask, False), reasons
    finding(", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes))
