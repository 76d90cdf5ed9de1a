"""A random error has the length of the SAE's at every place, and a direction of its own."""

import pytest
import torch
from planted_saes import Perfect, random_sae

from sinklens.features import RandomError


def test_the_error_is_as_long_as_the_sae_s_at_every_place():
    sae, x = random_sae(16), torch.randn(5, 16)
    made = RandomError(sae)
    new = made.decode(made.encode(x))
    for place in range(5):
        wanted = float((x[place] - sae.decode(sae.encode(x[place : place + 1]))[0]).pow(2).sum()) ** 0.5
        assert float((new[place] - x[place]).pow(2).sum()) ** 0.5 == pytest.approx(wanted, rel=1e-4)


def test_directions_are_random_and_repeat_with_the_seed():
    sae, x = random_sae(400), torch.randn(30, 400)
    first, again, other = (RandomError(sae, seed).encode(x) - x for seed in (0, 0, 1))
    torch.testing.assert_close(first, again)
    unit = torch.nn.functional.normalize(first, dim=-1)
    own = torch.nn.functional.normalize(sae.decode(sae.encode(x)) - x, dim=-1)
    assert (unit * torch.nn.functional.normalize(other, dim=-1)).sum(dim=-1).abs().max() < 0.3
    assert (unit * own).sum(dim=-1).abs().max() < 0.3
    assert (unit @ unit.T).fill_diagonal_(0).abs().max() < 0.3


def test_a_perfect_sae_leaves_no_error():
    x = torch.randn(4, 8)
    torch.testing.assert_close(RandomError(Perfect()).encode(x), x)
