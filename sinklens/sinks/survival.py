"""How long sinks last, although many still exist when the observation ends: the Kaplan–Meier estimate.

A *life* (`motion.lifetimes`) is *censored* if its true length is unknown: it lasts until the row's last step, or was
there at the first recorded step of a track that begins later than its run. The mean length of all lives is too small,
and so is that of the lives that end, since long lives are censored more often.

Of the n_a lives that are *at risk* at age a, d_a *end* there, after exactly a steps. A life of a steps is at risk at
the ages 1 to a; if it lasts until the last step, only to a − 1, because it is unknown whether it ends there. The
survival function, the share of lives longer than a, is estimated as

    S(a) = Π_{b ≤ a} (1 − d_b / n_b)

(Kaplan and Meier, JASA 53, 1958). Its restricted mean, E[min(length, τ)] = Σ_{a = 0}^{τ − 1} S(a), is the mean number
of steps that a sink lasts within the first τ; the median is the smallest age with S(a) ≤ 1/2.

Caveat: the estimate assumes that lives are not censored because of their length. Lives of one run depend on each other,
so Greenwood's interval is too narrow; over several prompts, resample prompts (`life_table` has a row for each).
"""

import numpy as np
import xarray as xr
from jaxtyping import Float

from sinklens.errors import TrackError
from sinklens.sinks.detectors import Detector
from sinklens.sinks.motion import existing, lifetimes
from sinklens.sinks.track import SinkTrack
from sinklens.utils.estimates import Estimate, Z


def life_table(track: SinkTrack, detector: Detector | None = None, ages: int | None = None) -> xr.Dataset:
    """Lives of a track's sinks by age.

    ``ended`` and ``at_risk`` [batch, age], for ages 1 to `ages`; and the number of lives, ``lives`` [batch].

    Args:
        detector: definition of a sink; by default as in ``track.detect``.
        ages: largest age, by default the number of recorded steps; not smaller than that.

    Raises:
        TrackError: `ages` is smaller than the number of recorded steps.
    """
    ages = track.steps if ages is None else ages
    if ages < track.steps:
        raise TrackError(f"ages is {ages}, but lives can last {track.steps} steps; give at least that.")
    lives = lifetimes(track.detect(detector), existing(track))
    batch, first = track.data["batch"].to_numpy(), int(track.data["step"].to_numpy()[0])
    began_before = (lives["start"].to_numpy() == first) & (first > 0)
    to_the_end, row = lives["censored"].to_numpy(), np.searchsorted(batch, lives["batch"].to_numpy())
    length, known = lives["length"].to_numpy().astype(int), ~(to_the_end | began_before)
    counts = np.zeros((2, len(batch), ages + 1))
    np.add.at(counts[0], (row[known], length[known]), 1)
    np.add.at(counts[1], (row, length - (to_the_end & ~began_before)), 1)
    at_risk = counts[1][:, ::-1].cumsum(axis=1)[:, ::-1]
    return xr.Dataset(
        {
            "ended": (("batch", "age"), counts[0][:, 1:]),
            "at_risk": (("batch", "age"), at_risk[:, 1:]),
            "lives": ("batch", at_risk[:, 0]),
        },
        {"batch": batch, "age": np.arange(1, ages + 1)},
    )


def survival(
    ended: Float[np.ndarray, "*rest age"], at_risk: Float[np.ndarray, "*rest age"]
) -> Float[np.ndarray, "*rest age"]:
    """S(a) for the ages a = 1, 2, …; where no life is at risk any more, the value of the age before."""
    dying = np.divide(ended, at_risk, out=np.zeros(np.shape(at_risk)), where=np.asarray(at_risk) > 0)
    return np.cumprod(1 - dying, axis=-1)


def restricted_mean(
    ended: Float[np.ndarray, "*rest age"], at_risk: Float[np.ndarray, "*rest age"]
) -> Float[np.ndarray, "*rest"]:
    """E[min(length, τ)] with τ the number of ages; NaN if no life is at risk."""
    longer = survival(ended, at_risk)[..., :-1].sum(axis=-1)
    return np.where(np.asarray(at_risk)[..., 0] > 0, 1 + longer, np.nan)


def median_lifetime(
    ended: Float[np.ndarray, "*rest age"], at_risk: Float[np.ndarray, "*rest age"]
) -> Float[np.ndarray, "*rest"]:
    """The smallest age with S ≤ 1/2; NaN if S stays above it."""
    below = survival(ended, at_risk) <= 0.5 + 1e-12
    return np.where(below.any(axis=-1), 1.0 + below.argmax(axis=-1), np.nan)


def lifetime(track: SinkTrack, detector: Detector | None = None) -> Estimate:
    """The restricted mean of all lives of a track, rows, layers and heads pooled, with its 95 % limits.

    Greenwood: Var(mean) = Σ_{a < τ} (Σ_{b = a}^{τ − 1} S(b))² d_a / (n_a (n_a − d_a)), τ the number of recorded steps.

    Args:
        detector: definition of a sink; by default as in ``track.detect``.
    """
    table = life_table(track, detector).sum("batch")
    ended, at_risk = table["ended"].to_numpy(), table["at_risk"].to_numpy()
    mean, later = float(restricted_mean(ended, at_risk)), survival(ended, at_risk)[:-1][::-1].cumsum()[::-1]
    left = at_risk[:-1] * (at_risk[:-1] - ended[:-1])
    parts = np.divide(later**2 * ended[:-1], left, out=np.zeros_like(left), where=left > 0)
    half = Z * float(np.sqrt(parts.sum()))
    return Estimate(mean, max(1.0, mean - half), min(len(ended), mean + half), int(table["lives"]))
