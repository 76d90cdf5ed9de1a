"""MDLM's and Duo's losses: the published formulas, the bounds of discrete time, and what a batch draws."""

from dataclasses import replace

import pytest
import torch

from training import loop
from training.noise_losses import NoisyBatch, draw_noise, masked_bound, noise_loss, uniform_bound

SLOPE = -0.999  # of α(t) = 1 − 0.999 t


@pytest.fixture(scope="module", params=["tiny-mdlm", "tiny-duo"])
def toy(request, noisy_toy):
    return noisy_toy(request.param)[:2]


def uniform_rows(alpha, size, x):
    """q(z | x) at the share alpha of clean tokens."""
    return alpha * torch.nn.functional.one_hot(torch.tensor(x), size).double() + (1 - alpha) / size


@pytest.mark.parametrize("t", [0.001, 0.2, 0.7, 1.0])
def test_duos_loss_is_the_published_sum_over_all_tokens(t):
    size, generator = 5, torch.Generator().manual_seed(0)
    logits, clean = torch.randn(3, 4, size, generator=generator), torch.randint(size, (3, 4), generator=generator)
    noisy = torch.randint(size, (3, 4), generator=generator)
    found = uniform_bound(logits, clean, noisy, torch.full((3, 1), t))
    alpha = 1 + SLOPE * t
    for row in range(3):
        for place in range(4):
            x, z = int(clean[row, place]), int(noisy[row, place])
            true = size * uniform_rows(alpha, size, x)
            p = logits[row, place].double().softmax(dim=-1)
            model = size * alpha * p + 1 - alpha
            bracket = size / true[z] - size / model[z]
            for y in range(size):
                bracket -= true[y] / true[z] * torch.log(model[z] * true[y] / (model[y] * true[z]))
            wanted = SLOPE / (size * alpha) * bracket
            assert found[row, place].item() == pytest.approx(float(wanted), rel=2e-3, abs=1e-4)


def test_the_bounds_contain_the_likelihood_of_a_model_that_knows_only_frequencies():
    """A prediction that ignores its canvas has the exact likelihood −log p(x); the bounds' integrals reach it."""
    logits, x = torch.tensor([0.4, -1.0, 0.2, 0.9, -60.0]), 1
    exact = -float(logits.log_softmax(dim=-1)[x])
    times = (torch.arange(20_000) + 0.5) / 20_000
    t, clean = times[:, None], torch.full((20_000, 1), x)
    share = 1 - 0.999 * t
    masked = NoisyBatch(t, torch.ones(20_000, 1, dtype=torch.bool), clean)
    rows = logits.expand(20_000, 1, 5)
    assert float((masked_bound(rows, clean, masked, 4) * (1 - share)).mean()) == pytest.approx(0.999 * exact, rel=1e-4)
    found = sum(
        (share * (x == z) + (1 - share) / 5) * uniform_bound(rows, clean, torch.full_like(clean, z), t)
        for z in range(5)
    )
    assert exact - 0.02 < float(found.mean())


def test_mdlms_loss_is_the_weighted_cross_entropy_of_masked_tokens_without_the_mask():
    generator = torch.Generator().manual_seed(3)
    logits, clean = torch.randn(4, 6, 9, generator=generator), torch.randint(8, (4, 6), generator=generator)
    t, replaced = torch.rand(4, 1, generator=generator), torch.rand(4, 6, generator=generator) < 0.5
    found = masked_bound(logits, clean, NoisyBatch(t, replaced, clean), mask_id=8)
    for row in range(4):
        for place in range(6):
            chances = logits[row, place, :8].double().softmax(dim=-1)
            sigma = -torch.log(1 + SLOPE * t[row, 0].double())
            rate = -SLOPE / (1 + SLOPE * t[row, 0].double())
            wanted = -rate / torch.expm1(sigma) * chances[clean[row, place]].log() * replaced[row, place]
            assert found[row, place].item() == pytest.approx(float(wanted), rel=1e-4)


def test_a_batch_loses_what_its_network_predicts_for_the_noisy_answer_after_the_clean_prompt(toy):
    recipe, model = toy
    duo, size = recipe.objective == "duo", model.config.vocab_size
    ids = torch.randint(3, 600, (8, 44), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = noise_loss(model, recipe, ids, 20, size - 1, step=7).item()
        drawn = draw_noise((8, 24), size, torch.Generator().manual_seed(recipe.seed * 1_000_003 + 7 + 500_000_003))
        canvas = ids.clone()
        for row, place in drawn.replaced.nonzero().tolist():
            canvas[row, 20 + place] = drawn.token[row, place] if duo else size - 1
        logits = model(input_ids=canvas, time=-torch.log(1 + SLOPE * drawn.t[:, 0])).logits[:, 20:]
        lost = (
            uniform_bound(logits, ids[:, 20:], canvas[:, 20:], drawn.t)
            if duo
            else masked_bound(logits, ids[:, 20:], drawn, size - 1)
        )
        assert found == pytest.approx(lost.mean().item(), rel=1e-4)
        untimed = model(input_ids=canvas, time=0.0).logits[:, 20:]
    assert torch.equal(untimed, logits) is not duo


def test_both_models_get_the_same_initial_weights_prompts_times_and_noisy_places(small):
    mdlm, duo = small("tiny-mdlm"), small("tiny-duo")
    assert replace(duo, name=mdlm.name, objective=mdlm.objective) == mdlm
    weights = [loop.build_model(recipe, loop.make_tokenizer(recipe)).state_dict() for recipe in (mdlm, duo)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_times_are_evenly_spaced_and_noise_has_the_probability_of_its_time():
    noise = draw_noise((400, 60), 50, torch.Generator().manual_seed(0))
    assert (noise.t[:, 0].diff() - 0.999 / 400).abs().max() < 1e-6
    assert (noise.replaced.float().mean(dim=1, keepdim=True) - 0.999 * noise.t).abs().mean() < 0.06
    assert torch.equal(noise.token.unique(), torch.arange(50))
