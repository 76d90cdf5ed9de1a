"""Likelihoods: how probable a model finds a given answer, with standard errors, under any intervention.

No sampler is involved, so a likelihood does not depend on the settings that change accuracies. Differences between
conditions are paired: all conditions share the masks of every answer.
"""

from sinklens.experiments.nll.draws import DrawRule
from sinklens.experiments.nll.estimate import LikelihoodRequest, likelihood, likelihoods
from sinklens.experiments.nll.pairs import PromptAnswer
from sinklens.experiments.nll.result import Difference, Likelihood, LossCurve, curve, difference

__all__ = [
    "Difference",
    "DrawRule",
    "Likelihood",
    "LikelihoodRequest",
    "LossCurve",
    "PromptAnswer",
    "curve",
    "difference",
    "likelihood",
    "likelihoods",
]
