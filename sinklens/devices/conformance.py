"""Compare logits and patterns on the device with the CPU in float64, and with reference data if available.

Tolerances. float32 (TF32 off): 1e-4 of the largest logit, a hundred times its rounding error. bfloat16 and float16: the
root mean square of the difference is at most 4 % or 1 % of that of the logits; on a CPU 0.5 to 1 % was measured in
bfloat16. Patterns: 1e-4 in float32. Canvases of reference runs: token for token, except for tied decisions (runs.py).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sinklens.devices import samples
from sinklens.devices.findings import Claim, NotChecked, near
from sinklens.devices.parts import Setting
from sinklens.devices.references import ReferenceFolder, StoredRun
from sinklens.devices.runs import same_tokens
from sinklens.devices.stored_runs import FOLDERS, open_folder, stored_pass, stored_runs
from sinklens.model import Model
from sinklens.tracing import generate

CPU = torch.device("cpu")
EXACT = 1e-4
SHARE = {torch.bfloat16: 0.04, torch.float16: 0.01}
RANDOM = (  # architecture, causal, d_head
    ("llama", False, 64), ("qwen2", False, 32), ("llama", True, 128), ("qwen3", True, 64), ("llama", False, 96),
)  # fmt: skip


def claims(setting: Setting) -> Iterator[Claim]:
    """Shipped and random models in every dtype, then the folders of reference data."""
    device = setting.device
    for name in samples.SHIPPED[: 1 if setting.small else None]:
        yield Claim(f"{name}, float32, padded batch", lambda name=name: _shipped(name, device, torch.float32))  # type: ignore[misc]
        for dtype in SHARE if not setting.small else (torch.bfloat16,):
            yield Claim(
                f"{name}, {_short(dtype)}, padded batch",
                lambda name=name, dtype=dtype: _shipped(name, device, dtype),  # type: ignore[misc]
            )
    for kind in RANDOM[: 1 if setting.small else None]:
        for dtype in (torch.float32, torch.bfloat16):
            what = f"random {kind[0]}, {'causal' if kind[1] else 'bidirectional'}, heads of {kind[2]}, {_short(dtype)}"
            yield Claim(what, lambda kind=kind, dtype=dtype: _random(kind, device, dtype))  # type: ignore[misc]
    yield from _references(setting)


def compare(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> str:
    """Describe the difference of logits, checked against the tolerance of the dtype.

    Raises:
        AssertionError: the difference is above the tolerance.
    """
    if dtype == torch.float32:
        return near(found, wanted, EXACT)
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    share = float((found - wanted).pow(2).mean().sqrt() / wanted.pow(2).mean().sqrt())
    assert share <= SHARE[dtype], f"root mean square off by {share:.2%}; at most {SHARE[dtype]:.0%} is allowed"
    same = float((found.argmax(-1) == wanted.argmax(-1)).double().mean())
    return f"root mean square off by {share:.2%} (allowed: {SHARE[dtype]:.0%}), {same:.1%} of the top tokens the same"


def _logits(model: Model, ids: Tensor, real: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model(ids.to(model.cfg.device), attention_mask=real.to(model.cfg.device))
    return logits.cpu()[real]


def _shipped(name: str, device: torch.device, dtype: torch.dtype) -> str:
    exact = samples.shipped(name, CPU, torch.float64)
    ids, real = samples.random_ids(3, 65, min(exact.cfg.d_vocab, 600)), samples.left_padding(3, 65, 5)
    return compare(_logits(samples.shipped(name, device, dtype), ids, real), _logits(exact, ids, real), dtype)


def _random(kind: tuple[str, bool, int], device: torch.device, dtype: torch.dtype) -> str:
    architecture, causal, width = kind
    ids, real = samples.random_ids(2, 127), samples.left_padding(2, 127, 9)
    exact = samples.random_model(architecture, causal, CPU, torch.float64, width)
    found = samples.random_model(architecture, causal, device, dtype, width)
    return compare(_logits(found, ids, real), _logits(exact, ids, real), dtype)


def _references(setting: Setting) -> Iterator[Claim]:
    folder = setting.conformance
    if folder is None or not folder.is_dir():
        yield Claim("reference data of the models' own code", _absent)
        return
    for name in list(FOLDERS)[: 1 if setting.small else None]:
        if not (folder / name / "expected.safetensors").is_file():
            continue
        case = open_folder(folder / name)
        yield Claim(f"{name}: logits and patterns of the reference code", lambda case=case: _single(case, setting))  # type: ignore[misc]
        for stored in stored_runs(case)[: 0 if setting.small else None]:
            yield Claim(
                f"{name}: canvases of reference run {stored.number}, token for token",
                lambda case=case, stored=stored: _run(case, stored, setting),  # type: ignore[misc]
            )


def _absent() -> str:
    raise NotChecked("no folder of reference data; pass one with --conformance FOLDER")


def _single(case: ReferenceFolder, setting: Setting) -> str:
    model, stored = case.load(setting.device, block_length=case.pass_block_length), stored_pass(case)
    with torch.no_grad():
        ids = stored.ids.to(setting.device)
        logits, cache = model.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_pattern"))
    difference, patterns = near(logits, stored.logits, EXACT), "not stored"
    for layer, pattern in enumerate(stored.patterns):
        patterns = near(cache["pattern", layer], pattern, EXACT)
    return f"logits: {difference}; patterns of the last layer: {patterns}"


def _run(case: ReferenceFolder, stored: StoredRun, setting: Setting) -> str:
    block_length = stored.block_length or case.pass_block_length
    model = case.load(setting.device, stored.changes, block_length)
    run = generate(model, stored.prompt, progress=False, **stored.settings)
    equal = stored.equal(run)
    if all(equal):
        return f"{len(equal) - 1} passes"
    assert model.family_record.masked, (
        f"{equal.count(False)} of {len(equal)} canvases differ; ties are not examined on a canvas of random tokens"
    )
    on_cpu = case.load(CPU, stored.changes, block_length)
    return same_tokens(on_cpu, model, stored.prompt, stored.settings)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
