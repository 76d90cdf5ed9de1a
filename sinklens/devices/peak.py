"""Memory: what recording adds to an unrecorded run, and what happens when memory runs out."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from sinklens.devices import samples
from sinklens.devices.findings import Claim, Measurement, NotChecked
from sinklens.devices.measuring import peak
from sinklens.devices.parts import Setting
from sinklens.errors import DeviceMemoryError
from sinklens.hooks.points import Point
from sinklens.model import Model
from sinklens.tracing import generate

GIVEN: dict[str, Any] = {"gen_length": 16, "block_length": 16, "steps": 2, "progress": False}


def claims(setting: Setting) -> Iterator[Claim]:
    """Peak memory, then running out of memory."""
    length = 128 if setting.small else 1000
    yield Claim("recording sinks keeps no tensor of the size of an attention map", lambda: _peaks(setting, length))
    yield Claim("memory above an unrecorded run, in MB", lambda: _above(setting, length))
    yield Claim("running out of memory during a run raises an error that says what to lower", lambda: _raised(setting))
    yield Claim("running out of the device's memory does the same, and the model runs again", lambda: _real(setting))


def _model(setting: Setting) -> Model:
    return samples.random_model("llama", False, setting.device, heads=8, kv_heads=8)


@cache
def _extra(setting: Setting, length: int) -> float:
    """MB that a recorded run takes more than an unrecorded one."""
    model, ids = _model(setting), samples.random_ids(1, length - 16)

    def run(record: bool) -> Any:
        return generate(model, ids, record_sinks=record, **GIVEN)

    run(True), run(False)
    return peak(lambda: run(True), setting.device) - peak(lambda: run(False), setting.device)


def _peaks(setting: Setting, length: int) -> str:
    extra, layer = _extra(setting, length), 8 * length * length * 4 / 1e6
    blocks = 10 if setting.small else 0  # the plain version works in blocks of 8 MiB
    assert extra < blocks + layer, f"{extra:.1f} MB more, where the map of one layer takes {layer:.1f} MB"
    return f"{extra:.1f} MB more, where the map of one layer takes {layer:.1f} MB"


def _above(setting: Setting, length: int) -> Measurement:
    return Measurement(_extra(setting, length), None, f"2 layers, 8 heads of 64, S = {length}")


def _raised(setting: Setting) -> str:
    model, ids = _model(setting), samples.random_ids(2, 17)
    before = generate(model, ids, **GIVEN)

    def fail(value: torch.Tensor, hook: Point) -> None:
        if hook.step == 1:
            raise torch.OutOfMemoryError("out of memory, raised by the check")

    message = ""
    try:
        generate(model, ids, hooks=[("blocks.1.hook_resid_mid", fail)], **GIVEN)
    except DeviceMemoryError as error:
        message = str(error)
    assert "prompts at a time (2)" in message, message or "no error was raised"
    again = generate(model, ids, **GIVEN)
    assert torch.equal(again.canvas, before.canvas), "the next run differs"
    return f"{message[:120]}…"


def _real(setting: Setting) -> str:
    if setting.device.type != "cuda":
        raise NotChecked("it fills the memory of a CUDA device")
    model, ids = _model(setting), samples.random_ids(8, 1000)
    before = generate(model, ids[:1], **GIVEN)
    torch.cuda.empty_cache()
    reserved, total = (
        torch.cuda.memory_reserved(setting.device),
        torch.cuda.get_device_properties(setting.device).total_memory,
    )
    torch.cuda.set_per_process_memory_fraction(min(1.0, (reserved + 128e6) / total), setting.device)
    message = ""
    try:
        patterns = [(lambda name: name.endswith("hook_pattern"), lambda value, hook: None)]  # 2 × 264 MB for the map
        generate(model, ids, hooks=patterns, **GIVEN)
    except DeviceMemoryError as error:
        message = str(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, setting.device)
    kept = torch.cuda.memory_allocated(setting.device)
    again = generate(model, ids[:1], **GIVEN)
    assert torch.equal(again.canvas, before.canvas), "the next run differs"
    assert "hook_pattern" in message, message or "a run that needs more memory than is left finished without an error"
    return f"{kept / 1e6:.0f} MB allocated after the error, {reserved / 1e6:.0f} MB reserved before"
