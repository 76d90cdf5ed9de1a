"""The statistics of studies: tables of estimates, matched comparisons, training seeds, power, and planned tests.

Every number with limits is an `Estimate` (sinklens/utils/estimates.py).
"""

__all__: list[str] = []
