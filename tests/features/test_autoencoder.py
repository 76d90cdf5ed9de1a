"""Encoding and decoding agree with loops over places and features."""

from dataclasses import replace

import pytest
import torch
from planted_saes import Perfect, random_sae, random_transcoder

from sinklens.errors import SettingError
from sinklens.features import SparseAutoencoder
from sinklens.features.autoencoder import SAE

KINDS = [
    ("standard", {}), ("topk", {}), ("jumprelu", {}), ("topk", {"subtract_b_dec": False}), ("topk", {"rescale": True}),
]  # fmt: skip


def by_hand(sae, x):
    """Features and reconstruction of one activation, number by number."""
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
    with pytest.raises(SettingError, match=r"Pass transcoder=True if it writes another activation than it reads\."):
        SparseAutoencoder(sae.W_enc, sae.b_enc, sae.W_dec[:, :5], sae.b_dec[:5], "standard")


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("architecture", ["standard", "topk", "jumprelu"])
def test_a_transcoder_equals_a_loop_over_features_and_outputs(architecture, skip):
    sae, x = random_transcoder(d_out=9, architecture=architecture, skip=skip), torch.randn(5, 24)
    features = sae.encode(x)
    made = sae.decode(features, x)
    assert (sae.d_in, sae.d_sae, sae.d_out) == (24, 40, 9)
    for place in range(5):
        expected, _ = by_hand(sae, x[place])
        torch.testing.assert_close(features[place], expected, atol=1e-4, rtol=1e-4)
        for output in range(9):
            value = float(sae.b_dec[output]) + sum(float(expected[j] * sae.W_dec[j, output]) for j in range(40))
            value += sum(float(sae.W_skip[output, i] * x[place, i]) for i in range(24)) if skip else 0.0
            assert float(made[place, output]) == pytest.approx(value, abs=1e-3)


@pytest.mark.usefixtures("unchecked")
def test_transcoders_and_autoencoders_are_not_mistaken_for_each_other():
    sae, transcoder, x = random_sae(), random_transcoder(), torch.randn(3, 24)
    with pytest.raises(SettingError, match="a transcoder writes to another point than it reads: pass to="):
        transcoder.decode(transcoder.encode(x))
    with pytest.raises(SettingError, match="an autoencoder writes where it reads: leave out to="):
        sae.decode(sae.encode(x), x)
    with pytest.raises(SettingError, match="point_out and W_skip belong to transcoders"):
        replace(sae, point_out="blocks.0.hook_mlp_out")
    with pytest.raises(SettingError, match="a transcoder does not subtract b_dec"):
        replace(transcoder, subtract_b_dec=True)
    with pytest.raises(SettingError, match=r"W_skip must have the shape \[24, 24\]; got \[24, 3\]"):
        replace(transcoder, W_skip=torch.zeros(24, 3))


@pytest.mark.parametrize("architecture", ["standard", "topk", "jumprelu"])
def test_folding_the_norms_changes_neither_features_nor_reconstructions(architecture):
    sae, x = random_sae(architecture=architecture, rescale=True), torch.randn(50, 24)
    folded = sae.folded()
    assert not folded.rescale
    torch.testing.assert_close(folded.W_dec.norm(dim=-1), torch.ones(40))
    torch.testing.assert_close(folded.encode(x), sae.encode(x), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(folded.decode(folded.encode(x)), sae.decode(sae.encode(x)), atol=1e-4, rtol=1e-4)
