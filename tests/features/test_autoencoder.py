"""Encoding and decoding agree with loops over places, features and outputs."""

from dataclasses import replace

import pytest
import torch
from planted_saes import Perfect, random_sae

from sinklens.errors import SettingError
from sinklens.features.autoencoder import SAE

KINDS = [
    random_sae(architecture="standard"), random_sae(), random_sae(architecture="jumprelu"),
    random_sae(subtract_b_dec=False), random_sae(rescale=True),
]  # fmt: skip


def by_hand(sae, x):
    """Features and output of one activation, number by number."""
    bias = sae.b_dec if sae.subtract_b_dec else torch.zeros(sae.d_in)
    pre = [float((x - bias) @ sae.W_enc[:, j] + sae.b_enc[j]) for j in range(sae.d_sae)]
    lengths = [float(sae.W_dec[j].pow(2).sum().sqrt()) if sae.rescale else 1.0 for j in range(sae.d_sae)]
    pre = [value * length for value, length in zip(pre, lengths, strict=True)]
    best = sorted(range(sae.d_sae), key=lambda j: -pre[j])[: sae.k]
    fires = {
        "standard": lambda j: pre[j] > 0,
        "topk": lambda j: pre[j] > 0 and j in best,
        "jumprelu": lambda j: pre[j] > max(0.0, float(sae.threshold[j])),
    }[sae.architecture]
    features = [pre[j] if fires(j) else 0.0 for j in range(sae.d_sae)]
    return torch.tensor(features), sum([features[j] / lengths[j] * sae.W_dec[j] for j in range(sae.d_sae)], sae.b_dec)


@pytest.mark.parametrize("sae", KINDS, ids=lambda sae: sae.architecture)
def test_features_and_outputs_equal_a_loop_over_features(sae):
    x = torch.randn(5, 24)
    features = sae.encode(x)
    made = sae.decode(features)
    assert 5 < int((features > 0).sum()) < features.numel()
    for place in range(5):
        expected, rebuilt = by_hand(sae, x[place])
        torch.testing.assert_close(features[place], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(made[place], rebuilt, atol=1e-3, rtol=1e-4)


def test_any_object_with_both_methods_is_an_sae():
    assert isinstance(Perfect(), SAE)
    assert isinstance(random_sae(), SAE)
    assert not isinstance(torch.nn.Identity(), SAE)


PLAIN = random_sae()
REFUSED = [
    (lambda: replace(PLAIN, W_dec=PLAIN.W_dec.T),
     r"W_enc of shape \[24, 40\] needs .* W_dec \[40, 24\].*got \[40\], \[24, 40\]"),
    (lambda: replace(PLAIN, k=41), "needs k between 1 and 40, the number of features; got 41"),
    (lambda: replace(PLAIN, architecture="jumprelu"), r"needs a threshold of shape \[40\]; got None"),
    (lambda: replace(PLAIN, architecture="gated"), "must be 'standard', 'topk' or 'jumprelu'; got 'gated'"),
    (lambda: replace(PLAIN, architecture="standard", rescale=True), "rescale belongs to architecture 'topk'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "match"), REFUSED, ids=[match for _, match in REFUSED])
def test_weights_and_calls_that_do_not_fit_are_refused(unchecked, call, match):
    with pytest.raises(SettingError, match=match):
        call()
