"""Means over prompts with 95 % intervals that resample the prompts' templates, for the scripts in this folder.

Shipped word problems come from seven templates, so prompts of one template are not independent. The interval is that of
`sinklens.analyses.strata`: a t interval over templates, with the standard deviation from resampled templates.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sinklens.analyses.strata import stratified
from sinklens.tasks.word_problems import Problem


def mean(values: Any, problems: Sequence[Problem]) -> str:
    """The mean of `values` [prompt] with its interval, as text; NaN prompts are left out."""
    x = np.asarray(values, dtype=float)
    known = ~np.isnan(x)
    templates = np.unique([problem.kind for problem in problems], return_inverse=True)[1]
    parts = [np.where(known, x, 0.0)[:, None], known.astype(float)[:, None]]
    found = stratified(lambda *sums: sums, np.divide, parts, group=templates, within=False).found
    return f"{float(found.estimate):.3g} [{float(found.low):.3g}, {float(found.high):.3g}]"
