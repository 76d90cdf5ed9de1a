"""Published likelihood scripts, as short naive loops over one pair, and the sum over all masks.

They take a function from token ids [row, pos] to logits, so they share only the model's weights with sinklens.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LladaScript:
    """``LLaDAEvalHarness`` of LLaDA's eval_llada.py, without the harness."""

    logits: Logits
    mask_id: int
    mc_num: int = 128
    batch_size: int = 16
    cfg: float = 0.0

    def forward_process(self, batch: Tensor, prompt_index: Tensor) -> tuple[Tensor, Tensor]:
        rows, length = batch.shape
        target = int((length - prompt_index.sum()).item())
        k = torch.randint(1, target + 1, ())
        x = torch.round(torch.linspace(float(k), k + (rows - 1) * (target / rows), steps=rows)).long()
        x = ((x - 1) % target) + 1
        is_mask = torch.arange(target).repeat(rows, 1) < x.unsqueeze(1)
        for row in range(rows):
            is_mask[row] = is_mask[row][torch.randperm(target)]
        is_mask = torch.cat((torch.zeros(rows, int(prompt_index.sum()), dtype=torch.bool), is_mask), dim=1)
        return torch.where(is_mask, self.mask_id, batch), (x / target).unsqueeze(1).repeat(1, length)

    def get_logits(self, batch: Tensor, prompt_index: Tensor) -> Tensor:
        if not self.cfg:
            return self.logits(batch)
        unconditional = batch.clone()
        unconditional[prompt_index.unsqueeze(0).repeat(len(batch), 1)] = self.mask_id
        logits, un_logits = torch.chunk(self.logits(torch.cat([batch, unconditional])), 2, dim=0)
        return un_logits + (self.cfg + 1) * (logits - un_logits)

    def get_loglikelihood(self, prefix: list[int], target: list[int], seeds: list[int]) -> float:
        """The published estimate; `seeds` replaces the global generator's state before each batch."""
        seq = torch.tensor([prefix + target]).repeat(self.batch_size, 1)
        prompt_index = torch.arange(seq.shape[1]) < len(prefix)
        found = []
        for seed in seeds:
            torch.manual_seed(seed)
            noisy, p_mask = self.forward_process(seq, prompt_index)
            masked = noisy == self.mask_id
            logits = self.get_logits(noisy, prompt_index)
            loss = F.cross_entropy(logits[masked], seq[masked], reduction="none") / p_mask[masked]
            found.append(float(loss.sum() / self.batch_size))
        assert len(found) == self.mc_num // self.batch_size
        return -sum(found) / len(found)


def dream_forward_process(target: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """``_forward_process`` of Dream's and SMDM's scripts, of the target alone: which are masked, and p_mask."""
    torch.manual_seed(seed)
    rows, length = target.shape
    u0 = torch.rand(1)
    t = (u0 + torch.arange(rows).float() / rows) % 1
    p_mask = ((1 - 1e-3) * t + 1e-3)[:, None].repeat(1, length)
    return torch.rand(rows, length) < p_mask, p_mask


def all_masks(logits: Logits, mask_id: int, prefix: list[int], target: list[int], shift: bool = False) -> float:
    """The bound, as the mean over orders in which tokens are decided: every mask of every size."""
    total, length = 0.0, len(target)
    for size in range(1, length + 1):
        masks = list(itertools.combinations(range(length), size))
        for places in masks:
            answer = [mask_id if place in places else token for place, token in enumerate(target)]
            found = logits(torch.tensor([prefix + answer]))[0].double()
            lost = 0.0
            for place in places:
                row = found[max(0, len(prefix) + place - shift)]
                lost += math.log(sum(math.exp(x) for x in row.tolist())) - float(row[target[place]])
            total += lost / size / len(masks)
    return -total
