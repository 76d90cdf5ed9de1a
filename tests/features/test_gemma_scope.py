"""Gemma Scope's layout: the formula of its JumpReLU, and files that hold something else."""

import numpy as np
import pytest
import torch

from sinklens.errors import CheckpointError
from sinklens.features import load_gemma_scope


def arrays(d_in=5, d_sae=9):
    drawn = np.random.default_rng(2)
    return {
        "W_enc": drawn.normal(size=(d_in, d_sae)), "b_enc": drawn.normal(size=d_sae),
        "W_dec": drawn.normal(size=(d_sae, d_in)), "b_dec": drawn.normal(size=d_in),
        "threshold": np.abs(drawn.normal(size=d_sae)),
    }  # fmt: skip


@pytest.mark.parametrize("whole_folder", [True, False])
def test_features_and_reconstruction_follow_the_formula(tmp_path, whole_folder):
    given = arrays()
    np.savez(tmp_path / "params.npz", **given)
    sae = load_gemma_scope(tmp_path if whole_folder else tmp_path / "params.npz", point="blocks.1.hook_resid_post")
    x = np.random.default_rng(1).normal(size=(40, 5))
    pre = x @ given["W_enc"] + given["b_enc"]  # b_dec is not subtracted
    features = np.where(pre > given["threshold"], np.maximum(pre, 0), 0)
    found = sae.encode(torch.tensor(x).float())
    np.testing.assert_allclose(found, features, atol=1e-5)
    np.testing.assert_allclose(sae.decode(found), features @ given["W_dec"] + given["b_dec"], atol=1e-5)
    assert 0 < (features > 0).mean() < 0.7
    assert sae.point == "blocks.1.hook_resid_post"


def test_a_transcoder_does_not_add_what_it_read(tmp_path):
    given, x = arrays(), torch.randn(10, 5)
    np.savez(tmp_path / "params.npz", **given)
    sae = load_gemma_scope(tmp_path)
    read = load_gemma_scope(tmp_path, "blocks.1.ln2.hook_normalized", point_out="blocks.1.hook_mlp_out")
    assert torch.equal(read.decode(read.encode(x), x), sae.decode(sae.encode(x)))
    assert (read.transcoder, read.point_out) == (True, "blocks.1.hook_mlp_out")


@pytest.mark.parametrize(("content", "match"), [
    (None, r"is no readable params\.npz"),
    (b"no archive", r"is no readable params\.npz"),
    ({"threshold": None, "W_skip": np.ones(1)}, "missing: threshold; not known: W_skip"),
    ({"b_enc": np.ones(5)}, r"needs b_enc \[9\]"),
])  # fmt: skip
def test_other_files_are_refused(tmp_path, unchecked, content, match):
    if isinstance(content, dict):
        given = {name: value for name, value in (arrays() | content).items() if value is not None}
        np.savez(tmp_path / "params.npz", **given)
    elif content is not None:
        (tmp_path / "params.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        load_gemma_scope(tmp_path)
