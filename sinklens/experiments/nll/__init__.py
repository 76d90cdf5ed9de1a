"""Likelihoods: how probable a model finds a given answer, with standard errors, under any intervention.

No sampler is involved, so a likelihood does not depend on the settings that change accuracies. Differences between
conditions are paired: all conditions share the masks of every answer.
"""

__all__: list[str] = []  # what others use is exported by sinklens.experiments
