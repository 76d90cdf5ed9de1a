"""How far a quantized model is from the model that was quantized.

Both decode the same prompts. *Free-running*: each works on its own canvases, and the first different token changes the
rest. *Under replay*: the other model computes every step on the canvases of the reference, which shows what its weights
change at each step.

    full, small = sinklens.load("tiny-llada"), sinklens.load("tiny-llada", quantization="torchao-int8")
    found = fidelity(full, small, prompts, gen_length=16)
    float(found.under_replay["kl"].mean()), found.sinks_moved

Caveat: prompts of one kind say little about others, and a short run little about a long one.
"""

from dataclasses import dataclass
from typing import Any

import xarray as xr

from sinklens.errors import SettingError
from sinklens.experiments.comparison import compare
from sinklens.experiments.sink_changes import sinks_compared
from sinklens.interventions import MaskedLogits
from sinklens.model import Model
from sinklens.runs import generate
from sinklens.runs.result import Generation


@dataclass(frozen=True)
class Fidelity:
    """How another model's runs differ from the reference's, as returned by `fidelity`.

    Attributes:
        base: the reference's run.
        free, replayed: the other model's runs, alone and on the canvases of `base`.
        free_running: `compare` of `base` and `free`.
        under_replay: `compare` of `base` and `replayed`, with the counts of `sinks_compared`.
        heads: number of heads whose strongest key each step compares: layers × heads.
    """

    base: Generation
    free: Generation
    replayed: Generation
    free_running: xr.Dataset
    under_replay: xr.Dataset
    heads: int

    @property
    def sinks_moved(self) -> float:
        """Share of heads, over prompts and steps, whose strongest key is another one under replay."""
        return float(self.under_replay["sinks_moved"].mean()) / self.heads

    def __repr__(self) -> str:
        kl, same = self.under_replay["kl"], self.free_running["same_answer"]
        return (
            f"Fidelity(mean KL per step {float(kl.mean()):.3g} nats, {self.sinks_moved:.1%} of strongest keys moved, "
            f"{int(same.sum())} of {same.size} answers are the same)"
        )


def fidelity(reference: Model, other: Model, prompt: Any, *, seed: int = 0, **settings: Any) -> Fidelity:
    """Compare the runs of `other`, such as a quantized model, with those of `reference`, step by step.

    KL is Σ_v p(v) log(p(v)/q(v)) in nats at the masked positions, p the reference's distribution and q the other's.

    Args:
        reference: the model in full precision.
        other: a model with the same layers, heads and vocabulary.
        prompt: as in `sinklens.generate`; with several prompts, each measure is [batch, …].
        seed, **settings: as in `sinklens.generate`, of all runs.

    Raises:
        SettingError: the models differ in layers, heads or vocabulary.
    """
    sizes = [(one.cfg.n_layers, one.cfg.n_heads, one.cfg.d_vocab) for one in (reference, other)]
    if sizes[0] != sizes[1]:
        raise SettingError(
            f"compared models must have the same layers, heads and vocabulary; got {sizes[0]} and {sizes[1]}. Compare "
            f"a quantized model with the one that was quantized."
        )
    kept = [MaskedLogits() for _ in range(3)]
    settings |= {"seed": seed, "progress": False}
    base = generate(reference, prompt, hooks=[kept[0]], **settings)
    free = generate(other, prompt, hooks=[kept[1]], **settings)
    replayed = generate(other, prompt, hooks=[kept[2]], replay=base, **settings)
    free_running = compare(base, free, kept[0].kept, kept[1].kept)
    under_replay = compare(base, replayed, kept[0].kept, kept[2].kept)
    moved = sinks_compared(base, replayed)
    return Fidelity(
        base, free, replayed, free_running, xr.merge([under_replay, moved], join="outer"), sizes[0][0] * sizes[0][1]
    )
