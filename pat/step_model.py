"""Step-time model: fitted to measured steps, monotone in batch and context, with an interval."""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

OUTLIER_MADS = 3.5
"""Distance from the median, in median absolute deviations scaled to a normal law, beyond which a sample is dropped."""
NORMAL_MAD = 1.4826
COVERAGE = 0.9
"""Share of hold-out errors that an interval covers."""


def kept(samples: np.ndarray) -> np.ndarray:
    """[n] bool: which of the repeated measurements of one point are no outliers, above or below."""
    centre = np.median(samples)
    spread = NORMAL_MAD * np.median(np.abs(samples - centre))
    return np.abs(samples - centre) <= max(OUTLIER_MADS * spread, 0.02 * centre)


def ramps(knots: np.ndarray, at: np.ndarray) -> np.ndarray:
    """[N, K] basis of piecewise linear functions with ``knots`` [K]: 1, then one ramp from 0 to 1 between each two;
    the last goes on beyond. Sums with coefficients >= 0 do not fall."""
    at = np.asarray(at, dtype=float)
    rise = (at[:, None] - knots[None, :-1]) / np.diff(knots)[None, :]
    top = np.r_[np.ones(max(0, len(knots) - 2)), np.inf][: len(knots) - 1]
    return np.hstack([np.ones((len(at), 1)), np.clip(rise, 0.0, top)])


def monotone_fit(batch: np.ndarray, context_tokens: np.ndarray, seconds: np.ndarray, knots: np.ndarray, far: float):
    """[K, 2] step seconds at each batch of ``knots`` and contexts 0 and ``far``: the surface nearest to the points [N],
    in relative squares, that is linear in the context and falls neither with batch nor with context.

    seconds = sum over k of ramp_k(batch) (a_k + b_k context / far) with a, b >= 0, by non-negative least squares.
    """
    along = ramps(knots, batch)
    columns = np.hstack([along, along * (np.asarray(context_tokens, dtype=float) / far)[:, None]])
    coefficients, _ = nnls(columns / seconds[:, None], np.ones(len(seconds)))
    at_zero, slope = np.split(coefficients, 2)
    return np.stack([np.cumsum(at_zero), np.cumsum(at_zero + slope)], axis=1)


def predicted_s(knots: np.ndarray, values: np.ndarray, far: float, batch, context_tokens) -> np.ndarray:
    """[N] seconds of a fit at points; linear beyond its knots."""
    along = ramps(knots, batch)
    steps = np.diff(np.vstack([np.zeros(2), values]), axis=0)
    return along @ steps[:, 0] + (along @ (steps[:, 1] - steps[:, 0])) * np.asarray(context_tokens, dtype=float) / far


def hold_out_errors(batch: np.ndarray, context_tokens: np.ndarray, seconds: np.ndarray, far: float) -> np.ndarray:
    """[N] predicted / measured - 1 of every point, from a fit that saw no point of that batch; NaN for the least and
    the greatest batch, which nothing encloses."""
    errors = np.full(len(seconds), np.nan)
    levels = np.unique(batch)
    for level in levels[1:-1]:
        out = batch == level
        knots = levels[levels != level]
        values = monotone_fit(batch[~out], context_tokens[~out], seconds[~out], knots, far)
        errors[out] = predicted_s(knots, values, far, batch[out], context_tokens[out]) / seconds[out] - 1.0
    return errors


def half_interval(errors: np.ndarray) -> float:
    """Half of the interval around a prediction, as a share of it: the COVERAGE quantile of hold-out errors; infinite
    where there is none."""
    known = np.abs(errors[~np.isnan(errors)])
    return float(np.quantile(known, COVERAGE)) if known.size else float("inf")
