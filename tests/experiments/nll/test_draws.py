"""Draws are those of the published scripts, weigh every token alike, and depend on seed, prompt and length alone."""

from collections import Counter

import pytest
import torch
from likelihood_oracle import LladaScript, dream_forward_process

from sinklens.errors import SettingError
from sinklens.experiments.nll.noise import DrawRule, by_count, by_rate, every_mask, generator_of

MASK = 99


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def script_masks(length, batch, seed):
    """Masks and shares that LLaDA's script draws after ``torch.manual_seed(seed)``."""
    torch.manual_seed(seed)
    seq = torch.arange(length + 2).repeat(batch, 1)
    noisy, shares = LladaScript(lambda ids: ids, MASK).forward_process(seq, torch.arange(length + 2) < 2)
    return (noisy == MASK)[:, 2:], shares[:, 0]


@pytest.mark.parametrize(("length", "batch"), [(1, 1), (5, 1), (8, 4), (5, 5), (6, 16), (40, 16), (7, 3)])
def test_masks_by_count_are_those_of_lladas_script(length, batch):
    for seed in range(20):
        masked, shares = by_count(length, batch, seeded(seed))
        theirs, their_shares = script_masks(length, batch, seed)
        if not ((torch.arange(batch) * length * 2 / batch % 2) == 1).any():
            assert torch.equal(masked, theirs)
            torch.testing.assert_close(shares.float(), their_shares)
        assert torch.equal(masked.sum(1), (shares * length).round().long())


@pytest.mark.parametrize("length", range(1, 12))
@pytest.mark.parametrize("batch", [1, 2, 3, 8, 16])
def test_every_number_of_masked_tokens_is_equally_likely(length, batch, monkeypatch):
    counts: list[Counter] = [Counter() for _ in range(batch)]
    for start in range(1, length + 1):  # every value of the one random number that decides them
        monkeypatch.setattr(torch, "randint", lambda *args, start=start, **options: torch.tensor(start))
        masked, _ = by_count(length, batch, seeded(0))
        for draw, row in enumerate(masked):
            counts[draw][int(row.sum())] += 1
    assert all(set(count) == set(range(1, length + 1)) for count in counts)


@pytest.mark.parametrize(("length", "batch"), [(1, 1), (7, 16), (40, 8)])
def test_masks_by_rate_are_those_of_dreams_script(length, batch):
    for seed in range(5):
        masked, rates = by_rate(length, batch, seeded(seed))
        theirs, p_mask = dream_forward_process(torch.zeros(batch, length), seed)
        assert torch.equal(masked, theirs)
        torch.testing.assert_close(rates.float(), p_mask[:, 0])


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_all_masks_together_count_every_token_once(length):
    masked, _, weights = every_mask(length)
    assert len(masked.unique(dim=0)) == 2**length - 1
    torch.testing.assert_close((weights[:, None] * masked).sum(0), torch.ones(length).double())


def test_draws_depend_on_seed_prompt_length_and_block_and_on_nothing_else():
    rule = DrawRule(mc_num=32, draws_per_start=16)
    masks = rule.masks([1, 2, 3], 9)[0]
    assert torch.equal(masks, DrawRule(mc_num=32, draws_per_start=16).masks((1, 2, 3), 9)[0])
    assert torch.equal(masks[:16], DrawRule(mc_num=16, draws_per_start=16).masks([1, 2, 3], 9)[0]), (
        "more draws add to them"
    )
    others = DrawRule(32, 16, seed=1).masks([1, 2, 3], 9), rule.masks([1, 2, 4], 9), rule.masks([1, 2, 3], 9, block=1)
    assert not any(torch.equal(masks, other[0]) for other in others)
    assert generator_of(0, [1], 9, 0, 0).initial_seed() != generator_of(0, [1], 9, 0, 1).initial_seed()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mc_num": 0}, r"mc_num must be an integer of at least 1; got 0"),
        ({"draws_per_start": True}, r"draws_per_start must be an integer of at least 1; got True"),
        ({"mc_num": 10, "draws_per_start": 16}, r"mc_num 10 is not a multiple of .* 16.*pass draws_per_start=5"),
        ({"mc_num": 100, "draws_per_start": 16}, r"mc_num 100 is not a multiple of .* 16.*pass draws_per_start=10"),
        ({"masking": "half"}, r"masking must be one of count, rate; got 'half'"),
        ({"seed": -1}, r"seed must be an integer"),
    ],
)
def test_invalid_rules_are_refused(given, message, unchecked):
    with pytest.raises(SettingError, match=message):
        DrawRule(**given)
