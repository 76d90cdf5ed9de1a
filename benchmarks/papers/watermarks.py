"""How often is a watermark missed, and how often is one found in unmarked text? docs/papers/watermarks.md.

    python benchmarks/papers/watermarks.py [MODEL ...]

30 texts of tiny-llada, or of other models, that continue "Question:", 40 positions in 20 steps, random order,
temperature 1: without a mark, with the Gumbel mark, and with GreenList. Each text with the Gumbel mark has a key of its
own; unmarked texts are tested with the same keys, and in a second row all with one key. Both detectors call a text
marked at p < 0.01. Intervals: Wilson's over texts.

About 12 seconds of processor time for tiny-llada.
"""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.stats import gamma, norm
from templates import RANDOM, call, having, loaded

import sinklens
from sinklens.hooks.points import Point
from sinklens.utils.estimates import Estimate, proportion

TEXTS, LENGTH, STEPS, LEVEL = 30, 40, 20, 0.01


@dataclass(frozen=True)
class GreenList:
    """Raise the logits of a *green list*, a part of the vocabulary that a key selects, before tokens are proposed.

    One list for all positions (Zhao et al., 2306.17439); in Kirchenbauer et al. (2301.10226) it depends on the token
    before, which a diffusion model does not always know.

    Attributes:
        key: the secret; another key gives other lists.
        share: γ, the share of the vocabulary that is green.
        delta: δ, added to green logits.
    """

    key: int
    share: float = 0.25
    delta: float = 2.0

    def green(self, vocabulary: int) -> torch.Tensor:
        """The green tokens, [vocab]."""
        digest = hashlib.sha256(repr((self.key, -1)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        found = torch.zeros(vocabulary, dtype=torch.bool)
        found[torch.randperm(vocabulary, generator=generator)[: max(1, round(self.share * vocabulary))]] = True
        return found

    def hooks(self) -> list[tuple]:
        """Hooks that raise the logits."""
        return [
            ("denoise.hook_logits", lambda logits, hook: logits + self.delta * self.green(logits.shape[-1]).to(logits))
        ]


def uniforms(keys: Sequence[int], vocabulary: int) -> torch.Tensor:
    """The secret numbers of each key, [text, position of the answer, token]."""
    draws = [torch.rand(LENGTH, vocabulary, generator=torch.Generator().manual_seed(key)) for key in keys]
    return torch.stack(draws).double().clamp(1e-12, 1 - 1e-7)


def generated(
    model: sinklens.Model, hooks: object = (), seed: int | None = None, by_confidence: bool = False
) -> sinklens.Generation:
    """A run of all texts; with a seed, tokens are drawn at temperature 1."""
    settings = {"gen_length": LENGTH, "steps": STEPS, "record_sinks": False, "progress": False}
    settings |= {} if by_confidence else having(model, RANDOM)
    greedy = having(model, {"greedy": True}) or having(model, {"temperature": 0.0})
    settings |= greedy if seed is None else having(model, {"temperature": 1.0, "greedy": False})
    return sinklens.generate(model, ["Question:"] * TEXTS, hooks=hooks, seed=seed or 0, **settings)


def gumbel(keys: Sequence[int], vocabulary: int) -> list[tuple]:
    """Hooks that turn the greedy choice into a draw whose noise depends on key and position."""
    noise = -torch.log(-torch.log(uniforms(keys, vocabulary)))

    def add(logits: torch.Tensor, hook: Point) -> torch.Tensor:
        logits = logits.clone()
        logits[:, -LENGTH:] += noise.to(logits)
        return logits

    return [("denoise.hook_logits", add)]


def gumbel_p(run: sinklens.Generation, keys: Sequence[int]) -> np.ndarray:
    """P of at least this sum of −log(1 − u) over the answer's tokens, were they drawn without the key."""
    found, numbers = [], uniforms(keys, run.model.cfg.d_vocab)
    for row, answer in enumerate(run.answers):
        ids = run.tokens[row, run.prompt_length : run.prompt_length + answer.tokens]
        score = -torch.log1p(-numbers[row, torch.arange(len(ids)), ids]).sum()
        found.append(gamma.sf(float(score), len(ids)))
    return np.array(found)


def green_z(run: sinklens.Generation, mark: GreenList) -> np.ndarray:
    """(G − γ T) / √(T γ (1 − γ)) of each text, with G green tokens of T, and γ their share of the vocabulary.

    Equal tokens count once, as in Kirchenbauer et al., 2301.10226: their draws are not independent.
    """
    green = mark.green(run.model.cfg.d_vocab)
    share, found = float(green.double().mean()), []
    for row, answer in zip(run.tokens, run.answers, strict=True):
        ids = row[run.prompt_length : run.prompt_length + answer.tokens].unique()
        deviation = (max(1, len(ids)) * share * (1 - share)) ** 0.5  # an empty text has z = 0
        found.append(float(green[ids].sum() - share * len(ids)) / deviation)
    return np.array(found)


def green_p(run: sinklens.Generation, keys: Sequence[int], delta: float = 2.0) -> np.ndarray:
    """P of at least this z, were the tokens drawn without the key."""
    scores = {key: green_z(run, GreenList(key=key, delta=delta)) for key in sorted(set(keys))}
    return norm.sf([scores[key][row] for row, key in enumerate(keys)])


def called(p: np.ndarray) -> Estimate:
    """Texts that are called marked."""
    return proportion(int((p < LEVEL).sum()), len(p))


def tell(model: sinklens.Model) -> None:
    """Print the table of a model."""
    keys, one, size = list(range(100, 100 + TEXTS)), [7] * TEXTS, model.cfg.d_vocab
    plain = generated(model, seed=1)
    marked = generated(model, gumbel(keys, size))
    print(f"{model.name}, tokens of a text:", np.mean([answer.tokens for answer in plain.answers]))
    print("gumbel: found", called(gumbel_p(marked, keys)), flush=True)
    print("  false alarms, own keys", called(gumbel_p(plain, keys)), "one key", called(gumbel_p(plain, one)))
    print("  marked, read with other keys", called(gumbel_p(marked, [key + 1000 for key in keys])))
    rates = [called(gumbel_p(plain, [key] * TEXTS)).value for key in range(40)]
    print(f"  false alarms of 40 keys: mean {np.mean(rates):.3f}, highest {max(rates):.2f}")
    confident = generated(model, gumbel(keys, size), by_confidence=True)
    print("  order by confidence: found", called(gumbel_p(confident, keys)), flush=True)
    for delta in (2.0, 4.0):
        run = generated(model, GreenList(key=7, delta=delta).hooks(), seed=0)
        print(f"green list, delta {delta}: found", called(green_p(run, one)), flush=True)
        print("  read with another key", called(green_p(run, [8] * TEXTS)))
    print("  false alarms, own keys", called(green_p(plain, keys)), "one key", called(green_p(plain, one)))
    rates = [called(green_p(plain, [key] * TEXTS)).value for key in range(40)]
    print(f"  false alarms of 40 keys: mean {np.mean(rates):.3f}, highest {max(rates):.2f}")


def main() -> None:
    """Print the tables."""
    for name in call(sys.argv[1:], ("tiny-llada",)).models:
        tell(loaded(name, masks=True, shuffles=True))


if __name__ == "__main__":
    main()
