"""Uses of a model: hooks, trace blocks, edits, replay, masks, guidance, caches. All in float32.

Where the CPU is the reference, both devices run on the same canvases (``replay=``), so a tied decision cannot make them
diverge.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sinklens.devices import samples
from sinklens.devices.findings import Claim, near
from sinklens.devices.parts import Setting
from sinklens.errors import ReadOnlyHookError
from sinklens.interventions import AblateHeads, MaskSinks, WindowAttention
from sinklens.model import Model
from sinklens.runs.result import Generation
from sinklens.tracing import generate, trace

CPU = torch.device("cpu")
NEAR = 1e-4
GIVEN: dict[str, Any] = {"gen_length": 8, "steps": 8, "block_length": 8, "progress": False}
SCORES = "blocks.{}.attn.hook_sink_scores"


def claims(setting: Setting) -> Iterator[Claim]:
    """One claim per kind of use."""
    both = [samples.shipped("tiny-llada", device) for device in (CPU, setting.device)]
    base = generate(both[0], samples.PROMPTS, **GIVEN)
    model = both[1]
    yield Claim("every hook point of a run shows the CPU's values", lambda: _points(both, base))
    yield Claim("watching sinks or the mask leaves the logits unchanged", lambda: _watching(model))
    yield Claim("sink scores are the column sums of the pattern", lambda: _sums(model))
    yield Claim("an edit by a hook acts as on the CPU", lambda: _effect(both, base, [_drop_head()]))
    yield Claim("an edit in a trace block acts like the same edit by a hook", lambda: _block(model))
    yield Claim("a replayed run has the given canvases", lambda: _replay(model, base))
    yield Claim("MaskSinks(1) with a recorded run as source acts as on the CPU", lambda: _masked(both, base))
    yield Claim("keys that MaskSinks(5) masked have a score of exactly 0", lambda: _hidden(model))
    yield Claim("AblateHeads acts as on the CPU", lambda: _effect(both, base, AblateHeads(layers=[1], heads=[0])))
    yield Claim("WindowAttention acts as on the CPU", lambda: _effect(both, base, WindowAttention(width=4)))
    yield Claim("guidance gives the CPU's logits", lambda: _guidance(both))
    yield Claim("a key/value cache leaves tokens and sink scores unchanged", lambda: _cache(setting.device))
    yield Claim("t.cache and run_with_cache show the same", lambda: _caches(model))
    yield Claim("a read-only point refuses an edit", lambda: _read_only(model))


def _ids(model: Model) -> tuple[Tensor, Tensor]:
    return model.encode(samples.PROMPTS)


def _points(both: list[Model], base: Generation) -> str:
    seen: list[dict[str, Tensor]] = [{}, {}]
    for model, values in zip(both, seen, strict=True):

        def keep(value: Tensor, hook: Any, values: dict[str, Tensor] = values) -> None:
            if hook.step == 3:
                values[hook.name] = value.detach().cpu()

        generate(model, samples.PROMPTS, hooks=[(lambda name: True, keep)], replay=base, **GIVEN)
    names = both[0].hook_names()
    assert list(seen[1]) == list(seen[0]), "points were reached in a different order"
    assert set(seen[1]) == set(names), f"{sorted(set(names) - set(seen[1]))} were not reached"
    decided = ("hook_candidates", "hook_commit", "hook_confidence")  # these may be tied; runs.py checks them
    for name in names:
        if not name.endswith(decided):
            try:
                near(seen[1][name], seen[0][name], 10 * NEAR)
            except AssertionError as error:
                raise AssertionError(f"{name} {error}") from error
    return f"{len(names)} points, within {10 * NEAR:g}"


def _watching(model: Model) -> str:
    ids, real = _ids(model)
    with torch.no_grad():
        plain = model(ids, attention_mask=real)
        differences = []
        for point in ("hook_sink_scores", "hook_attn_mask"):
            hooks = [(lambda name, point=point: name.endswith(point), lambda value, hook: None)]
            found = model.run_with_hooks(ids, attention_mask=real, fwd_hooks=hooks)
            difference = "bit for bit" if torch.equal(found, plain) else near(found, plain, 1e-5)
            differences.append(f"{point}: {difference}")
    return "; ".join(differences)


def _sums(model: Model) -> str:
    ids, real = _ids(model)
    with torch.no_grad():
        fused = model.run_with_cache(ids, attention_mask=real, names_filter=lambda name: name.endswith("sink_scores"))[
            1
        ]
        shown = model.run_with_cache(ids, attention_mask=real, names_filter=lambda name: name.endswith("pattern"))[1]
    difference = ""
    for layer in range(model.cfg.n_layers):
        real_rows = shown["pattern", layer].float() * real[:, None, :, None]
        difference = near(fused[SCORES.format(layer)], real_rows.sum(2), NEAR)
    return f"last layer {difference}"


def _drop_head() -> tuple[str, Any]:
    def drop(value: Tensor, hook: Any) -> Tensor:
        value[:, :, 1] = 0
        return value

    return "blocks.1.attn.hook_z", drop


def _replayed(model: Model, base: Generation, hooks: Any, **more: Any) -> Tensor:
    """Logits of prompt and answer at every step, on the canvases of `base` under `hooks`."""
    kept: list[Tensor] = []
    listed = list(hooks) if isinstance(hooks, list) else [hooks]
    listed.append(("denoise.hook_logits", lambda value, hook: kept.append(value.detach().cpu())))
    generate(model, samples.PROMPTS, hooks=listed, replay=base, **GIVEN, **more)
    return torch.stack(kept)[:, base.real]


def _effect(both: list[Model], base: Generation, hooks: Any) -> str:
    wanted, found, plain = (
        _replayed(both[0], base, hooks),
        _replayed(both[1], base, hooks),
        _replayed(both[0], base, []),
    )
    assert float((wanted - plain).abs().max()) > 100 * NEAR, "the edit has no effect to compare"
    return near(found, wanted, 10 * NEAR)


def _block(model: Model) -> str:
    hooked = generate(model, samples.PROMPTS[0], hooks=[_drop_head()], **GIVEN)
    with trace(model, samples.PROMPTS[0], **GIVEN) as t:
        for step in t.steps:  # noqa: B007
            t["blocks.1.attn.hook_z"][:, :, 1] = 0
            pattern = t["blocks.2.attn.hook_pattern"].clone()
    assert torch.equal(t.canvas, hooked.canvas), "the edit in the block led to other tokens than the hook"
    off = float((pattern.float().sum(-1) - 1).abs().max())
    assert off < NEAR, f"rows of the pattern read in the block deviate from a sum of 1 by {off:.2g}"
    return f"the pattern read in the block is on {pattern.device}"


def _replay(model: Model, base: Generation) -> str:
    again = generate(model, samples.PROMPTS, replay=base, **GIVEN)
    assert torch.equal(again.canvas[:, :-1], base.canvas[:, :-1]), "canvases differ"
    return f"{again.steps_run} steps"


def _masked(both: list[Model], base: Generation) -> str:
    return _effect(both, base, MaskSinks(top_k=1, source=base))


def _hidden(model: Model) -> str:
    masks = MaskSinks(top_k=5)
    run = generate(model, samples.PROMPTS, hooks=masks, **GIVEN)
    assert run.sinks is not None
    keys = masks.keys(run.sinks).to_numpy()
    scores = run.sinks.scores().to_numpy()
    assert keys.sum() > 0, "nothing was masked"
    assert (scores[keys] == 0).all(), f"{int((scores[keys] != 0).sum())} of {int(keys.sum())} masked keys have a score"
    return f"{int(keys.sum())} keys in {run.steps_run} steps"


def _guidance(both: list[Model]) -> str:
    base = generate(both[0], samples.PROMPTS, cfg_scale=1.0, **GIVEN)
    wanted, found = (_replayed(model, base, [], cfg_scale=1.0) for model in both)
    return near(found, wanted, 10 * NEAR)


def _cache(device: torch.device) -> str:
    model = samples.shipped("tiny-llama", device)
    given: dict[str, Any] = {"gen_length": 8, "progress": False}
    with_cache, without = (generate(model, samples.PROMPTS, use_cache=use, **given) for use in (True, False))
    assert torch.equal(with_cache.tokens, without.tokens), "the cache changed the tokens"
    assert with_cache.sinks is not None
    assert without.sinks is not None
    scores = [torch.from_numpy(track.scores().to_numpy()) for track in (with_cache.sinks, without.sinks)]
    return near(scores[0], scores[1], 10 * NEAR)


def _caches(model: Model) -> str:
    name = "blocks.1.hook_resid_post"
    with trace(model, samples.PROMPTS[0], **GIVEN) as t:
        caches = t.cache([name], [0])
        for step in t.steps:  # noqa: B007
            pass
    with torch.no_grad():
        _, cache = model.run_with_cache(t.canvas[:, 0].to(model.cfg.device), names_filter=name)
    return near(caches[0][name], cache[name], NEAR)


def _read_only(model: Model) -> str:
    ids, real = _ids(model)
    double = (SCORES.format(1), lambda value, hook: value * 2)
    try:
        model.run_with_hooks(ids, attention_mask=real, fwd_hooks=[double])
    except ReadOnlyHookError:
        return "refused"
    raise AssertionError("the edit was accepted")
