"""Whether two devices agree: differences within a tolerance, and runs that are the same except for tied decisions.

Two devices add in different orders, so logits differ in their last digits, and a decision that depends on these may go
either way. A run that differs from the CPU's therefore passes if the decision at the first differing step was *tied*:
both runs are replayed on the CPU's canvases, the largest difference of their logits there is the noise, and the
separation of the two decisions has to be below four times the noise. Two tokens of one position are separated by the
gap of their logits; two positions by the gap of the log-odds of their best tokens.

Limitation: after a tie the two runs diverge, and later steps are not compared.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.plain import ANSWER, MASK, plain_step
from sinklens.hooks import Point
from sinklens.model import Model
from sinklens.runs import Generation, generate

EXACT = 1e-4  # of the largest logit in float32 without TF32: a hundred times its rounding error
SHARE = {torch.bfloat16: 0.04, torch.float16: 0.01}  # of the logits' root mean square; 0.5 to 1 % measured on a CPU
TIED = 4.0  # times the noise; log-odds move by at most twice the noise each
NOISE = 1e-3  # of the largest logit; another order of adding does not explain more


def near(found: Tensor, wanted: Tensor, limit: float, what: str = "") -> str:
    """Describe the largest difference, relative to the largest absolute value of `wanted` (at least 1).

    Args:
        what: what is compared; the error begins with it.

    Raises:
        AssertionError: the difference is above `limit`, or the shapes differ.
    """
    assert found.shape == wanted.shape, f"{what} shape {list(found.shape)} instead of {list(wanted.shape)}"
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    same = (found == wanted) | (found.isnan() & wanted.isnan())  # infinities too
    off = torch.where(same, 0.0, (found - wanted).abs())
    largest = float(off.max() / wanted[wanted.isfinite()].abs().max().clamp(min=1.0)) if off.numel() else 0.0
    assert largest <= limit, f"{what} differs by {largest:.2g}; at most {limit:.2g} is allowed"
    return f"differs by {largest:.2g} at most (allowed: {limit:.2g})"


def near_logits(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> str:
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
        apart = separation(expected[row], *(run.canvas[row, step : step + 2] for run in (wanted, found)))
        assert apart <= TIED * noise, (
            f"step {step}, row {row}: decisions {apart:.2g} apart differ, where logits differ by {noise:.2g}"
        )
    return f"the same until step {step}, where decisions are tied (logits differ by {noise:.2g})"


class Decisions(NamedTuple):
    """Steps of a run that a plain loop decides otherwise on the same canvases, and their separations.

    Attributes:
        differing: (step, row, separation by sinklens' logits, by the plain loop's, resolution of the logits' type).
        all: number of steps and rows.
    """

    differing: list[tuple[int, int, float, float, float]]
    all: int

    def __str__(self) -> str:
        """How many differ, how many of these are ties, and the first."""
        tied = sum(max(ours, plain) <= TIED * step for _, _, ours, plain, step in self.differing)
        text = f"{len(self.differing)} of {self.all} decisions differ on the same canvases, {tied} of them by ties"
        for step, row, ours, plain, least in self.differing[:1]:
            text += f"; the first, in step {step}, row {row}, by {ours:.2g} here and {plain:.2g} in the plain loop, "
            text += f"where numbers are {least:.2g} apart"
        return text


@torch.no_grad()
def decisions(model: Model, hf: Any, prompt: Tensor, steps: int) -> Decisions:
    """Compare each step of a greedy run with a step of the plain loop on the same canvas."""
    given = {"gen_length": ANSWER, "block_length": ANSWER, "steps": steps}
    run, differing = _run(model, prompt, record_sinks=False, **given), []
    for step in range(steps):
        before, after = (run.canvas[:, step + late].to(prompt.device) for late in (0, 1))
        other, where = before.clone(), before == MASK
        plain = torch.zeros(*before.shape, model.cfg.d_vocab, device=before.device)
        plain[where] = plain_step(hf, other, ANSWER // steps)
        rows = (after != other).any(dim=1).nonzero()[:, 0].tolist()
        ours = _logits(model, prompt, given, run, step) if rows else plain
        for row in rows:
            canvases = [torch.stack([before[row], one[row]]).cpu() for one in (after, other)]
            least = torch.finfo(model.tree.hf.dtype).eps * float(plain[row].abs().max())
            separations = [separation(logits[row].cpu().double(), *canvases) for logits in (ours, plain)]
            differing.append((step, row, *separations, least))
    return Decisions(differing, steps * len(prompt))


def _run(model: Model, prompt: Any, **given: Any) -> Generation:
    return generate(model, prompt, progress=False, **given)


def _logits(model: Model, prompt: Any, given: dict[str, Any], run: Generation, step: int) -> Tensor:
    """Logits of all positions at `step` on the canvases of `run`, before guidance mixes them."""
    kept: dict[int, Tensor] = {}

    def keep(value: Tensor, hook: Point) -> None:
        if hook.step == step:
            kept[step] = value.detach().cpu().double()

    hooks = [*given.get("hooks", ()), ("denoise.hook_logits", keep)]
    _run(model, prompt, replay=run, record_sinks=False, **given | {"hooks": hooks})
    return kept[step]


def separation(logits: Tensor, wanted: Tensor, found: Tensor) -> float:
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
