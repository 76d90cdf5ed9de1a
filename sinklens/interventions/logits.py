"""Keeping the logits of a run for comparison with another run.

Pitfall: once runs diverge, their masked positions differ, so rows of `MaskedLogits.kept` can be compared only where the
same positions are masked; `sinklens.experiments.compare` aligns them.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from sinklens.errors import require
from sinklens.hooks.points import Point
from sinklens.model import Model
from sinklens.runs.intervention import Canvas, Pairs, Reader, RunContext


@dataclass(kw_only=True, eq=False)
class MaskedLogits(Reader):
    """Keeps every step's logits at the masked positions and changes nothing; list it last to see all edits.

    Attributes:
        kept: step -> [masked, vocab] in float32 on the CPU, row by row, positions ascending. In an autoregressive run,
            [batch, vocab]: the logits of the token being decoded. In a model that changes its attention, only the steps
            that fill a block, at its masked positions. NaN where a cache policy computes none. A second run replaces
            them. For LLaDA-8B with 256 masked positions a step takes 130 MB, so limit `steps`.
    """

    needs_run: ClassVar[str] = "a single pass returns its logits; use MaskedLogits in a run of several steps."

    on_canvas: ClassVar[bool] = True

    kept: dict[int, Float[Tensor, "masked vocab"]] = field(default_factory=dict, init=False, repr=False)

    def pairs(self, model: "Model", run: RunContext) -> Pairs:
        in_step = self.step_test(run)
        canvas, encoder = Canvas(run), model.tree.architecture.encoder
        self.kept.clear()

        def keep(value: Float[Tensor, "batch pos vocab"], hook: Point) -> None:
            if not in_step(hook.step):
                return
            assert canvas.now is not None
            undecided, decidable = canvas.now.undecided, hook.forward_pass.decidable
            if decidable is not None:
                where = undecided & run.real
                kept = value.new_full((int(where.sum()), value.shape[-1]), torch.nan)
                columns = slice(hook.forward_pass.queries.start, hook.forward_pass.queries.stop)
                kept[(where & decidable)[where]] = value[(where & decidable)[:, columns]]
                self.kept[hook.step or 0] = kept.detach().float().cpu()
                return
            if run.tree.changes_attention and not run.causal:
                if (block := hook.forward_pass.block) is not None:  # the logits of other passes are of next tokens
                    here = (undecided & run.real[:, : undecided.shape[1]])[:, block.start : block.stop]
                    self.kept[hook.step or 0] = value[here].detach().float().cpu()
                return
            require(
                not encoder or undecided.shape == run.real.shape,
                "MaskedLogits compares complete answers; run with a gen_length of one canvas.",
            )
            first = undecided.shape[1] - value.shape[1] if encoder else 0  # a canvas is the end of the text
            require(
                run.causal or value.shape[1] == undecided.shape[1] - first,
                "MaskedLogits needs the logits of all masked positions; run with use_cache=False. With cached "
                "blocks, a step computes those of its block alone.",
            )
            masked = value[:, 0] if run.causal else value[(undecided & run.real)[:, first:]]
            self.kept[hook.step or 0] = masked.detach().float().cpu()

        return [("denoise.hook_canvas", canvas.hook), ("denoise.hook_logits", keep)]
