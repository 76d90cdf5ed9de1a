"""Head outputs collected on a reference set of prompts, for mean and resample ablation of heads.

Pitfall: if the reference is unlike the prompt under study, its mean is no more typical than a zero.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.errors import SettingError
from sinklens.hooks.points import Point
from sinklens.interventions.ablation import HeadOutputs
from sinklens.model import Model
from sinklens.runs import generate
from sinklens.runs.intervention import Pairs, layer_of
from sinklens.utils.integers import as_seed

POOL = 4096  # outputs kept per head for resampling


def head_outputs(model: Model, prompts: Sequence[str] | Tensor, seed: int = 0, **settings: Any) -> HeadOutputs:
    """Run `model` on `prompts`, as `sinklens.generate` would, and collect ``hook_z`` of all layers and steps.

    Every pass in which a row is active counts: an autoregressive run with a key/value cache sees each position once, a
    diffusion run at every step. Passes in which a row only waits for the rest of its batch, because it has ended or has
    nothing left to decide, do not count.

    Raises:
        SettingError: a cache policy, under which a run does not compute every position.
    """
    if settings.get("cache") is not None:
        raise SettingError("head_outputs reads exact runs; leave cache= out.")
    seen = _Collected(model, model.encode(prompts, settings.get("chat_template", False))[1], seed)
    generate(model, prompts, seed=seed, record_sinks=False, progress=False, hooks=seen.pairs(), **settings)
    return HeadOutputs(seen.mean(), seen.pool())


class _Collected:
    """Collects the outputs of every head at each step, from the rows that are active at the step."""

    def __init__(self, model: Model, real: Bool[Tensor, "batch pos"], seed: int) -> None:
        layers = range(model.cfg.n_layers)
        self._model, self._real, self._rng = model, real, torch.Generator().manual_seed(as_seed(seed))
        self._ids: Tensor | None = None
        self._drawn = torch.zeros(0, dtype=torch.long)
        self._kept: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        self._total = {layer: torch.zeros(()) for layer in layers}
        self._count = dict.fromkeys(layers, 0)

    def pairs(self) -> Pairs:
        """The hooks that collect the outputs."""
        return [("denoise.hook_canvas", self._begin), *((f"blocks.{at}.attn.hook_z", self._take) for at in self._kept)]

    def _begin(self, value: Int[Tensor, "batch pos"], hook: Point) -> None:
        self._ids = value

    def _take(self, value: Float[Tensor, "batch pos head d_head"], hook: Point) -> None:
        """Add the outputs of the rows that are active at the step."""
        assert self._ids is not None
        assert hook.forward_pass.active is not None
        by_block = not self._model.causal and not self._model.tree.architecture.encoder  # a canvas has no padding
        if by_block and value.shape[1] < self._ids.shape[1] and not bool(self._real.all()):
            raise SettingError(
                "head_outputs cannot place the padding of a pass over one block; give prompts of one length, or "
                "use_cache=False."
            )
        layer, missing = layer_of(hook), value.shape[1] - self._real.shape[1]
        mask = torch.nn.functional.pad(self._real, (0, max(0, missing)), value=True)[:, -value.shape[1] :]
        z = value[mask & hook.forward_pass.active[:, None]].float().cpu()
        self._total[layer] = self._total[layer] + z.sum(dim=0)
        self._count[layer] += len(z)
        if layer == 0:  # the same places in all layers
            self._drawn = torch.randperm(len(z), generator=self._rng)[: max(1, POOL // 64)]
        self._kept[layer].append(z[self._drawn])

    def mean(self) -> Float[Tensor, "layer head d_head"]:
        """The mean over all collected outputs."""
        return torch.stack([self._total[layer] / self._count[layer] for layer in self._kept])

    def pool(self) -> Float[Tensor, "layer sample head d_head"]:
        """A sample of the outputs, from the same places in all layers."""
        pools = [torch.cat(parts) for parts in self._kept.values()]
        drawn = torch.randperm(len(pools[0]), generator=self._rng)[:POOL]
        return torch.stack([pool[drawn % len(pool)] for pool in pools])
