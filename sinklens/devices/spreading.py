"""Layers on several GPUs, in main memory or on disk; and one process per GPU through Ray."""

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from sinklens.devices import samples
from sinklens.devices.findings import Claim, NotChecked, near
from sinklens.devices.parts import Setting
from sinklens.errors import SinklensError
from sinklens.interventions import MaskSinks
from sinklens.model import Model, load
from sinklens.tracing import generate

GIVEN: dict[str, Any] = {"gen_length": 4, "steps": 4, "block_length": 4, "progress": False}
LAYERS = 4


def claims(setting: Setting) -> Iterator[Claim]:
    """Offloading, which needs only one device; then several devices; then Ray."""
    yield Claim("a model offloaded to main memory shows every point", lambda: _offloaded(setting, "cpu"))
    if not setting.small:
        yield Claim("a model offloaded to disk shows every point", lambda: _offloaded(setting, "disk"))
        yield Claim("device_map='auto'", lambda: _mapped(setting, "auto"))
    yield Claim("device_map with layers in main memory and on disk", lambda: _mapped(setting, _mixed(setting)))
    yield Claim("device_map over several GPUs: points, sinks and masks", lambda: _several(setting))
    yield Claim("Ray: a worker on a GPU writes the ledger of this process", lambda: _ray(setting))


def _offloaded(setting: Setting, place: str) -> str:
    import accelerate

    plain = samples.random_model("llama", False, setting.device)
    copy = type(plain.tree.hf)(plain.config).to(device="cpu", dtype=torch.float32).eval()
    copy.load_state_dict({name: value.cpu() for name, value in plain.tree.hf.state_dict().items()})
    with tempfile.TemporaryDirectory() as folder:
        if place == "cpu":
            accelerate.cpu_offload(copy, setting.device)
        else:
            accelerate.disk_offload(copy, folder, setting.device)
        return _compare(load(copy), plain, samples.random_ids(2, 17))


def _compare(model: Model, plain: Model, ids: torch.Tensor) -> str:
    """Check that every point of a pass shows the same values, and that a run with masked sinks has the same tokens."""
    with torch.no_grad():
        logits, cache = model.run_with_cache(ids.to(model.cfg.device))
        wanted, wanted_cache = plain.run_with_cache(ids.to(plain.cfg.device))
    for name, value in wanted_cache.items():
        try:
            near(cache[name], value, 1e-4)
        except AssertionError as error:
            raise AssertionError(f"{name} {error}") from error
    runs = [generate(each, ids, hooks=MaskSinks(top_k=1), **GIVEN) for each in (model, plain)]
    assert torch.equal(runs[0].canvas, runs[1].canvas), "a run with masked sinks has different tokens"
    return f"{len(wanted_cache)} points; logits: {near(logits, wanted, 1e-4)}"


def _mixed(setting: Setting) -> dict[str, Any]:
    here = setting.device.index or 0 if setting.device.type == "cuda" else str(setting.device)
    places = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"], here)
    return places | dict(zip((f"model.layers.{n}" for n in range(LAYERS)), (here, "disk", "cpu", here), strict=True))


def _mapped(setting: Setting, device_map: Any) -> str:
    plain = samples.shipped("tiny-llada", setting.device)
    assert plain.cfg.n_layers == LAYERS, f"tiny-llada has {plain.cfg.n_layers} layers"
    model = load("tiny-llada", device_map=device_map, dtype=torch.float32)
    ids, _ = plain.encode(samples.PROMPTS[0])
    found = getattr(model.tree.hf, "hf_device_map", {})
    return f"{_compare(model, plain, ids)}; on {', '.join(sorted({str(place) for place in found.values()}))}"


def _several(setting: Setting) -> str:
    count = torch.cuda.device_count() if setting.device.type == "cuda" else 0
    if count < 2:
        raise NotChecked(f"it takes two GPUs; there {'is' if count == 1 else 'are'} {count or 'none'}")
    last = {"model.layers.2": 1, "model.layers.3": 1, "model.norm": 1, "lm_head": 1}
    return _mapped(setting, _mixed(setting) | {"model.layers.1": 0} | last)


def _ray(setting: Setting) -> str:
    if setting.device.type != "cuda":
        raise NotChecked("no GPU; the tests run Ray with simulated GPUs")
    if find_spec("ray") is None:
        raise NotChecked("Ray is not installed (pip install 'sinklens[ray]')")
    from sinklens.evaluation import OnRay, evaluate
    from sinklens.evaluation.conditions import masking

    with tempfile.TemporaryDirectory() as folder:
        given: dict[str, Any] = {"limit": 2, "batch": 2}
        engine = OnRay(workers=1, gpus_per_worker=1)
        runs = [
            evaluate("tiny-llada", "tiny-gsm", masking([0]), Path(folder) / name, engine=how, **given)[0]
            for name, how in (("ray", engine), ("alone", None))
        ]
        records = [[_reproducible(record) for record in run.records()] for run in runs]
    if records[0] != records[1]:
        raise SinklensError("the worker's records differ from those of this process")
    return f"{len(records[0])} records, the same"


def _reproducible(record: Any) -> dict[str, Any]:
    """A record without the fields that depend on timing and batching."""
    return {name: value for name, value in record.items() if name not in ("seconds", "batch")}
