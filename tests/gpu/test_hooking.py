"""Uses of a model: hooks, trace blocks, edits, replay, masks, guidance, caches. All in float32.

Where the CPU is the reference, both devices run on the same canvases (``replay=``), so a tied decision cannot make them
diverge.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu import samples
from gpu.agreement import near
from torch import Tensor

from sinklens.interventions import AblateHeads, MaskKeys, MaskSinks
from sinklens.model import Model
from sinklens.runs import Generation, generate, trace

NEAR = 1e-4
GIVEN: dict[str, Any] = {"gen_length": 8, "steps": 8, "block_length": 8, "progress": False}
SCORES = "blocks.{}.attn.hook_sink_scores"


@pytest.fixture(scope="module")
def cpu() -> Model:
    """tiny-llada on the CPU."""
    return samples.shipped("tiny-llada", torch.device("cpu"))


@pytest.fixture(scope="module")
def model(device: torch.device) -> Model:
    """tiny-llada on the device."""
    return samples.shipped("tiny-llada", device)


@pytest.fixture(scope="module")
def base(cpu: Model) -> Generation:
    """A run on the CPU."""
    return generate(cpu, samples.PROMPTS, **GIVEN)


@pytest.fixture(scope="module")
def batch(model: Model) -> tuple[Tensor, Tensor]:
    """The prompts' ids and their attention mask."""
    return model.encode(samples.PROMPTS)


def test_points(cpu: Model, model: Model, base: Generation, finding: Callable[..., None]) -> None:
    """every hook point of a run shows the CPU's values"""
    seen: list[dict[str, Tensor]] = [{}, {}]
    for each, values in zip((cpu, model), seen, strict=True):

        def keep(value: Tensor, hook: Any, values: dict[str, Tensor] = values) -> None:
            if hook.step == 3:
                values[hook.name] = value.detach().cpu()

        generate(each, samples.PROMPTS, hooks=[(lambda name: True, keep)], replay=base, **GIVEN)
    names = cpu.hook_names()
    assert list(seen[1]) == list(seen[0]), "points were reached in a different order"
    assert set(seen[1]) == set(names), f"{sorted(set(names) - set(seen[1]))} were not reached"
    decided = ("hook_candidates", "hook_commit", "hook_confidence")  # may be tied; test_runs.py checks them
    for name in names:
        if not name.endswith(decided):
            near(seen[1][name], seen[0][name], 10 * NEAR, name)
    finding(f"{len(names)} points, within {10 * NEAR:g}")


def test_watching(model: Model, batch: tuple[Tensor, Tensor], finding: Callable[..., None]) -> None:
    """watching sinks or the mask leaves the logits unchanged"""
    (ids, real), differences = batch, []
    with torch.no_grad():
        plain = model(ids, attention_mask=real)
        for point in ("hook_sink_scores", "hook_attn_mask"):
            hooks = [(lambda name, point=point: name.endswith(point), lambda value, hook: None)]
            found = model.run_with_hooks(ids, attention_mask=real, fwd_hooks=hooks)
            difference = "bit for bit" if torch.equal(found, plain) else near(found, plain, 1e-5, point)
            differences.append(f"{point}: {difference}")
    finding("; ".join(differences))


def test_sums(model: Model, batch: tuple[Tensor, Tensor], finding: Callable[..., None]) -> None:
    """sink scores are the column sums of the pattern"""
    (ids, real), difference = batch, ""
    caches = []
    for point in ("sink_scores", "pattern"):
        with torch.no_grad():
            given: dict[str, Any] = {"names_filter": lambda name, point=point: name.endswith(point)}
            caches.append(model.run_with_cache(ids, attention_mask=real, **given)[1])
    for layer in range(model.cfg.n_layers):
        real_rows = caches[1]["pattern", layer].float() * real[:, None, :, None]
        difference = near(caches[0][SCORES.format(layer)], real_rows.sum(2), NEAR, f"layer {layer}")
    finding(f"last layer {difference}")


def _drop(value: Tensor, hook: Any) -> Tensor:
    value[:, :, 1] = 0
    return value


DROP_HEAD = ("blocks.1.attn.hook_z", _drop)


def _replayed(model: Model, base: Generation, hooks: list[Any], **more: Any) -> Tensor:
    """Logits of prompt and answer at every step, on the canvases of `base` under `hooks`."""
    kept: list[Tensor] = []
    keep = ("denoise.hook_logits", lambda value, hook: kept.append(value.detach().cpu()))
    generate(model, samples.PROMPTS, hooks=[*hooks, keep], replay=base, **GIVEN, **more)
    return torch.stack(kept)[:, base.real]


@pytest.mark.parametrize(("name", "edit"), [
    ("an edit by a hook", lambda base: DROP_HEAD),
    ("MaskSinks(1) with a recorded run as source", lambda base: MaskSinks(top_k=1, source=base)),
    ("AblateHeads", lambda base: AblateHeads(layers=[1], heads=[0])),
    ("MaskKeys with a window", lambda base: MaskKeys(keep=True, window=4, positions=[0])),
])  # fmt: skip
def test_edits(
    name: str, edit: Callable[[Generation], Any], cpu: Model, model: Model, base: Generation,
    finding: Callable[..., None],
) -> None:  # fmt: skip
    """{name} acts as on the CPU"""
    wanted, found = (_replayed(each, base, [edit(base)]) for each in (cpu, model))
    assert float((wanted - _replayed(cpu, base, [])).abs().max()) > 100 * NEAR, "the edit has no effect to compare"
    finding(near(found, wanted, 10 * NEAR))


def test_block(model: Model, finding: Callable[..., None]) -> None:
    """an edit in a trace block acts like the same edit by a hook"""
    hooked = generate(model, samples.PROMPTS[0], hooks=[DROP_HEAD], **GIVEN)
    with trace(model, samples.PROMPTS[0], **GIVEN) as t:
        for step in t.steps:
            t["blocks.1.attn.hook_z"][:, :, 1] = 0
            pattern = t["blocks.2.attn.hook_pattern"].clone()
    assert torch.equal(t.canvas, hooked.canvas), "the edit in the block led to other tokens than the hook"
    off = float((pattern.float().sum(-1) - 1).abs().max())
    assert off < NEAR, f"rows of the pattern read in the block deviate from a sum of 1 by {off:.2g}"
    finding(f"the pattern read in the block is on {pattern.device}")


def test_masked(model: Model, finding: Callable[..., None]) -> None:
    """keys that MaskSinks(5) masked have a score of exactly 0"""
    masks = MaskSinks(top_k=5)
    run = generate(model, samples.PROMPTS, hooks=masks, **GIVEN)
    assert run.sinks is not None
    keys, scores = masks.keys(run).to_numpy(), run.sinks.scores().to_numpy()
    assert keys.sum() > 0, "nothing was masked"
    assert (scores[keys] == 0).all(), f"{int((scores[keys] != 0).sum())} of {int(keys.sum())} masked keys have a score"
    finding(f"{int(keys.sum())} keys in {run.steps_run} steps")


def test_guidance(cpu: Model, model: Model, finding: Callable[..., None]) -> None:
    """guidance gives the CPU's logits"""
    base = generate(cpu, samples.PROMPTS, cfg_scale=1.0, **GIVEN)
    wanted, found = (_replayed(each, base, [], cfg_scale=1.0) for each in (cpu, model))
    finding(near(found, wanted, 10 * NEAR))


def test_cache(device: torch.device, finding: Callable[..., None]) -> None:
    """a key/value cache leaves tokens and sink scores unchanged"""
    model = samples.shipped("tiny-llama", device)
    given: dict[str, Any] = {"gen_length": 8, "progress": False}
    with_cache, without = (generate(model, samples.PROMPTS, use_cache=use, **given) for use in (True, False))
    assert torch.equal(with_cache.tokens, without.tokens), "the cache changed the tokens"
    assert with_cache.sinks is not None
    assert without.sinks is not None
    scores = [torch.from_numpy(track.scores().to_numpy()) for track in (with_cache.sinks, without.sinks)]
    finding(near(scores[0], scores[1], 10 * NEAR))
