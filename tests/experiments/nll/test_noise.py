"""Bounds under noise schedules: equal to the published losses, unbiased, and tight where the prediction is perfect."""

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch
from building import random_dit

import sinklens
from sinklens.errors import SettingError
from sinklens.experiments import likelihood, likelihood_difference
from sinklens.experiments.nll.estimate import likelihoods
from sinklens.experiments.nll.noise import DrawRule, noise_of
from sinklens.experiments.nll.result import PromptAnswer
from sinklens.interventions import MaskSinks

V = 5
MADE = {
    "mdlm": {"family": "mdlm", "time_conditioning": False},
    "mdlm-timed": {"family": "mdlm"},
    "bd3lm-owt": {"family": "bd3lm-owt", "time_conditioning": False, "block_length": 2},
    "bd3lm-owt-timed": {"family": "bd3lm-owt", "block_length": 2},
    "sedd": {"family": "sedd"},
    "sedd-unscaled": {"family": "sedd", "scale_by_sigma": False},
    "duo": {"family": "duo"},
    "gidd": {"family": "gidd"},
    "gidd-masks": {"family": "gidd", "p_uniform": 0.0},
}
NAMES = tuple(MADE)
MASKS = NAMES[:6]


@pytest.fixture(scope="module")
def model_of():
    return cache(lambda name: random_dit(**MADE[name], vocab_size=V))


# --- the published formulas, token by token ----------------------------------------------------------------------


def alpha_of(name, t):
    """Share of clean tokens at time t, and what the network reads."""
    if name.startswith("gidd"):
        c = 2 * p_uniform(name) / (1 - p_uniform(name)) * math.sqrt(t * (1 - t))
        return (1 - t) / (1 + c), t
    kept = 1 - t if name.startswith("bd3lm") else 1 - 0.999 * t
    return kept, min(-math.log(max(kept, 1e-9)), 6.907755)


def p_uniform(name):
    return max(math.exp(-20), MADE[name].get("p_uniform", 0.2))


def chances(name, x, t):
    """q(z | x) at time t, for every z."""
    alpha, _ = alpha_of(name, t)
    if name == "duo":
        return [alpha * (z == x) + (1 - alpha) / V for z in range(V)]
    if name.startswith("gidd"):
        total = (1 - t) / alpha
        each = (total - 1) / total / (V - 1)
        return [t / total if z == V - 1 else alpha * (z == x) + each for z in range(V)]
    return [alpha * (z == x) + (1 - alpha) * (z == V - 1) for z in range(V)]


def published(name, logits, x, z, t):
    """Loss of one token as the authors' training code writes it, per unit of time."""
    _, level = alpha_of(name, t)
    values = logits.double().tolist()
    if name.startswith(("mdlm", "bd3lm")):  # diffusion.py of kuleshov-group/mdlm and bd3lms
        kept = [value for token, value in enumerate(values) if token != V - 1]
        log_p = values[x] - math.log(sum(map(math.exp, kept)))
        rate = 1 / t if name.startswith("bd3lm") else 0.999 / (1 - 0.999 * t) / math.expm1(level)
        return -log_p * rate if z == V - 1 else 0.0
    if name.startswith("sedd"):  # graph_lib.py's score_entropy, times dsigma
        scale = 0.0 if name == "sedd-unscaled" else math.log(math.expm1(level)) + math.log(V - 1)
        score, ratio = [value - scale for value in values], 1 / math.expm1(level)
        entropy = sum(math.exp(s) for s in score[:-1]) - ratio * score[x] + ratio * (math.log(ratio) - 1)
        return 0.999 / (1 - 0.999 * t) * entropy if z == V - 1 else 0.0
    p = np.exp(values - np.logaddexp.reduce(values))
    return published_duo(p, x, z, t) if name == "duo" else published_gidd(name, values, x, z, t)


def published_duo(p, x, z, t):
    """``nll_per_token`` of DUO_BASE in s-sahoo/duo's algo.py."""
    alpha, dalpha = 1 - 0.999 * t, -0.999
    x_bar_theta = V * alpha * p + 1 - alpha
    same = float(x == z)
    xbar_xt = (1 - alpha) + V * alpha * same
    term1 = V * (1 / xbar_xt - 1 / x_bar_theta[z])
    const = (1 - alpha) / (V * alpha + 1 - alpha)
    offset = ((V - 1) * const * same - (1 / const) * (1 - same)) * math.log(const)
    term2 = -(same * const + 1 - same) * (np.log(x_bar_theta).sum() - V * math.log(x_bar_theta[z]))
    term2 -= V * alpha / (1 - alpha) * (math.log(x_bar_theta[x]) - math.log(x_bar_theta[z])) * (1 - same)
    return dalpha / (V * alpha) * (term1 - term2 - offset)


def published_gidd(name, values, x, z, t):
    """``GiddLoss`` of dvruette/gidd's loss.py, with its weights written out."""
    p = np.exp(np.array([*values[:-1], -np.inf]) - np.logaddexp.reduce(values[:-1]))
    q_t = np.array(chances(name, x, t))
    p_t = sum(p[token] * np.array(chances(name, token, t)) for token in range(V - 1))
    c = math.sqrt(t * (1 - t)) * 2 * p_uniform(name) / (1 - p_uniform(name))
    c_prime, n = 0.5 * (1 - 2 * t) / (t * (1 - t)) * c, V - 1
    on_x = (c + (1 - t) * c_prime) / n / ((1 - t) * (1 - t + c / n))
    weight = 1 / ((1 - t) * t) if z == V - 1 else on_x if z == x else (c + (1 - t) * c_prime) / ((1 - t) * c)
    kl = sum(q * math.log(q / other) for q, other in zip(q_t, p_t, strict=True) if q > 0)
    ratio = math.log(q_t[z] / p_t[z])
    return weight * (kl + math.exp(ratio) - ratio - 1)


def interval(name):
    return (1e-4, 1 - 1e-4) if name.startswith("gidd") else (1e-3, 1.0)


def raw_logits(model, ids, level):
    with torch.no_grad():
        return model.tree.hf(torch.tensor([ids]), time=torch.tensor([level])).logits[0]


def drawn_by_hand(name, model, prompt, answer, rule):
    """The estimate from the same draws, one pass per draw over the text alone."""
    noise, total = noise_of(model), 0.0
    block = MADE[name].get("block_length")
    ends = [len(answer)] if block is None else [*range(block - len(prompt) % block, len(answer), block), len(answer)]
    for number, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
        draws = noise.draw(rule, tuple(prompt), torch.tensor(answer[start:stop]), number)
        for tokens, t in zip(draws.tokens.tolist(), draws.times.tolist(), strict=True):
            logits = raw_logits(model, [*prompt, *answer[:start], *tokens], alpha_of(name, t)[1])[-len(tokens) :]
            for row, x, z in zip(logits, answer[start:stop], tokens, strict=True):
                total += published(name, row, x, z, t)
    return -total / rule.mc_num


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("prompt", "answer"), [([], [1, 3, 0, 2]), ([2, 2, 1], [0, 3, 1, 1, 2])])
def test_estimates_equal_the_published_losses_of_the_same_draws(model_of, name, prompt, answer):
    model, rule = model_of(name), DrawRule(12, 4, seed=2)
    found = likelihood(model, prompt, answer, mc_num=12, draws_per_start=4, seed=2)
    assert found.value == pytest.approx(drawn_by_hand(name, model, prompt, answer, rule), rel=2e-4)
    assert found.positions.sum() == pytest.approx(found.value)
    assert found.kind == "estimate"
    assert found.standard_error > 0


# --- expectation ------------------------------------------------------------------------------------------------


def integral(loss, name, answer, nodes, span):
    """Mean over time, by Gauss-Legendre in a variable that is dense near both ends, and over every noisy answer."""
    least, most = span
    points, parts = np.polynomial.legendre.leggauss(nodes)
    turns = (points + 1) / 2 * math.pi
    times, weights = least + (most - least) * (1 - np.cos(turns)) / 2, parts * math.pi / 4 * np.sin(turns)
    total = 0.0
    for t, weight in zip(times.tolist(), weights.tolist(), strict=True):
        q = [chances(name, x, t) for x in answer]
        for noisy in itertools.product(range(V), repeat=len(answer)):
            chance = math.prod(row[z] for row, z in zip(q, noisy, strict=True))
            if chance > 0:
                total += weight * chance * sum(loss(noisy, t))
    return -total


def expected(name, model, prompt, answer, nodes):
    def loss(noisy, t):
        logits = raw_logits(model, [*prompt, *noisy], alpha_of(name, t)[1])[len(prompt) :]
        return [published(name, row, x, z, t) for row, x, z in zip(logits, answer, noisy, strict=True)]

    return integral(loss, name, answer, nodes, interval(name))


@pytest.mark.extended
@pytest.mark.parametrize("name", ["mdlm-timed", "bd3lm-owt-timed", "sedd", "duo", "gidd"])
def test_estimates_scatter_around_the_integral_over_time_and_noise(model_of, name):
    """Two tokens after a prompt of two, which is one block of BD3-LM."""
    model, prompt, answer = model_of(name), [2, 1], [3, 0]
    wanted = expected(name, model, prompt, answer, 40)
    found = [likelihood(model, prompt, answer, mc_num=8192, draws_per_start=256, seed=seed) for seed in range(8)]
    values, errors = np.array([one.value for one in found]), np.array([one.standard_error for one in found])
    of_mean = math.sqrt((errors**2).mean() / len(found))
    assert abs(values.mean() - wanted) < 4 * of_mean
    assert of_mean < 0.04 * abs(wanted), "too few draws to show a bias"
    assert 0.4 < values.std(ddof=1) / np.sqrt((errors**2).mean()) < 2


PAIRS_OF_TOKENS = [pair for pair in itertools.product(range(V), repeat=2) if V - 1 not in pair]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["mdlm", "sedd", "duo", "gidd", "gidd-masks"])
def test_the_bound_is_the_log_likelihood_if_the_prediction_is_perfect(model_of, name):
    """A known distribution of two dependent tokens; each is predicted by its posterior given the other noisy token."""
    noise = noise_of(model_of(name))
    table = np.random.default_rng(4).dirichlet(np.full(len(PAIRS_OF_TOKENS), 0.7)) * 0.9 + 0.1 / len(PAIRS_OF_TOKENS)

    def loss_of(answer):
        def loss(noisy, t):
            joint = np.array([
                p * math.prod(chances(name, x, t)[z] for x, z in zip(pair, noisy, strict=True))
                for p, pair in zip(table, PAIRS_OF_TOKENS, strict=True)
            ])  # fmt: skip
            logits = torch.full((2, V), -1e4, dtype=torch.float64)
            for place, token in itertools.product(range(2), range(V - 1)):
                there = [pair[place] == token for pair in PAIRS_OF_TOKENS]
                own = chances(name, token, t)[noisy[place]]  # noise of the token itself is no part of its prediction
                logits[place, token] = math.log(max(joint[there].sum() / max(own, 1e-300), 1e-300))
            logits -= logits.logsumexp(dim=-1, keepdim=True)
            if name == "sedd":  # exp(logits) / (V - 1) is what is compared with the probabilities
                logits += math.log(V - 1)
            times, clean, z = torch.full((2,), t, dtype=torch.float64), torch.tensor(answer), torch.tensor(noisy)
            counted = (z == V - 1) if name in ("mdlm", "sedd") else torch.ones(2, dtype=torch.bool)
            return (noise.losses(logits, clean, z, times) * noise.weight(times))[counted].tolist()

        return loss

    for answer in ((0, 2), (3, 3)):
        wanted = math.log(table[PAIRS_OF_TOKENS.index(answer)])
        span = (1e-9, 1 - 1e-9) if name.startswith("gidd") else interval(name)
        assert integral(loss_of(answer), name, answer, 60, span) == pytest.approx(wanted, rel=4e-3)


# --- surfaces ---------------------------------------------------------------------------------------------------

PAIRS = [
    PromptAnswer(prompt, answer)
    for prompt, answer in (((2, 1, 3), (0, 3)), ((1,), (1, 2, 3)), ((2, 1, 3), (2, 1)), ((), (3, 0)), ((0, 0), (2,)))
]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", [*NAMES, "llada", "dream", "sdar", "bd3lm-qwen3"])
def test_a_result_does_not_depend_on_its_batch(model_of, family_model, name):
    model, rule = (model_of if name in MADE else family_model)(name), DrawRule(mc_num=8, draws_per_start=4)
    together = likelihoods(model, PAIRS, rule)
    for rows in (1, 5):
        for one, same in zip(together, likelihoods(model, PAIRS, rule, batch_size=rows), strict=True):
            np.testing.assert_allclose(one.losses, same.losses, rtol=1e-3, atol=1e-4)
    alone = likelihood(model, list(PAIRS[1].prompt), list(PAIRS[1].answer), mc_num=8, draws_per_start=4)
    assert alone.value == pytest.approx(together[1].value, rel=1e-4)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", NAMES)
def test_interventions_act_in_the_pass_at_its_noise_level(model_of, name):
    model, seen = model_of(name), []
    plain, again = (likelihood(model, [2, 1], [3, 0, 1], mc_num=8, draws_per_start=4) for _ in range(2))
    assert plain.value == again.value
    hidden = likelihood(model, [2, 1], [3, 0, 1], mc_num=8, draws_per_start=4, hooks=MaskSinks(top_k=1, same_step=True))
    assert hidden.value != plain.value
    assert likelihood_difference(plain, hidden).n == 1
    if model.config.time_conditioning:
        keep = ("hook_time", lambda value, hook: seen.extend(value.flatten().tolist()))
        likelihood(model, [2, 1], [3, 0], mc_num=8, draws_per_start=4, hooks=[keep])
        times = noise_of(model).draw(DrawRule(8, 4), (2, 1), torch.tensor([3, 0]), 0).times.tolist()
        np.testing.assert_allclose(sorted(set(seen)), sorted({alpha_of(name, t)[1] for t in times}), rtol=1e-4)


def test_what_is_not_published_or_has_no_step_is_refused(model_of):
    duo, draws = model_of("duo"), {"mc_num": 8, "draws_per_start": 4}
    run = sinklens.generate(duo, [[2, 1]], gen_length=2, steps=4)
    source, other = MaskSinks(top_k=1, source=run, same_step=True), likelihood(duo, [2], [3, 0], seed=1, **draws)
    for call, match in [
        (lambda: likelihood(model_of("mdlm"), [1], [2, 3], exact=True), r"masks of models without a noise schedule"),
        (lambda: likelihood(model_of("gidd"), [1], [2, 3], cfg_scale=1.0), r"without a noise schedule.*for gidd"),
        (lambda: likelihood(model_of("mdlm"), [1], [2, 3], cfg_scale=1.0), r"is for models without a noise schedule"),
        (lambda: likelihood(duo, [2, 1], [3, 0], hooks=source), r"previous step or of another run"),
        (lambda: likelihood_difference(likelihood(duo, [2], [3, 0], **draws), other), r"answer 0 has other mask draws"),
    ]:  # fmt: skip
        with pytest.raises(SettingError, match=match):
            call()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("folder", ["duo", "mdlm", "bd3lm-owt", "sedd", "gidd"])
def test_published_checkpoints_have_a_likelihood(conformance, folder):
    model = sinklens.load(conformance / folder, family="sedd" if folder == "sedd" else None)
    found = model.likelihood([4, 1, 6], [[3, 5, 7, 2, 9], [1, 2]], mc_num=32)
    assert all(math.isfinite(one.value) and one.standard_error < abs(one.value) for one in found)
