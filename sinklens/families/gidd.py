"""GIDD: masked and uniform diffusion of a DiT.

GIDD's samplers: from masks to text under masked and uniform noise, and the correction of a finished text.

Noise is a mix of the mask and of random tokens; the checkpoint says how much of it is random (``p_uniform``). Every
step draws every answer position again: a mask may become a token, a token another token, and a token a mask again. A
position is *undecided* while it holds the mask. Decisions are provisional: a token that is not the mask may still be
noise. The network reads the time itself, not a noise level.

At time t, with π(t) the noise, a token is distributed as α(t) x + β(t) π: its weight on the clean token is (1 − t) / C,
on the mask t / C, and on each other token c / (C (V − 1)), where c = B √(t (1 − t)), C = 1 + c, and B depends on
``p_uniform`` (von Rütte et al., 2503.04482).

The first of N steps treats the canvas of masks as one at time 1 − 1/N, and the last step changes nothing, as in the
reference. With ``min_p``, the most likely token can always be drawn; the reference divides 0 by 0 if no token reaches
that probability.

`gidd-self-correction` begins with a finished text, ``start_canvas=``, in which nothing is undecided, and changes at
most one token per step, by the most likely change. It breaks ties for the best score by position; in the reference they
depend on ``topk``. Rows are corrected in one batch, and a row that has stopped waits for the others.

Guidance and cache policies are refused, since a step needs all positions. The numbers of parameters are for 50,258
tokens.

Pitfall: masks that remain after the last step stay in the text.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from annotated_types import Ge, Gt, Lt
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinklens.families.modulated import DIT, DIT_ROTATION
from sinklens.sampling import decisions
from sinklens.sampling.parts import Steps
from sinklens.sampling.psi import answer
from sinklens.sampling.random_canvas import RandomCanvas
from sinklens.sampling.state import State
from sinklens.utils.arguments import Count


class NoiseShares(NamedTuple):
    """Where a noisy token comes from, as probabilities.

    Attributes:
        clean: the clean token.
        mask: the mask.
        random: a token drawn uniformly from all but the mask.
    """

    clean: Float[Tensor, "*shape"]
    mask: Float[Tensor, "*shape"]
    random: Float[Tensor, "*shape"]


class Mixture(NamedTuple):
    """How a clean token and noise mix at one time.

    Attributes:
        alpha: weight of the clean token.
        noise: weight that the noise adds to each token.
    """

    alpha: Float[Tensor, ""]
    noise: Float[Tensor, " vocab"]

    def of(self, probs: Float[Tensor, "drawn vocab"]) -> Float[Tensor, "drawn vocab"]:
        """The distribution of the tokens, given that of the clean ones."""
        return self.alpha * probs + self.noise


@dataclass(frozen=True)
class GiddSettings(Steps):
    """GIDD's sampler (von Rütte et al., 2503.04482, and its reference code).

    As in the reference code, the first step treats the canvas of masks as one at time 1 − 1/N, and the last step
    changes nothing.

    Attributes:
        min_p: never draw tokens with a lower probability; the most likely one can always be drawn.
    """

    name: ClassVar = "gidd"
    sets_time: ClassVar = True
    level: ClassVar = "time"
    judges_all: ClassVar = True
    min_p: Annotated[float, Ge(0), Lt(1)] = 0.0

    def denoise(self, state: State) -> Iterator[None]:
        eps = state.tree.hf.config.t_eps
        times = eps + (1 - 2 * eps) * torch.linspace(0, 1, self.steps + 1)
        for number in reversed(range(self.steps)):
            yield
            self._step(state, times[number], times[max(0, number - 1)])

    def _step(self, state: State, time: Float[Tensor, ""], until: Float[Tensor, ""]) -> None:
        state.time = time.to(state.canvas.device).expand(len(state.canvas))
        canvas = state.begin_step()
        where = answer(state, self.gen_length)
        probs = decisions.token_probabilities(state.logits(canvas, where), state.mask_id)
        weights = reverse(probs, canvas[where], mixture(state, time), mixture(state, until))
        if self.min_p > 0:
            weights = weights.masked_fill(weights < weights.amax(dim=-1, keepdim=True).clamp(max=self.min_p), 0.0)
        uniform = state.uniform(where, 1, weights.dtype)[:, 0]
        proposed = state.propose_drawn(where, decisions.categorical_candidates(weights, uniform), canvas, lambda: probs)
        state.commit(where, proposed)


@dataclass(frozen=True)
class GiddCorrectionSettings(RandomCanvas, Steps):
    """GIDD's self-correction of a finished text, ``start_canvas``: every step replaces at most one token.

    A step draws a token at every position and keeps the most likely of those that differ from the text; of several with
    the same probability, the first. Rows are corrected independently.

    Attributes:
        gen_length: number of positions of the text.
        steps: largest number of corrections of a row; default `gen_length`.
        start_canvas: the text: token ids [batch, pos], or one row for all; None corrects random tokens. Kept as rows of
            numbers.
        temperature: divides the logits, above 0.
        t0: the time that the network reads.
        early_stopping: end a row when a correction changes nothing, or when the share of tokens that the model
            considers the most likely has not risen for more than `early_stopping_patience` corrections; the last of
            these is dropped.
        early_stopping_patience: see `early_stopping`.
    """

    name: ClassVar = "gidd-self-correction"
    sets_time: ClassVar = True
    level: ClassVar = "time"
    judges_all: ClassVar = True
    temperature: Annotated[float, Gt(0)] = 0.1
    t0: Annotated[float, Gt(0), Lt(1)] = 0.01
    early_stopping: bool = True
    early_stopping_patience: Count = 32

    def denoise(self, state: State) -> Iterator[None]:
        self.check_start(state)
        state.canvas = self.begun(state, state.prompt_length)
        rows = _Rows(state)
        for _ in range(self.steps):
            if not bool(rows.running.any()):
                return
            yield
            self._step(state, rows)

    def _step(self, state: State, rows: "_Rows") -> None:
        state.time = torch.full_like(state.canvas[:, 0], self.t0, dtype=torch.float32)
        canvas = state.begin_step()
        where = answer(state, self.gen_length) & rows.running[:, None]
        logits = state.logits(canvas, where)
        probs = decisions.token_probabilities(logits / self.temperature, state.mask_id)
        uniform = state.uniform(where, 1, probs.dtype)[:, 0]
        proposed, drawn = state.propose(where, decisions.categorical_candidates(probs, uniform), canvas)
        confidence = state.spread_confidence(where, decisions.probability(probs, drawn).double())
        differs = where & (proposed != canvas)
        rivals = confidence.masked_fill(~differs, -torch.inf)
        chosen = differs & torch.zeros_like(differs).scatter(1, rivals.argmax(dim=1, keepdim=True), True)
        likely = canvas.masked_scatter(where, decisions.token_probabilities(logits, state.mask_id).argmax(dim=-1))
        state.tied = decisions.chosen_among_equals(rivals, chosen)
        state.commit(chosen & self._kept(rows, torch.where(chosen, proposed, canvas), likely, where, chosen), proposed)

    def _kept(
        self,
        rows: "_Rows",
        corrected: Int[Tensor, "batch pos"],
        likely: Int[Tensor, "batch pos"],
        where: Bool[Tensor, "batch pos"],
        chosen: Bool[Tensor, "batch pos"],
    ) -> Bool[Tensor, "batch 1"]:
        """Whether each row keeps its correction; ends rows."""
        if not self.early_stopping:
            return torch.ones_like(chosen[:, :1])
        agreement = ((corrected == likely) & where).sum(dim=1)
        rises = agreement > rows.most
        rows.most = torch.where(rises, agreement, rows.most)
        rows.waited = torch.where(rises, 0, rows.waited + 1)
        kept = rows.waited <= self.early_stopping_patience
        rows.running = rows.running & kept & chosen.any(dim=1)
        return kept[:, None]


class _Rows:
    """What the rows remember of earlier corrections.

    Attributes:
        running: rows that are still corrected.
        most: largest number of tokens so far that the model considers the most likely.
        waited: number of corrections since then.
    """

    def __init__(self, state: State) -> None:
        self.running = torch.ones_like(state.canvas[:, 0], dtype=torch.bool)
        self.most, self.waited = torch.full_like(state.canvas[:, 0], -1), torch.zeros_like(state.canvas[:, 0])


def noise_shares(time: Float[Tensor, "*shape"], p_uniform: float) -> NoiseShares:
    """The probabilities of each origin of a noisy token at `time`; see the module."""
    uniform = max(math.exp(-20), p_uniform)
    spread = (time * (1 - time)).sqrt() * math.exp(max(math.log(2 * uniform / (1 - uniform)), -20))
    total = 1 + spread
    return NoiseShares((1 - time) / total, time / total, spread / total)


def mixture(state: State, time: Float[Tensor, ""]) -> Mixture:
    """The mixture at `time`; see the module."""
    size, shares = state.tree.cfg.d_vocab, noise_shares(time, state.tree.hf.config.p_uniform)
    noise = (shares.random / (size - 1)).repeat(size)
    noise[state.mask_id] = shares.mask
    return Mixture(shares.clean, noise.to(state.canvas.device))


def reverse(
    probs: Float[Tensor, "drawn vocab"], present: Int[Tensor, " drawn"], now: Mixture, until: Mixture
) -> Float[Tensor, "drawn vocab"]:
    """Weights of the tokens at an earlier time, given the `present` ones and the probabilities of the clean ones.

    (r [y = x] + b(x)) q_s(y) / q_t(x), with r = α_t / α_s, b = β_t π_t − r β_s π_s, and q the mixture of p and noise.
    """
    ratio, place = now.alpha / until.alpha, present[:, None]
    earlier, given = until.of(probs), now.of(probs).gather(-1, place)
    added = (now.noise - ratio * until.noise)[present][:, None]
    return (earlier * added).scatter_add(-1, place, ratio * earlier.gather(-1, place)) / given


def converted(config: dict[str, Any]) -> dict[str, Any]:
    """GIDD's config as that of dit.py."""
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "p_uniform", "t_eps")
    return {
        **{key: config[key] for key in same},
        "cond_dim": config["timestep_cond_dim"],
        "max_position_embeddings": config["max_seq_len"],
        **DIT_ROTATION,
    }


FAMILIES = (
    replace(
        DIT,
        name="gidd",
        bound="mixture",
        model_types=("dit",),
        sampler="gidd",
        convert=converted,
        needed=(
            "vocab_size",
            "max_seq_len",
            "hidden_size",
            "timestep_cond_dim",
            "num_hidden_layers",
            "num_attention_heads",
            "p_uniform",
            "t_eps",
        ),
        foreign=r"backbone\.|rotary_emb\.inv_freq$",
        own_classes=("DIT",),
        checkpoints="GIDD small and base, p_uniform 0.0, 0.1 and 0.2",
        parameters=(169_627_218, 424_477_010),
    ),
)
SAMPLERS = (
    GiddSettings,
    GiddCorrectionSettings,
)
