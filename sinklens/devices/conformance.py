"""Compare logits and patterns on the device with the CPU in float64, and with reference data if available.

Tolerances. float32 (TF32 off): 1e-4 of the largest logit, a hundred times its rounding error. bfloat16 and float16: the
root mean square of the difference is at most 4 % or 1 % of that of the logits; on a CPU 0.5 to 1 % was measured in
bfloat16. Patterns: 1e-4 in float32. Canvases of reference runs: token for token, except for tied decisions (runs.py).
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from sinklens.devices import samples
from sinklens.devices.findings import Claim, NotChecked, near
from sinklens.devices.parts import Setting
from sinklens.devices.runs import same_tokens
from sinklens.model import Model, load
from sinklens.tracing import generate

CPU = torch.device("cpu")
EXACT = 1e-4
SHARE = {torch.bfloat16: 0.04, torch.float16: 0.01}
REFERENCES = (
    "llada-mha",
    "llada-gqa",
    "dream-gqa",
    "mmada",
)  # folders of reference data in the format read here
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
    for case in [folder / name for name in REFERENCES[: 1 if setting.small else None]]:
        if not (case / "expected.safetensors").is_file():
            continue
        yield Claim(f"{case.name}: logits and patterns of the reference code", lambda case=case: _single(case, setting))  # type: ignore[misc]
        for number, given in enumerate(_runs(case)[: 0 if setting.small else None]):
            yield Claim(
                f"{case.name}: canvases of reference run {number}, token for token",
                lambda case=case, number=number, given=given: _run(case, number, given, setting),  # type: ignore[misc]
            )


def _absent() -> str:
    raise NotChecked("no folder of reference data; pass one with --conformance FOLDER")


def _expected(case: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(case / "expected.safetensors")


def _runs(case: Path) -> list[dict]:
    """Settings of the reference runs."""
    return json.loads((case / "expected.json").read_text())["generate"]


def _single(case: Path, setting: Setting) -> str:
    model, expected = load(case, device=setting.device, dtype=torch.float32), _expected(case)
    with torch.no_grad():
        ids = expected["input_ids"].to(setting.device)
        logits, cache = model.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_pattern"))
    patterns = torch.stack([cache["pattern", layer] for layer in range(model.cfg.n_layers)], dim=1)
    difference = near(logits, expected["logits"], EXACT)
    return f"logits: {difference}; patterns: {near(patterns, expected['pattern'], EXACT)}"


def _run(case: Path, number: int, given: dict, setting: Setting) -> str:
    model, expected = load(case, device=setting.device, dtype=torch.float32), _expected(case)
    settings = dict(given)
    if "max_new_tokens" in settings:
        settings["gen_length"] = settings.pop("max_new_tokens")
    run = generate(model, expected[f"gen{number}.prompt"], progress=False, **settings)
    after = f"gen{number}.history" in expected  # Dream's reference keeps the canvas after each step
    found = run.canvas[:, 1:] if after else run.canvas[:, :-1]
    wanted = expected[f"gen{number}.history" if after else f"gen{number}.canvas"]
    if torch.equal(found, wanted):
        return f"{found.shape[1]} steps"
    on_cpu = load(case, device=CPU, dtype=torch.float32)
    return same_tokens(on_cpu, model, expected[f"gen{number}.prompt"], settings)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
