"""The decision rules of the published samplers, written out for one prompt at a time, without padding, batch or cache.

They come from the authors' code and from notes on it, not from sinklens: loops over positions, stock classes of
transformers with an explicit mask, and Python numbers. What they share with sinklens is the order in which a row's
random numbers are drawn, so that the same tokens come out at temperatures above 0.

Where sinklens does not copy a defect of the published code (a proposed mask token that ends the run with an error or
never ends it), the rule here is the documented one: the position stays masked and is decided later, and a block ends
with its passes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Ids = list[int]
Settings = dict[str, Any]
Seen = Callable[[int, int], bool]


class Oracle(NamedTuple):
    """A stock model of transformers, and the tokens that mean something to a sampler."""

    hf: Any
    mask: int
    ends: tuple[int, ...]

    def logits(self, ids: Ids, seen: Seen = lambda query, key: True) -> list[list[float]]:
        """float32 logits at every position; a query attends to the keys that it has `seen`."""
        size = len(ids)
        allowed = torch.tensor([[seen(query, key) for key in range(size)] for query in range(size)])
        with torch.no_grad():
            found = self.hf(torch.tensor([ids]), attention_mask=allowed[None, None], use_cache=False).logits
        return found[0].float().tolist()

    def ended(self, ids: Ids, start: int) -> bool:
        """Whether an end token stands behind `start` with no mask before it."""
        for token in ids[start:]:
            if token == self.mask:
                return False
            if token in self.ends:
                return True
        return False

    def masks(self, ids: Ids, places: Sequence[int]) -> list[int]:
        return [place for place in places if ids[place] == self.mask]


# --- distributions ----------------------------------------------------------------------------------------------


PRECISION = [torch.float64]
"""The dtype of the published code's tensors, where its rounding is compared too; otherwise nothing is rounded."""


def softmax(logits: Sequence[float], dtype: torch.dtype | None = None) -> list[float]:
    if PRECISION[0] != torch.float64:
        return torch.tensor([logits], dtype=PRECISION[0]).softmax(-1, dtype)[0].tolist()
    best = max(logits)
    weights = [math.exp(value - best) for value in logits]
    return [weight / sum(weights) for weight in weights]


def keep_largest(logits: Sequence[float], top_k: int | None) -> list[float]:
    if top_k is None or top_k >= len(logits):
        return list(logits)
    least = sorted(logits, reverse=True)[top_k - 1]
    return [value if value >= least else -math.inf for value in logits]


def keep_nucleus(logits: Sequence[float], top_p: float | None) -> list[float]:
    """The likeliest tokens, up to and with the one whose cumulated probability is the first above `top_p`."""
    if top_p is None or top_p >= 1:
        return list(logits)
    if PRECISION[0] != torch.float64:
        ordered, order = torch.tensor([logits], dtype=PRECISION[0]).sort(descending=True)
        beyond = [False, *(ordered.softmax(-1).cumsum(-1) > top_p)[0].tolist()]
        lowered = {int(token) for token, far in zip(order[0], beyond, strict=False) if far}
        return [-math.inf if token in lowered else value for token, value in enumerate(logits)]
    probs, before, kept = softmax(logits), 0.0, [-math.inf] * len(logits)
    for token in sorted(range(len(logits)), key=lambda token: -logits[token]):
        if before <= top_p:
            kept[token] = logits[token]
        before += probs[token]
    return kept


def truncated(logits: Sequence[float], given: Settings, top_p_first: bool) -> list[float]:
    """At temperature 0 the logits are not divided."""
    scaled = (torch.tensor(logits, dtype=PRECISION[0]) / (given["temperature"] or 1.0)).tolist()
    if top_p_first:
        return keep_largest(keep_nucleus(scaled, given["top_p"]), given["top_k"])
    return keep_nucleus(keep_largest(scaled, given["top_k"]), given["top_p"])


def distribution(
    logits: Sequence[float], given: Settings, top_p_first: bool, dtype: torch.dtype | None = None
) -> list[float]:
    """What a token is drawn from; `dtype` is that of a softmax that does not keep the one of the logits."""
    return softmax(truncated(logits, given, top_p_first), dtype)


def invert(probs: Sequence[float], number: float) -> int:
    """The token at which the cumulated probability exceeds a random number."""
    total = 0.0
    for token, prob in enumerate(probs):
        total += prob
        if total > number:
            return token
    return max(token for token, prob in enumerate(probs) if prob > 0)


def best_token(probs: Sequence[float]) -> int:
    return max(range(len(probs)), key=lambda token: probs[token])


class Noise:
    """A row's random numbers, in the order in which a step draws them."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def double(self, *shape: int) -> list[Any]:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64).tolist()

    def single(self, count: int) -> list[float]:
        return torch.rand(count, generator=self.generator, dtype=torch.float32).tolist()


def drawn(rows: Sequence[Sequence[float]], given: Settings, noise: Noise) -> list[int]:
    """A token from each distribution; at temperature 0 the most likely one."""
    if not given["temperature"]:
        return [best_token(probs) for probs in rows]
    return [invert(probs, number) for probs, number in zip(rows, noise.double(len(rows)), strict=True)]


def gumbel(rows: Sequence[Sequence[float]], temperature: float, noise: Noise) -> list[int]:
    """argmax of exp(logits) / (−log u)^temperature."""
    if temperature == 0:
        return [best_token(logits) for logits in rows]
    numbers = noise.double(len(rows), len(rows[0])) if rows else []
    return [
        best_token([value - temperature * math.log(-math.log(u)) for value, u in zip(logits, us, strict=True)])
        for logits, us in zip(rows, numbers, strict=True)
    ]


def guided(oracle: Oracle, ids: Ids, blind: Ids, scale: float, seen: Seen) -> list[list[float]]:
    """un + (w + 1)(cond − un), where the unconditional canvas is `blind`."""
    cond = oracle.logits(ids, seen)
    if not scale:
        return cond
    without = oracle.logits(blind, seen)
    return [
        [u + (scale + 1) * (c - u) for c, u in zip(row, other, strict=True)]
        for row, other in zip(cond, without, strict=True)
    ]


# --- choices ----------------------------------------------------------------------------------------------------


class UndeterminedError(Exception):
    """A choice among scores so close that rounding decides it."""


def top(places: Sequence[int], scores: Sequence[float], count: int, ranked: Sequence[int] | None = None) -> list[int]:
    """The `count` places of highest score, the best one first.

    Args:
        ranked: what the published `torch.topk` ranks, places without a score last; None where no call is known.

    Raises:
        UndeterminedError: rounding could make another of the last place inside and the first one outside.
    """
    order = sorted(range(len(places)), key=lambda number: -scores[number])
    if 0 < count < len(order):
        distance = scores[order[count - 1]] - scores[order[count]]
        if distance == 0 and ranked is not None:
            given = dict(zip(places, scores, strict=True))
            full = torch.tensor([given.get(place, -math.inf) for place in ranked], dtype=torch.float64)
            return [ranked[number] for number in full.topk(count).indices.tolist()]
        if distance < 1e-12:
            raise UndeterminedError
    return [places[number] for number in order[:count]]


def leftmost_best(places: Sequence[int], scores: Sequence[float], count: int) -> list[int]:
    """The `count` places of highest score as `torch.argmax` or a stable sort finds them: equal ones from the left."""
    order = sorted(range(len(places)), key=lambda number: -scores[number])
    if 0 < count < len(order) and 0 < scores[order[count - 1]] - scores[order[count]] < 1e-12:
        raise UndeterminedError
    return [places[number] for number in order[:count]]


def above_or_top(
    places: Sequence[int], scores: Sequence[float], count: int, threshold: float, ranked: Sequence[int]
) -> list[int]:
    """All above the threshold if these are at least `count`, else the `count` best."""
    high = [place for place, score in zip(places, scores, strict=True) if score > threshold]
    return high if len(high) >= count else top(places, scores, count, ranked)


def shares(total: int, steps: int) -> list[int]:
    """`total` divided among the steps, the remainder to the first ones."""
    return [total // steps + (1 if step < total % steps else 0) for step in range(steps)]


def by_factor(places: Sequence[int], scores: Sequence[float], factor: float, ranked: Sequence[int]) -> list[int]:
    """Ranks before the first that misses 1 − f / (r + 1); the first always passes, the last if it alone fails."""
    falling, kept = sorted(scores, reverse=True), 1
    while kept < len(falling) and falling[kept] >= 1 - factor / (kept + 2):
        kept += 1
    return top(places, scores, len(places) if kept == len(places) - 1 else kept, ranked)


def shifted(logits: list[list[float]]) -> list[list[float]]:
    """Logits at i − 1 predict position i; position 0 keeps its own."""
    return [logits[0], *logits[:-1]]


def with_tokens(ids: Ids, places: Sequence[int], tokens: dict[int, int]) -> Ids:
    return [tokens[place] if place in places else token for place, token in enumerate(ids)]


# --- canvas-wide samplers ---------------------------------------------------------------------------------------


def llada(oracle: Oracle, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """ML-GSAI/LLaDA generate.py, with the parallel rules of NVlabs/Fast-dLLM."""
    start, size, blocks = len(prompt), given["block_length"], given["gen_length"] // given["block_length"]
    ids = prompt + [oracle.mask] * given["gen_length"]
    for end in range(start + size, len(ids) + 1, size):
        plan = shares(len(oracle.masks(ids, range(end - size, end))), given["steps"] // blocks)
        for count in plan:
            places = oracle.masks(ids, range(end))
            if not places:
                break
            blind = [oracle.mask] * start + ids[start:]
            logits = guided(oracle, ids, blind, given["cfg_scale"], lambda query, key: True)
            rows = [list(logits[place]) for place in places]
            if given["logits_eos_inf"]:
                rows = [without(row, oracle.ends) for row in rows]
            tokens = gumbel(rows, given["temperature"], noise)
            if given["remasking"] == "random":
                scores = noise.single(len(places))
            else:
                rows = [without(row, oracle.ends) for row in rows] if given["confidence_eos_eot_inf"] else rows
                scores = [softmax(row)[token] for row, token in zip(rows, tokens, strict=True)]
            if given["factor"] is not None:
                chosen = by_factor(places, scores, given["factor"], range(len(ids)))
            else:
                chosen = top(places, scores, count if given["by_quota"] else 1, range(len(ids)))
                if given["threshold"] is not None:
                    chosen += [p for p, score in zip(places, scores, strict=True) if score >= given["threshold"]]
            yield (ids := with_tokens(ids, chosen, dict(zip(places, tokens, strict=True))))


def without(logits: Sequence[float], tokens: Sequence[int]) -> list[float]:
    return [-math.inf if token in tokens else value for token, value in enumerate(logits)]


def dream_score(
    alg: str, probs: Sequence[float], token: int, inside: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
) -> float:
    row = torch.tensor([probs], dtype=dtype or PRECISION[0])
    if alg == "topk_margin":
        ordered = row.sort(descending=True).values
        return (ordered[:, 0] - ordered[:, 1]).item()
    if alg == "entropy":
        return (row * torch.log(inside(row))).sum(-1).item()
    return probs[token]


def times(steps: int, eps: float) -> Tensor:
    return torch.linspace(1, eps, steps + 1)


def due(masks: int, when: Tensor, step: int) -> int:
    """trunc(masks · (1 − s / t)) in float32, and all in the last step."""
    if step == len(when) - 2:
        return masks
    return int(torch.tensor(float(masks)) * (1 - when[step + 1] / when[step]))


def gumbel_top(
    places: Sequence[int], scores: Sequence[float], count: int, alg_temp: float, noise: Noise, ranked: Sequence[int]
) -> list[int]:
    """Positions drawn without replacement, with weights softmax(score / alg_temp); the best ones at 0."""
    if not alg_temp:
        return top(places, scores, count, ranked)
    noisy = [
        score / alg_temp - math.log(-math.log(u)) for score, u in zip(scores, noise.double(len(scores)), strict=True)
    ]
    return top(places, noisy, count)


def dream(oracle: Oracle, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """HKUNLP/Dream generation_utils.py, and Fast-dLLM's threshold without a cache."""
    ids, when, refused = prompt + [oracle.mask] * given["gen_length"], times(given["steps"], given["eps"]), 0
    for step in range(given["steps"]):
        places = oracle.masks(ids, range(len(ids)))
        if not places:
            return
        logits = shifted(oracle.logits(ids))
        rows = [distribution(logits[place], given, top_p_first=True) for place in places]
        tokens = drawn(rows, given, noise)
        if given["alg"] == "origin":
            share = 1.0 if step == given["steps"] - 1 else float(1 - when[step + 1] / when[step])
            chosen = [place for place, u in zip(places, noise.single(len(places)), strict=True) if u < share]
        else:
            scores = [
                dream_score(given["alg"], row, token, lambda probs: probs + 1e-10)
                for row, token in zip(rows, tokens, strict=True)
            ]
            if given["tokens_per_step"]:
                budget = min(given["tokens_per_step"] + refused, len(places))
                high = sum(score >= given["threshold"] for score in scores)
                chosen = top(places, scores, max(1, min(budget, high)), range(len(ids)))
                refused = budget - len(chosen) + sum(tokens[places.index(place)] == oracle.mask for place in chosen)
            else:
                count = due(len(places), when, step)
                chosen = gumbel_top(places, scores, count, given["alg_temp"], noise, range(len(ids)))
                if given["threshold"] is not None:
                    chosen += [p for p, score in zip(places, scores, strict=True) if score >= given["threshold"]]
        yield (ids := with_tokens(ids, chosen, dict(zip(places, tokens, strict=True))))


def dream_blocks(oracle: Oracle, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """NVlabs/Fast-dLLM generation_utils_block.py, with exact keys instead of its caches."""
    start, size = len(prompt), given["block_length"]
    ids = prompt + [oracle.mask] * given["gen_length"]
    per_block = given["steps"] // (given["gen_length"] // size)
    when = times(per_block, given["eps"])
    for first in range(start, len(ids), size):
        for step in range(per_block):
            places = oracle.masks(ids, range(first, first + size))
            if not places:
                break
            places = oracle.masks(ids, [first]) if step == 0 else places
            logits = shifted(oracle.logits(ids))
            rows = [distribution(logits[place], given, top_p_first=True) for place in places]
            tokens = drawn(rows, given, noise)
            scores = [
                dream_score(given["alg"], row, token, lambda probs: probs + 1e-10)
                for row, token in zip(rows, tokens, strict=True)
            ]
            if step == 0:
                chosen = places
            elif given["threshold"] is None:
                chosen = top(places, scores, due(len(places), when, step), range(len(ids)))
            else:
                high = [p for p, score in zip(places, scores, strict=True) if score >= given["threshold"]]
                chosen = top(places, scores, 1, range(len(ids))) + high
            yield (ids := with_tokens(ids, chosen, dict(zip(places, tokens, strict=True))))


def diffullama(oracle: Oracle, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """HKUNLP/DiffuLLaMA: model.py, and `generate_samples` of its trainer; what is decided is marked, not the mask."""
    start, steps = len(prompt), given["steps"]
    ids, answer = prompt + [oracle.mask] * given["gen_length"], list(range(start, start + given["gen_length"]))
    left_open = set(answer)
    for left in reversed(range(steps)):
        if not left_open:
            return
        places = answer if given["order"] == "confidence" else sorted(left_open)
        logits = shifted(oracle.logits(ids))
        scaled = [[value / given["temperature"] for value in logits[place]] for place in places]
        rows = [softmax(keep_nucleus(row, given["top_p"])) for row in scaled]
        numbers = noise.double(len(places), 2)
        tokens = [best_token(row) for row in rows]
        if not given["greedy"]:
            tokens = [invert(row, number) for row, (number, _) in zip(rows, numbers, strict=True)]
        if given["order"] == "random":
            chosen = [place for place, (_, u) in zip(places, numbers, strict=True) if u < 1 / (left + 1)]
        else:
            scores = [row[token] for row, token in zip(rows, tokens, strict=True)]
            cutoff = sorted(scores)[int(torch.tensor(float(len(answer))) * (left / steps))]
            if any(0 < abs(score - cutoff) < 1e-12 for score in scores):
                raise UndeterminedError
            chosen = [place for place, score in zip(places, scores, strict=True) if score >= cutoff]
        ids = with_tokens(ids, sorted(left_open & set(chosen)), dict(zip(places, tokens, strict=True)))
        left_open -= set(chosen)
        yield ids


def open_dcoder(oracle: Oracle, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """pengzhangzhi/Open-dLLM, `_mdm_sample`."""
    start, steps = len(prompt), given["steps"]
    ids, when = prompt + [oracle.mask] * given["gen_length"], times(given["steps"], given["eps"])
    for step in range(steps):
        masked = oracle.masks(ids, range(start, len(ids)))
        if not masked:
            return
        places = list(range(start, len(ids))) if given["alg"] == "p2" else masked
        logits = shifted(oracle.logits(ids))
        rows = [distribution(logits[place], given, top_p_first=True, dtype=torch.float32) for place in places]
        tokens = dict(zip(places, drawn(rows, given, noise), strict=True))
        precise = torch.promote_types(PRECISION[0], torch.float32)
        scores = [
            dream_score(given["alg"], row, token, lambda probs: probs.clamp_min(1e-10), precise)
            for row, token in zip(rows, tokens.values(), strict=True)
        ]
        if given["alg"] != "p2":
            scores = torch.tensor(scores, dtype=PRECISION[0]).tolist()
        if given["alg"] == "p2":
            count = int(torch.tensor(float(len(places))) * (1 - (step + 1) / steps))
            lowest = leftmost_best(places, [-score for score in scores], count)
            ids = with_tokens(ids, [place for place in masked if place not in lowest], tokens)
            ids = [oracle.mask if place in lowest else token for place, token in enumerate(ids)]
        else:
            count = due(len(places), when, step)
            chosen = gumbel_top(places, scores, count, given["alg_temp"], noise, range(len(ids)))
            ids = with_tokens(ids, chosen, tokens)
        yield ids


def rnd1(oracle: Oracle, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """RadicalNumerics/RND1 rnd/sampling.py."""
    closing = {"eos": [oracle.ends[0]], "none": []}[given["closing"]]
    ids, steps = prompt + [oracle.mask] * given["gen_length"] + closing, given["steps"]
    for left in range(steps - 1, -1, -1):
        places = oracle.masks(ids, range(len(ids)))
        if not places:
            return
        logits = shifted(oracle.logits(ids))
        kept = torch.tensor([truncated(logits[place], given, top_p_first=False) for place in places])
        logs = kept.to(PRECISION[0]).log_softmax(-1)
        rows = (logs if given["greedy"] else logs.exp()).tolist()
        tokens = drawn(rows, given | {"temperature": 0 if given["greedy"] else 1}, noise)
        entropy = (-(logs.exp() * logs).where(logs.exp() > 0, 0).sum(-1)).tolist()
        if left == 0:
            chosen = places
        elif given["eb_gamma"] is None:
            keep = int((torch.tensor([[given["gen_length"]]]) * (left / steps)).long())
            left_out = top(places, entropy, min(keep, len(places)), range(len(ids)))
            chosen = [place for place in places if place not in left_out]
        else:
            order = sorted(range(len(places)), key=lambda number: -logs[number, tokens[number]])
            ordered = torch.tensor([entropy[number] for number in order], dtype=PRECISION[0])
            within = ordered.cumsum(0) - ordered.cummax(0).values <= given["eb_gamma"]
            chosen = [places[number] for number in order[: int(within.sum())]]
        yield (ids := with_tokens(ids, chosen, dict(zip(places, tokens, strict=True))))


# --- block by block ---------------------------------------------------------------------------------------------


def blocks_of(size: int, lead: int = 0) -> Seen:
    """A query sees the keys of its own block and of earlier ones; `lead` columns of padding count."""
    return lambda query, key: (key + lead) // size <= (query + lead) // size


def sdar(oracle: Oracle, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """JetAstra/SDAR generate.py and its OpenCompass sampler; `entropy_bounded` of JetEngine."""
    size, start = given["block_length"], len(prompt)
    ids = prompt + [oracle.mask] * (-(-(start + given["gen_length"]) // size) * size - start)
    for first in range(start // size * size, len(ids), size):
        for count in shares(size, given["denoising_steps"]):
            places = oracle.masks(ids, range(max(first, start), first + size))
            if not places:
                break
            logits = oracle.logits(ids, blocks_of(size))
            rows = [distribution(logits[place], given, top_p_first=False) for place in places]
            tokens = drawn(rows, given, noise)
            of = [softmax(logits[place]) for place in places] if given["confidence_of"] == "model" else rows
            scores = [probs[token] for probs, token in zip(of, tokens, strict=True)]
            strategy = given["remasking_strategy"]
            if strategy == "sequential":
                chosen = places[:count]
            elif strategy == "low_confidence_static":
                chosen = top(places, scores, count, range(first, first + size))
            elif strategy == "low_confidence_dynamic":
                chosen = above_or_top(places, scores, count, given["threshold"], range(first, first + size))
            else:
                clamped = [[max(prob, 1e-12) for prob in row] for row in rows]
                entropy = [-sum(prob * math.log(prob) for prob in row) for row in clamped]
                total, kept = 0.0, 0
                for value in sorted(entropy):
                    total += value
                    kept += total < given["eb_threshold"]
                chosen = top(places, [-value for value in entropy], max(kept, 1))
            yield (ids := with_tokens(ids, chosen, dict(zip(places, tokens, strict=True))))
        if given["stop"] and any(token in oracle.ends for token in ids[start:]):
            return


def llada2(oracle: Oracle, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """inclusionAI's `generate` of LLaDA2.0, which truncates nothing at temperature 0."""
    size, start = given["block_length"], len(prompt)
    ids = prompt + [oracle.mask] * (-(-(start + given["gen_length"]) // size) * size - start)
    for first in range(start // size * size, len(ids), size):
        for count in shares(size, min(given["denoising_steps"], size, given["gen_length"] // given["minimal_topk"])):
            places = oracle.masks(ids, range(max(first, start), first + size))
            if not places:
                break
            rows = greedy_or_truncated(oracle.logits(ids, blocks_of(size)), places, given)
            tokens = drawn(rows, given, noise)
            scores = [probs[token] for probs, token in zip(rows, tokens, strict=True)]
            chosen = above_or_top(places, scores, count, given["threshold"], range(first, first + size))
            yield (ids := with_tokens(ids, chosen, dict(zip(places, tokens, strict=True))))
            now = any(ids[place] in oracle.ends for place in chosen)
            if given["eos_early_stop"] and now and oracle.ended(ids, start):
                return
        if given["stop"] and any(token in oracle.ends for token in ids[start:]):
            return


def greedy_or_truncated(logits: list[list[float]], places: Sequence[int], given: Settings) -> list[list[float]]:
    if not given["temperature"]:
        return [softmax(logits[place]) for place in places]
    return [distribution(logits[place], given, top_p_first=False) for place in places]


def llada21(oracle: Oracle, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """inclusionAI's `generate` of LLaDA2.1, which also replaces decided tokens of the current block."""
    size, start = given["block_length"], len(prompt)
    ids = prompt + [oracle.mask] * (-(-(start + given["gen_length"]) // size) * size - start)
    for first in range(start // size * size, len(ids), size):
        block, places = range(first, first + size), list(range(max(first, start), first + size))
        before, after = 0, 0
        while True:
            masked = oracle.masks(ids, places)
            before, after = before + bool(masked), after + (not masked)
            if after > given["max_post_steps"] or before > -(-size // given["num_to_transfer"]):
                break
            rows = greedy_or_truncated(oracle.logits(ids, blocks_of(size)), places, given)
            tokens = dict(zip(places, drawn(rows, given, noise), strict=True))
            scores = {place: row[tokens[place]] for place, row in zip(places, rows, strict=True)}
            own = [scores[place] for place in masked]
            chosen = above_or_top(masked, own, given["num_to_transfer"], given["threshold"], block)
            edits = [
                place
                for place in places
                if place not in masked and tokens[place] != ids[place] and scores[place] > given["editing_threshold"]
            ]
            yield (ids := with_tokens(ids, chosen + edits, tokens))
            if not masked and not edits:
                break
        if given["stop"] and any(token in oracle.ends for token in ids[start:]):
            return


def bd3lm_plan(masks: int, steps: int) -> list[int]:
    """dLLM's schedule of a linear α, in float32, without steps of no position."""
    plan, left = [], masks
    for number in range(steps, 0, -1):
        alphas = [1 - torch.tensor(time / steps, dtype=torch.float32) for time in (number - 1, number)]
        fraction = 1 - float((1 - alphas[0]) / (1 - alphas[1]))
        plan.append(min(round(left * fraction), left))
        left -= plan[-1]
    return [count for count in plan if count]


def of_gumbel(
    rows: list[list[float]], places: list[int], count: int, given: Settings, noise: Noise, ranked: Sequence[int]
) -> tuple[list[int], dict[int, int]]:
    """The positions that a step of dLLM's samplers decides, and its proposals."""
    tokens = gumbel(rows, given["temperature"], noise)
    if given["remasking"] == "random":
        scores = noise.single(len(places))
    else:
        scores = [softmax(row)[token] for row, token in zip(rows, tokens, strict=True)]
    return top(places, scores, count, ranked), dict(zip(places, tokens, strict=True))


def bd3lm(oracle: Oracle, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """ZHZisZZ/dllm, BD3LMSampler; `lead` is the padding before the prompt, which fills blocks."""
    size, start, lead = given["block_length"], len(prompt), given["lead"]
    blocks = -(-given["gen_length"] // size)
    ids = prompt + [oracle.mask] * given["gen_length"]
    for first in range(start, len(ids), size):
        inside = range(first, min(first + size, len(ids)))
        for count in bd3lm_plan(len(inside), -(-given["steps"] // blocks)):
            places = oracle.masks(ids, inside)
            if not places:
                break
            blind = [oracle.mask] * start + ids[start:]
            logits = guided(oracle, ids, blind, given["cfg_scale"], blocks_of(size, lead))
            logits = shifted(logits) if given["right_shift_logits"] else logits
            chosen, tokens = of_gumbel([logits[place] for place in places], places, count, given, noise, inside)
            yield (ids := with_tokens(ids, chosen, tokens))
        if given["stop"] and any(token in oracle.ends for token in ids[start:]):
            return


def bd3lm_card(oracle: Oracle, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """The code in the model card of dLLM's BD3LM: the prompt's keys are computed before its last block is filled."""
    size, start = given["block_length"], len(prompt)
    ids = prompt + [oracle.mask] * given["gen_length"]
    for first in range(start // size * size, len(ids), size):
        block = range(first, min(first + size, len(ids)))
        inside = range(max(first, start), block.stop)
        sealed = start if first <= start else 0

        def seen(query: int, key: int, sealed: int = sealed) -> bool:
            return key // size <= query // size and not (query < sealed <= key)

        plan = [count for count in shares(len(inside), given["denoising_steps"]) if count] if inside else []
        for count in plan:
            places = oracle.masks(ids, inside)
            if not places:
                break
            blind = [token if place in inside else oracle.mask for place, token in enumerate(ids)]
            logits = guided(oracle, ids, blind, given["cfg_scale"], seen)
            chosen, tokens = of_gumbel([logits[place] for place in places], places, count, given, noise, block)
            yield (ids := with_tokens(ids, chosen, tokens))
            if given["stop"] and any(ids[place] in oracle.ends for place in inside):
                return


def fast_dllm_v2(oracle: Oracle, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """Efficient-Large-Model/Fast_dLLM_v2, `generate` without the sub-block cache."""
    size, small, start = given["block_length"], given["small_block_size"], len(prompt)
    spare = -(start + given["gen_length"]) % size
    ids = prompt + [oracle.mask] * (given["gen_length"] + (spare if spare < size - 1 else 0))
    for first in range(start // size * size, len(ids), size):
        inside = range(max(first, start), min(first + size, len(ids)))
        for _ in inside:  # as many passes as positions: each decides one at least, unless it proposes the mask
            masked = oracle.masks(ids, inside)
            if not masked or (given["stop"] and oracle.ended(ids, start)):
                break
            logits = oracle.logits(ids, blocks_of(size))
            if masked[0] == first:  # the last position of the finished block decides, by argmax
                noise.double(1) if given["temperature"] else None
                yield (ids := with_tokens(ids, [first], {first: best_token(logits[first - 1])}))
                continue
            part = (masked[0] - first) // small
            places = [place for place in masked if (place - first) // small == part]
            rows = greedy_or_truncated(shifted(logits), places, given | {"top_k": None})
            tokens = drawn(rows, given, noise)
            scores = [probs[token] for probs, token in zip(rows, tokens, strict=True)]
            high = [place for place, score in zip(places, scores, strict=True) if score > given["threshold"]]
            yield (
                ids := with_tokens(ids, leftmost_best(places, scores, 1) + high, dict(zip(places, tokens, strict=True)))
            )
        if given["stop"] and any(token in oracle.ends for token in ids[start:]):
            return


def autoregressive(oracle: Oracle, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """transformers' `generate`: temperature, then top_k, then top_p; none of them without sampling."""
    ids = list(prompt)
    for _ in range(given["gen_length"]):
        logits = oracle.logits(ids, lambda query, key: key <= query)[-1]
        (token,) = drawn(greedy_or_truncated([logits], [0], given), given, noise)
        yield (ids := [*ids, token])
        if token in oracle.ends:
            return


def diffusion_gemma(
    logits: Sequence[Tensor], ends: Sequence[int], noise: Sequence[Noise], given: Settings
) -> Iterator[list[Ids]]:
    """transformers' DiffusionGemma: the answers that enter each step, and at last those that are left.

    Args:
        logits: of each step, raw, [batch, pos, vocab].
    """
    size, number, rows = given["canvas_length"], 0, range(len(noise))
    answers: list[Ids] = [[] for _ in rows]
    over = [False for _ in rows]
    for _ in range(given["gen_length"] // size):
        canvas = [random_tokens(noise[row], size, logits[0].shape[-1]) for row in rows]
        best, history, frozen = [list[int]() for _ in rows], [list[Ids]() for _ in rows], [False for _ in rows]
        for left in range(given["max_denoising_steps"], 0, -1):
            yield [answers[row] + canvas[row] for row in rows]
            heat = given["t_min"] + (given["t_max"] - given["t_min"]) * left / given["max_denoising_steps"]
            for row in [row for row in rows if not frozen[row]]:
                probs = (logits[number][row].double() / heat).softmax(-1)
                entropy = torch.special.entr(probs).sum(-1).tolist()
                accepted = within_bound(entropy, given["entropy_bound"])
                draws = [invert_surely(p, u) for p, u in zip(probs.tolist(), noise[row].double(size), strict=True)]
                fresh = random_tokens(noise[row], size, logits[0].shape[-1])
                canvas[row] = [draws[place] if place in accepted else fresh[place] for place in range(size)]
                best[row], mean = probs.argmax(-1).tolist(), sum(entropy) / size
                back = given["stability_threshold"]
                recent = history[row][-back:] if back else []
                history[row].append(best[row])
                surely(mean - given["confidence_threshold"])
                stable = len(recent) == back and all(earlier == best[row] for earlier in recent)
                frozen[row] = stable and mean < given["confidence_threshold"]
            number += 1
            if all(frozen):
                break
        for row in rows:
            answers[row] = answers[row] + padded(best[row], over[row], ends, given["pad_token_id"])
            over[row] = over[row] or any(token in ends for token in answers[row][-size:])
        if all(over):
            break
    yield answers


def surely(difference: float) -> None:
    """Refuse a comparison that float32 could decide otherwise."""
    if abs(difference) < 1e-5:
        raise UndeterminedError


def invert_surely(probs: Sequence[float], number: float) -> int:
    """`invert`, unless the cumulated probability nearly equals the number."""
    total = 0.0
    for prob in probs:
        total += prob
        surely(total - number)
    return invert(probs, number)


def random_tokens(noise: Noise, count: int, vocabulary: int) -> list[int]:
    return [int(number * vocabulary) for number in noise.double(count)]


def within_bound(entropy: Sequence[float], bound: float) -> list[int]:
    """Positions of lowest entropy, as long as the entropies before a position add up to at most the bound."""
    accepted, before = [], 0.0
    for place in sorted(range(len(entropy)), key=lambda place: entropy[place]):
        surely(before - bound)
        if before <= bound:
            accepted.append(place)
        before += entropy[place]
    return accepted


def padded(tokens: Ids, over: bool, ends: Sequence[int], pad: int) -> Ids:
    """Padding after the first end token, or everywhere in a row that ended in an earlier canvas."""
    found = [place for place, token in enumerate(tokens) if token in ends]
    keep = 0 if over else found[0] + 1 if found else len(tokens)
    return tokens[:keep] + [pad] * (len(tokens) - keep)
