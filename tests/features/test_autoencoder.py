"""Encoding and decoding agree with loops over places and features."""

import pytest
import torch
from planted_saes import Perfect, random_sae

from sinklens.errors import SettingError
from sinklens.features import SAE, SparseAutoencoder

KINDS = [
    ("standard", {}), ("topk", {}), ("jumprelu", {}), ("topk", {"subtract_b_dec": False}), ("topk", {"rescale": True}),
]  # fmt: skip


def by_hand(sae, x):
    """Features and reconstruction of one activation, number by number."""
    bias = sae.b_dec if sae.subtract_b_dec else torch.zeros_like(sae.b_dec)
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
    parts = [features[j] / lengths[j] * sae.W_dec[j] for j in range(sae.d_sae)]
    return torch.tensor(features), sum(parts, sae.b_dec)


@pytest.mark.parametrize(("architecture", "more"), KINDS)
def test_features_and_reconstructions_equal_a_loop_over_features(architecture, more):
    sae, x = random_sae(architecture=architecture, **more), torch.randn(5, 24)
    features = sae.encode(x)
    assert 5 < int((features > 0).sum()) < features.numel()
    for place in range(5):
        expected, rebuilt = by_hand(sae, x[place])
        torch.testing.assert_close(features[place], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(sae.decode(features)[place], rebuilt, atol=1e-4, rtol=1e-4)


def test_any_object_with_both_methods_is_an_sae():
    assert isinstance(Perfect(), SAE)
    assert isinstance(random_sae(), SAE)
    assert not isinstance(torch.nn.Identity(), SAE)


@pytest.mark.usefixtures("unchecked")
def test_weights_that_do_not_fit_are_refused():
    sae = random_sae()
    with pytest.raises(
        SettingError, match=r"W_enc of shape \[24, 40\] needs .* W_dec \[40, 24\].*got \[40\], \[24, 40\]"
    ):
        SparseAutoencoder(sae.W_enc, sae.b_enc, sae.W_dec.T, sae.b_dec, k=3)
    with pytest.raises(SettingError, match="needs k between 1 and 40, the number of features; got 41"):
        SparseAutoencoder(sae.W_enc, sae.b_enc, sae.W_dec, sae.b_dec, k=41)
    with pytest.raises(SettingError, match=r"needs a threshold of shape \[40\]; got None"):
        SparseAutoencoder(sae.W_enc, sae.b_enc, sae.W_dec, sae.b_dec, "jumprelu")
    with pytest.raises(SettingError, match="architecture must be 'standard', 'topk' or 'jumprelu'; got 'gated'"):
        SparseAutoencoder(sae.W_enc, sae.b_enc, sae.W_dec, sae.b_dec, "gated")
