"""Complete runs: the same tokens as on the CPU except for tied decisions, and the same results when run twice.

Two devices add in different orders, so logits differ in their last digits, and a decision that depends on these may go
either way. A run that differs from the CPU's therefore passes if the decision at the first differing step was *tied*:
both runs are replayed on the CPU's canvases, the largest difference of their logits there is the noise, and the
separation of the two decisions has to be below four times the noise. Two tokens of one position are separated by the
gap of their logits; two positions by the gap of the log-odds of their best tokens.

Limitation: after a tie the two runs diverge, and later steps are not compared.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sinklens.devices import samples
from sinklens.devices.findings import Claim
from sinklens.devices.parts import Setting
from sinklens.hooks.points import Point
from sinklens.model import Model
from sinklens.runs.result import Generation
from sinklens.tracing import generate

CPU = torch.device("cpu")
TIED = 4.0  # times the noise; log-odds move by at most twice the noise each
NOISE = 1e-3  # of the largest logit; another order of adding does not explain more


def claims(setting: Setting) -> Iterator[Claim]:
    """Runs compared with the CPU's, then determinism."""
    cases = _cases(setting.small)
    for what, make, given in cases:
        yield Claim(f"{what}: the tokens of the CPU's run", lambda make=make, given=given: _same(make, given, setting))  # type: ignore[misc]
    _, make, given = cases[0]
    yield Claim("a run without recorded sinks: the tokens of the recorded run", lambda: _unrecorded(make, setting))
    yield Claim("the same run twice: canvases and sink scores, bit for bit", lambda: _twice(make, given, setting))
    if setting.small:
        return
    yield Claim("a sampled run twice: the same tokens from one seed", lambda: _sampled(make, setting))
    yield Claim("a row alone: the same tokens as in a batch", lambda: _alone(make, given, setting))
    yield Claim("a run in bfloat16 ends, with finite sink scores of mean 1", lambda: _bfloat16(setting))


Case = tuple[str, Callable[[torch.device], tuple[Model, Any]], dict[str, Any]]


def _cases(small: bool) -> list[Case]:
    greedy = {"temperature": 0.0, "alg": "maskgit_plus"}

    def text(name: str) -> Callable[[torch.device], tuple[Model, Any]]:
        return lambda device: (samples.shipped(name, device), samples.PROMPTS)

    def ids(device: torch.device) -> tuple[Model, Any]:
        return samples.random_model("llama", False, device), samples.random_ids(3, 33)

    listed: list[Case] = [
        ("tiny-llada, three prompts", text("tiny-llada"), {"gen_length": 8, "steps": 8} if small else {}),
        ("tiny-llama, three prompts", text("tiny-llama"), {"gen_length": 8} if small else {}),
        ("tiny-dream, three prompts", text("tiny-dream"), greedy | ({"gen_length": 8, "steps": 8} if small else {})),
        ("random weights, two blocks", ids, {"gen_length": 32, "block_length": 16, "steps": 8}),
        ("random weights, guidance", ids, {"gen_length": 16, "block_length": 16, "steps": 8, "cfg_scale": 1.5}),
    ]
    return [listed[0], listed[1], listed[4]] if small else listed


def _run(model: Model, prompt: Any, **given: Any) -> Generation:
    return generate(model, prompt, progress=False, **given)


def _same(make: Callable[[torch.device], tuple[Model, Any]], given: dict[str, Any], setting: Setting) -> str:
    reference, prompt = make(CPU)
    model, _ = make(setting.device)
    return same_tokens(reference, model, prompt, given)


def same_tokens(reference: Model, model: Model, prompt: Any, given: dict[str, Any]) -> str:
    """Check that `model` decides like `reference`, up to the first tie, and describe the result.

    Raises:
        AssertionError: a decision that is not tied differs.
    """
    wanted, found = _run(reference, prompt, **given), _run(model, prompt, **given)
    if torch.equal(wanted.canvas, found.canvas):
        return f"{wanted.steps_run} steps, all canvases the same"
    shared = min(wanted.canvas.shape[1], found.canvas.shape[1])
    differ = (wanted.canvas[:, :shared] != found.canvas[:, :shared]).any(dim=2)
    steps = differ.any(dim=0).nonzero()
    assert len(steps), f"{found.steps_run} steps instead of {wanted.steps_run}, although the shared canvases are equal"
    step = int(steps[0]) - 1
    assert step >= 0, "the first canvas already differs"
    expected, actual = (_logits(each, prompt, given, wanted, step) for each in (reference, model))
    noise = float((expected - actual).abs().max())
    scale = float(expected.abs().max().clamp(min=1.0))
    assert noise <= NOISE * scale, (
        f"step {step}: logits differ by {noise:.2g} on the same canvas, which is more than rounding"
    )
    for row in differ[:, step + 1].nonzero()[:, 0].tolist():
        separation = _separation(expected[row], *(run.canvas[row, step : step + 2] for run in (wanted, found)))
        assert separation <= TIED * noise, (
            f"step {step}, row {row}: decisions {separation:.2g} apart differ, where logits differ by {noise:.2g}"
        )
    return f"the same until step {step}, where decisions are tied (logits differ by {noise:.2g})"


def _logits(model: Model, prompt: Any, given: dict[str, Any], run: Generation, step: int) -> Tensor:
    """Logits of all positions at `step` on the canvases of `run`, before guidance mixes them."""
    kept: dict[int, Tensor] = {}

    def keep(value: Tensor, hook: Point) -> None:
        if hook.step == step:
            kept[step] = value.detach().cpu().double()

    hooks = [*given.get("hooks", ()), ("denoise.hook_logits", keep)]
    _run(model, prompt, replay=run, record_sinks=False, **given | {"hooks": hooks})
    return kept[step]


def _separation(logits: Tensor, wanted: Tensor, found: Tensor) -> float:
    """The separation of two decisions of one row, each given as the canvas before and after the step."""
    where = (wanted[1] != found[1]).nonzero()[:, 0]
    if logits.shape[0] == 1:  # an autoregressive step has only the newest position
        top = logits[0].topk(2).values
        return float(top[0] - top[1])
    expected = {int(pos) for pos in where if wanted[1, pos] != wanted[0, pos]}
    actual = {int(pos) for pos in where if found[1, pos] != found[0, pos]}
    gaps = [float(logits[pos].max() - logits[pos, found[1, pos]]) for pos in expected & actual]
    odds = {pos: _log_odds(logits[pos]) for pos in expected | actual}
    gaps += [abs(odds[one] - odds[other]) for one in expected - actual for other in actual - expected]
    return max(gaps, default=0.0)


def _log_odds(logits: Tensor) -> float:
    """log p / (1 − p) of the best token."""
    best = int(logits.argmax())
    rest = torch.cat([logits[:best], logits[best + 1 :]])
    return float(logits[best] - rest.logsumexp(0))


def _twice(make: Callable[[torch.device], tuple[Model, Any]], given: dict[str, Any], setting: Setting) -> str:
    model, prompt = make(setting.device)
    first, second = _run(model, prompt, **given), _run(model, prompt, **given)
    assert torch.equal(first.canvas, second.canvas), "canvases differ"
    assert first.sinks is not None
    assert second.sinks is not None
    assert first.sinks.scores().equals(second.sinks.scores()), "sink scores differ"
    return f"{first.steps_run} steps"


def _sampled(make: Callable[[torch.device], tuple[Model, Any]], setting: Setting) -> str:
    model, prompt = make(setting.device)
    given = {"gen_length": 8, "steps": 8, "block_length": 8, "temperature": 1.0}
    first, second, other = (_run(model, prompt, seed=seed, **given) for seed in (3, 3, 4))
    assert torch.equal(first.canvas, second.canvas), "the same seed gave different tokens"
    return f"another seed gives {'the same' if torch.equal(first.canvas, other.canvas) else 'different'} tokens"


def _alone(make: Callable[[torch.device], tuple[Model, Any]], given: dict[str, Any], setting: Setting) -> str:
    model, prompt = make(setting.device)
    batch, alone = _run(model, prompt, **given), _run(model, prompt[:1], **given)
    length = alone.canvas.shape[2]
    found = batch.canvas[:1, :, -length:]
    if torch.equal(found[:, : alone.canvas.shape[1]], alone.canvas):
        return "the same"
    return f"differs: {same_tokens(samples.shipped('tiny-llada', CPU), model, prompt[:1], given)}"


def _unrecorded(make: Callable[[torch.device], tuple[Model, Any]], setting: Setting) -> str:
    model, prompt = make(setting.device)
    given = {"gen_length": 8, "steps": 8, "block_length": 8}
    recorded, plain = (_run(model, prompt, record_sinks=record, **given) for record in (True, False))
    assert torch.equal(recorded.canvas, plain.canvas), "recording sinks changed the run"
    return "all canvases the same"


def _bfloat16(setting: Setting) -> str:
    model = samples.shipped("tiny-llada", setting.device, torch.bfloat16)
    run = _run(model, samples.PROMPTS, gen_length=8, steps=4, block_length=8)
    assert run.sinks is not None
    scores = torch.from_numpy(run.sinks.scores().to_numpy())
    real = run.real[:, None, None, None, :].expand_as(scores)
    mean = scores.masked_fill(~real, 0.0).sum(-1) / real.sum(-1)
    off = float((mean - 1).abs().max())
    assert off < 0.05, f"the mean score of a row is off by {off:.2g}"
    return f"the mean score of a row is off by {off:.2g} at most"
