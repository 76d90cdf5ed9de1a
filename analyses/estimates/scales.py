"""The scale on which a measure's deviations are symmetric: where its intervals are computed.

An interval of a share computed as estimate ± width can leave [0, 1]; that of a ratio can fall below 0. On the logit and
on the log scale it cannot, and a few values are closer to normally distributed. So intervals of few values (groups of
prompts, training seeds) are computed there and mapped back.

    LINEAR      x              any number
    LOG         log x          ratios and amounts, above 0
    SHARE       logit x        shares, 0 to 1
    DIFFERENCE  logit (1+x)/2  differences of two shares and correlations, −1 to 1; twice Fisher's z

Pitfall: a share of exactly 0 or 1 has no finite logit. `Scale.to` moves it inwards by half of a resolution that the
caller gives (one prompt, say).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit, logit


@dataclass(frozen=True)
class Scale:
    """A monotone map of a measure and its inverse.

    Attributes:
        name: for messages and tables.
        low, high: limits of the measure.
        forward, back: the map and its inverse.
    """

    name: str
    low: float
    high: float
    forward: Callable[[Any], Any]
    back: Callable[[Any], Any]

    def to(self, values: Any, resolution: float = 0.0) -> np.ndarray:
        """`values` on the scale, infinite at a limit of the measure and NaN outside of it.

        Args:
            resolution: smallest possible step of the measure, as a part of its range: values nearer to a limit than
                half of it are moved there, if both limits are finite.
        """
        values = np.asarray(values, dtype=np.float64)
        inwards = resolution / 2 * (self.high - self.low) if np.isfinite(self.high) and resolution else 0.0
        values = np.where(np.isnan(values), values, np.clip(values, self.low + inwards, self.high - inwards))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(self.forward(values))


LINEAR = Scale("linear", -np.inf, np.inf, lambda x: x, lambda y: y)
LOG = Scale("log", 0.0, np.inf, np.log, np.exp)
SHARE = Scale("logit", 0.0, 1.0, logit, expit)
DIFFERENCE = Scale("logit of (1 + x) / 2", -1.0, 1.0, lambda x: logit((1 + x) / 2), lambda y: 2 * expit(y) - 1)
