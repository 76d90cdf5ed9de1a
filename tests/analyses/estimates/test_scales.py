"""Scales of measures: inverses, limits and resolution."""

import numpy as np
import pytest

from sinklens.analyses.estimates.scales import DIFFERENCE, LINEAR, LOG, SHARE


@pytest.mark.parametrize(("scale", "values"), [
    (LINEAR, [-3.0, 0.0, 7.0]), (LOG, [0.1, 1.0, 9.0]), (SHARE, [0.01, 0.5, 0.9]), (DIFFERENCE, [-0.9, 0.0, 0.4]),
])  # fmt: skip
def test_a_scale_and_its_inverse_cancel_and_keep_order(scale, values):
    there = scale.to(values)
    np.testing.assert_allclose(scale.back(there), values, atol=1e-12)
    assert (np.diff(there) > 0).all()
