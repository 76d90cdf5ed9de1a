"""The decision rules of published samplers with a noise level, written out for one prompt at a time.

They come from the authors' code and from notes on it, as those of published_rules.py: loops over positions, and Python
numbers. A network is asked for logits at one noise level, without padding.

Where sinklens does not copy a defect of the published code, the rule here is the documented one: BD3-LM's step at time
0 decides what is left, and one of GIDD's tokens can be drawn whatever `min_p` is.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from published_rules import (
    Ids,
    Noise,
    Settings,
    UndeterminedError,
    best_token,
    invert_surely,
    keep_nucleus,
    random_tokens,
    softmax,
    surely,
    with_tokens,
)  # fmt: skip

import sinklens

Row = list[float]


class Network(NamedTuple):
    """A network that reads a noise level.

    Attributes:
        model: the network; its passes are compared with the authors' in tests/conformance/test_dit_passes.py.
        mask: the mask token; -1 for none.
    """

    model: sinklens.Model
    mask: int

    def logits(self, ids: Ids, level: float) -> list[Row]:
        with torch.no_grad():
            return list(self.model(torch.tensor([ids]), time=float(level))[0].float().tolist())

    def masks(self, ids: Ids, places: Sequence[int] | None = None) -> list[int]:
        return [place for place in (range(len(ids)) if places is None else places) if ids[place] == self.mask]

    def clean(self, logits: Row) -> Row:
        """Probabilities of the tokens; the mask has probability 0."""
        return softmax([-math.inf if token == self.mask else value for token, value in enumerate(logits)])


def race(weights: Row, uniform: Row) -> int:
    """argmax of w / (1e-10 − log(u + 1e-10)).

    Raises:
        UndeterminedError: two tokens arrive almost together, which float32 may order otherwise.
    """
    ends = [weight / (1e-10 - math.log(number + 1e-10)) for weight, number in zip(weights, uniform, strict=True)]
    first, second = sorted(ends, reverse=True)[:2]
    surely((first - second) / (first or 1.0))
    return ends.index(first)


def raced(rows: list[Row], noise: Noise, dtype: torch.dtype) -> list[int]:
    """The token that wins with the weights of each row."""
    uniform = torch.rand(len(rows), len(rows[0]), generator=noise.generator, dtype=dtype).tolist()
    return [race(*pair) for pair in zip(rows, uniform, strict=True)]


def sigma(time: float) -> float:
    """The log-linear noise level."""
    return -math.log(1 - (1 - 1e-3) * time)


def falling(steps: int, eps: float = 1e-5) -> Row:
    return list(torch.linspace(1, eps, steps + 1).tolist())


# --- MDLM and SEDD ----------------------------------------------------------------------------------------------


def transitions(score: Row, mask: int, decrease: float) -> Row:
    """SEDD's staggered score times its transition, where the canvas holds the mask."""
    extra = (1 - math.exp(decrease)) * sum(score)
    staggered = [value * math.exp(decrease) + (extra if token == mask else 0) for token, value in enumerate(score)]
    enters = 1 - math.exp(-decrease)
    return [value * (enters + (math.exp(-decrease) if token == mask else 0)) for token, value in enumerate(staggered)]


def mdlm_weights(net: Network, logits: Row, given: Settings, time: float, until: float) -> Row:
    probs = net.clean(logits)
    if given["predictor"] == "analytic":
        score = [value / math.expm1(sigma(time)) for value in probs]
        score[net.mask] = 1.0
        return transitions(score, net.mask, sigma(time) - sigma(until))
    moves = [1 - math.exp(-sigma(one)) if given["predictor"] == "ddpm" else one for one in (time, until)]
    weights = [value * (moves[0] - moves[1]) for value in probs]
    weights[net.mask] = moves[1]
    return weights


def sedd_weights(net: Network, logits: Row, given: Settings, time: float, until: float) -> Row:
    shift = math.log(math.expm1(sigma(time))) + math.log(len(logits) - 1)
    score = [math.exp(value - shift) for value in logits]
    score[net.mask] = 1.0
    if given["predictor"] == "analytic" or until == 0:
        return transitions(score, net.mask, sigma(time) - sigma(until))
    rate = (time - until) * 0.999 / (1 - 0.999 * time)
    weights = [rate * value for value in score]
    weights[net.mask] = 0.0
    weights[net.mask] = 1 - sum(weights)
    return weights


def falling_time(net: Network, prompt: Ids, noise: Noise, given: Settings, weights_of: Any) -> Iterator[Ids]:
    """What the samplers of kuleshov-group/mdlm and of SEDD share."""
    ids, steps = prompt + [net.mask] * given["gen_length"], given["steps"]
    times, length = falling(steps), (1 - 1e-5) / steps
    for step in range(steps + given["noise_removal"]):
        places, time, closing = net.masks(ids), times[step], step == steps
        if not places:
            return
        logits = net.logits(ids, sigma(time))
        rows = [weights_of(net, logits[place], given, time, 0.0 if closing else time - length) for place in places]
        if closing:
            rows = [[0.0 if token == net.mask else value for token, value in enumerate(row)] for row in rows]
        if closing and given["predictor"] in ("ddpm", "ddpm_cache"):
            drawn = [best_token(row) for row in rows]
        else:
            drawn = raced(rows, noise, torch.float32)
        yield (ids := with_tokens(ids, places, dict(zip(places, drawn, strict=True))))


def mdlm(net: Network, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """kuleshov-group/mdlm, `_sample`."""
    return falling_time(net, prompt, noise, given, mdlm_weights)


def sedd(net: Network, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """louaaron/Score-Entropy-Discrete-Diffusion, sampling.py."""
    return falling_time(net, prompt, noise, given, sedd_weights)


def mdlm_windows(net: Network, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """kuleshov-group/mdlm, `sample_subs_guidance`: the network sees the window, which moves by a stride."""
    ids, steps = prompt + [net.mask] * given["gen_length"], given["window_steps"]
    for first in range(0, len(ids), given["stride_length"]):
        stop = min(first + given["window_length"], len(ids))
        for step in range(steps):
            places, time, until = net.masks(ids, range(first, stop)), 1 - step / steps, 1 - (step + 1) / steps
            if not places:
                break
            logits = net.logits(ids[first:stop], sigma(time))
            weights = [[value * (time - until) for value in net.clean(logits[place - first])] for place in places]
            for row in weights:
                row[net.mask] = until
            drawn = raced(weights, noise, torch.float32)
            yield (ids := with_tokens(ids, places, dict(zip(places, drawn, strict=True))))


# --- BD3-LM -----------------------------------------------------------------------------------------------------


def bd3lm_owt(net: Network, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """kuleshov-group/bd3lms, `_semi_ar_sampler`."""
    ids, size, steps = prompt + [net.mask] * given["gen_length"], given["block_length"], given["num_steps"]
    plan = torch.linspace(1, 0, steps).tolist()
    for start in range(0, len(ids), size):
        stop, time, rows = min(start + size, len(ids)), 1.0, list[Row]()
        for step in range(steps):
            places = net.masks(ids, range(start, stop))
            if not places:
                break
            if given["first_hitting"]:
                time *= noise.double(1)[0] ** (1 / len(places))
            else:
                time = plan[step]
            if not rows:  # a prediction is used until the block changes
                level = min(-math.log1p(-time) if time < 1 else math.inf, -math.log1p(-0.999))
                logits = net.logits(ids[:stop], level)
                rows = [below(net.clean(values), given["nucleus_p"]) for values in logits]
            stays = 0.0
            if not given["first_hitting"] and time > 0:
                stays = (time - 1 / steps) / time
            weights = [[value * (1 - stays) for value in rows[place]] for place in places]
            for row in weights:
                row[net.mask] = stays
            drawn = raced(weights, noise, torch.float64)
            if given["first_hitting"]:
                number = int(noise.double(1)[0] * len(places))
                places, drawn = places[number : number + 1], drawn[number : number + 1]
            before = ids
            ids = with_tokens(ids, places, dict(zip(places, drawn, strict=True)))
            rows = rows if ids == before else []
            yield ids


def below(probs: Row, total: float) -> Row:
    """The likeliest tokens with at most this probability in all, at least one, renormalized."""
    kept, before = [0.0] * len(probs), 0.0
    for rank, token in enumerate(sorted(range(len(probs)), key=lambda token: -probs[token])):
        before += probs[token]
        if abs(before - total) < 1e-5 and total < 1:
            raise UndeterminedError
        if rank == 0 or before <= total or total >= 1:
            kept[token] = probs[token]
    return [value / sum(kept) for value in kept]


# --- Duo and ReMDM ----------------------------------------------------------------------------------------------


def alpha(time: float) -> float:
    return 1 - (1 - 1e-3) * time


def kappas(mode: str, times: Row) -> Row:
    """The weight of the posterior at the times of one part."""
    if mode in ("pure-posterior", "pure-pc"):
        return [float(mode == "pure-posterior")] * len(times)
    kind, share = mode.rsplit("-", 1)[0], float(mode.rsplit("-", 1)[1])
    if kind == "constant":
        return [share] * len(times)
    found = []
    for time, later in pairwise(times):
        cap = min(share, (1 - alpha(later)) / alpha(time))
        value = {"max-capped": cap, "max-rescale": cap * share, "constant-remdm": share}[kind]
        found.append(min(1.0, max(0.0, 1 - value / (1 - alpha(later)))))
    return [*found, 1.0][: len(times)]


def psi_times(given: Settings) -> tuple[Row, list[int]]:
    """All times, and how many are high and middle."""
    count = given["steps"] + 1
    parts = [round(given["high_frac"] * count), round(given["middle_frac"] * count)]
    if given["time_profile"] == "linear":
        return falling(given["steps"], given["eps"]), parts
    text = given["time_profile"].removeprefix("linear-constant-linear-")
    level = 1 - float(text.removesuffix("-inv")) if text.endswith("-inv") else float(text)
    first, last = torch.linspace(1, level, parts[0]), torch.linspace(level, given["eps"], count - sum(parts))
    return [*first.tolist(), *torch.full((parts[1],), level).tolist(), *last.tolist()], parts


def psi(net: Network, ids: Ids, noise: Noise, given: Settings, start: int) -> Iterator[Ids]:
    """s-sahoo/duo: every answer position is drawn in every update."""
    times, (high, middle) = psi_times(given)
    kappa = kappas(given["high_mode"], times[:high]) + kappas(given["middle_mode"], times[high : high + middle])
    kappa += kappas(given["low_mode"], times[high + middle :])
    updates = [(alpha(t), alpha(t - (t - s)), k, False) for t, s, k in zip(times, times[1:], kappa, strict=False)]
    if given["final_step"] != "none":
        updates.append((alpha(times[-1]), 1.0, 1.0, given["final_step"] == "greedy"))
    for now, until, share, greedy in updates:
        logits, tokens = net.logits(ids, -math.log(now)), ids[start:]
        clean = [clean_of(net, row, token) for row, token in zip(logits[start:], tokens, strict=True)]
        if greedy:
            ids = ids[:start] + [best_token(row) for row in clean]
        else:
            rows = [nucleus(row, given["top_p"]) for row in clean]
            mixed = [mixture(net, row, token, now, until, share) for row, token in zip(rows, tokens, strict=True)]
            ids = ids[:start] + raced(mixed, noise, torch.float64)
        yield ids


def clean_of(net: Network, logits: Row, token: int) -> Row:
    """Probabilities of the clean token; a decided token of masked diffusion predicts itself."""
    if net.mask < 0 or token == net.mask:
        return net.clean(logits)
    return [float(place == token) for place in range(len(logits))]


def nucleus(probs: Row, top_p: float | None) -> Row:
    if top_p is None or top_p >= 1:
        return probs
    total = 0.0
    for prob in sorted(probs, reverse=True):
        total += prob
        surely(total - top_p)
    logs = [math.log(prob) if prob else -math.inf for prob in probs]
    return softmax(keep_nucleus(logs, top_p))


def mixture(net: Network, probs: Row, token: int, now: float, until: float, share: float) -> Row:
    """κ · posterior + (1 − κ) · noised posterior at time 0."""
    direct, finished = posterior(net, probs, token, now, until), posterior(net, probs, token, now, 1.0)
    noised = [until * value + (1 - until) / len(probs) * (net.mask < 0) for value in finished]
    if net.mask >= 0:
        noised[net.mask] = 1 - until
    return [share * one + (1 - share) * other for one, other in zip(direct, noised, strict=True)]


def posterior(net: Network, probs: Row, token: int, now: float, until: float) -> Row:
    if net.mask >= 0:  # of masked diffusion
        if token != net.mask:
            return probs
        weights = [(until - now) / (1 - now) * value for value in probs]
        weights[net.mask] = (1 - until) / (1 - now)
        return weights
    size, ratio = len(probs), now / until
    found = [(until - now) * value + (1 - ratio) * (1 - until) / size for value in probs]
    found[token] += now * size * probs[token] + ratio - now
    return [value / (now * size * probs[token] + 1 - now) for value in found]


def duo(net: Network, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """Duo's samplers, from random tokens."""
    return psi(net, prompt + started(net, noise, given), noise, given, len(prompt))


def remdm(net: Network, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """The same samplers for MDLM, from masks."""
    return psi(net, prompt + [net.mask] * given["gen_length"], noise, given, len(prompt))


def started(net: Network, noise: Noise, given: Settings) -> Ids:
    drawn = random_tokens(noise, given["gen_length"], net.model.cfg.d_vocab)
    return list(given.get("start_canvas") or drawn)


# --- GIDD -------------------------------------------------------------------------------------------------------


def mixed(net: Network, time: float) -> tuple[float, Row]:
    """α, and the weight that noise adds to each token."""
    size, share = net.model.cfg.d_vocab, max(math.exp(-20), net.model.config.p_uniform)
    spread = math.sqrt(time * (1 - time)) * math.exp(max(math.log(2) + math.log(share) - math.log(1 - share), -20))
    noise = [spread / (1 + spread) / (size - 1)] * size
    noise[net.mask] = time / (1 + spread)
    return (1 - time) / (1 + spread), noise


def gidd(net: Network, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """dvruette/gidd, the sampler of its pipeline."""
    ids, start, steps = prompt + [net.mask] * given["gen_length"], len(prompt), given["steps"]
    times = [1e-4 + (1 - 2e-4) * share for share in torch.linspace(0, 1, steps + 1).tolist()]
    for step in reversed(range(steps)):
        (now, noisy), (until, cleaner) = mixed(net, times[step]), mixed(net, times[max(0, step - 1)])
        logits, rows = net.logits(ids, times[step])[start:], list[Row]()
        for values, token in zip(logits, ids[start:], strict=True):
            probs, ratio = net.clean(values), now / until
            here = noisy[token] - ratio * cleaner[token]
            weights = [
                (ratio * (place == token) + here)
                * (until * prob + cleaner[place])
                / (now * probs[token] + noisy[token])
                for place, prob in enumerate(probs)
            ]
            rows.append(at_least(weights, given["min_p"]))
        ids = ids[:start] + [invert_surely(*pair) for pair in zip(rows, noise.single(len(rows)), strict=True)]
        yield ids


def at_least(weights: Row, least: float) -> Row:
    if any(abs(value - least) < 1e-6 for value in weights if least):
        raise UndeterminedError
    kept = [value if value >= min(least, max(weights)) else 0.0 for value in weights]
    return [value / sum(kept) for value in kept]


def gidd_correction(net: Network, prompt: Ids, noise: Noise, given: Settings) -> Iterator[Ids]:
    """dvruette/gidd, `self_correction` of one text."""
    ids, start, most, waited = prompt + started(net, noise, given), len(prompt), -1, 0
    for _ in range(given["steps"]):
        logits = net.logits(ids, given["t0"])[start:]
        rows = [net.clean([value / given["temperature"] for value in row]) for row in logits]
        drawn = [invert_surely(*pair) for pair in zip(rows, noise.single(len(rows)), strict=True)]
        differing = [place for place, token in enumerate(drawn) if token != ids[start + place]]
        proposal = ids
        if differing:
            scores = sorted((rows[place][drawn[place]] for place in differing), reverse=True)
            if len(scores) > 1 and scores[0] - scores[1] < 1e-6:
                raise UndeterminedError
            best = max(differing, key=lambda place: rows[place][drawn[place]])
            proposal = [*ids[: start + best], drawn[best], *ids[start + best + 1 :]]
        if given["early_stopping"]:
            likeliest = [best_token(net.clean(row)) for row in logits]
            agreement = sum(one == other for one, other in zip(proposal[start:], likeliest, strict=True))
            waited = 0 if agreement > most else waited + 1
            most = max(most, agreement)
            if waited > given["early_stopping_patience"]:
                yield ids
                return
        ids = proposal
        yield ids
        if given["early_stopping"] and not differing:
            return
