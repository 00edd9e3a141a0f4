"""Step-time model: fitted to measured steps, with an interval. It never falls with the context, and with the batch only
where measurements prove it: matrix products of 4 rows can take less time than those of 3."""

from __future__ import annotations

import numpy as np
from scipy.optimize import lsq_linear
from scipy.stats import t

OUTLIER_MADS = 3.5
"""Distance from the median, in median absolute deviations scaled to a normal law, beyond which a sample is dropped."""
NORMAL_MAD = 1.4826
COVERAGE = 0.9
"""Share of hold-out errors that an interval covers."""
PROOF = 0.999
"""Confidence that a step of more sequences is shorter, above which the fit may fall."""


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


def terms(knots: np.ndarray, far: float, batch: np.ndarray, context_tokens: np.ndarray) -> np.ndarray:
    """[N, K + 2] basis at points: ramps along the batch, then context / far and the same times batch / last knot, for a
    step reads the KV cache of batch x context tokens."""
    along, share = ramps(knots, batch), np.asarray(context_tokens, dtype=float) / far
    return np.column_stack([along, share, share * batch / knots[-1]])


def monotone_fit(
    batch: np.ndarray, context_tokens: np.ndarray, seconds: np.ndarray, knots: np.ndarray, far: float
) -> np.ndarray:
    """[K, 2] step seconds at each batch of ``knots`` and contexts 0 and ``far``: of all sums of :func:`terms` with
    coefficients >= 0, proven dips aside, the nearest to the points [N] in relative squares."""
    columns = terms(knots, far, batch, context_tokens) / seconds[:, None]
    lowest = np.where(dips(columns), -np.inf, 0.0)
    coefficients = lsq_linear(columns, np.ones(len(seconds)), bounds=(lowest, np.inf), method="bvls").x
    corners = [terms(knots, far, knots, np.full(len(knots), context)) @ coefficients for context in (0.0, far)]
    return np.stack(corners, axis=1)


def dips(columns: np.ndarray) -> np.ndarray:
    """[K + 2] bool: which ramps fall for certain: their coefficients of an unbounded fit of ``columns`` [N, K + 2] to 1
    lie below 0 by more than their standard errors allow. Neither the first nor the last: what lies beyond hangs on it.
    """
    points, count = columns.shape
    inner = np.zeros(count, dtype=bool)
    inner[1 : count - 3] = True
    if points - count < 3 or np.linalg.matrix_rank(columns) < count:
        return np.zeros(count, dtype=bool)
    coefficients, squares, *_ = np.linalg.lstsq(columns, np.ones(points))
    variance = np.diag(np.linalg.inv(columns.T @ columns)) * squares.item() / (points - count)
    return inner & (coefficients < -t.ppf(PROOF, points - count) * np.sqrt(variance))


def predicted_s(knots: np.ndarray, values: np.ndarray, far: float, batch, context_tokens) -> np.ndarray:
    """[N] seconds of a fit at points: linear between knots, in the context, and beyond."""
    increments = np.diff(np.vstack([np.zeros(2), values]), axis=0)
    at_zero, at_far = (ramps(knots, batch) @ increments).T
    return at_zero + (at_far - at_zero) * np.asarray(context_tokens, dtype=float) / far


def hold_out_errors(
    batch: np.ndarray, context_tokens: np.ndarray, seconds: np.ndarray, groups: np.ndarray, far: float
) -> np.ndarray:
    """[N] predicted / measured - 1 of every point, from a fit that saw no point of its group (labels [N]); NaN where
    the batches left do not enclose the point's."""
    errors = np.full(len(seconds), np.nan)
    for group in np.unique(groups):
        out = groups == group
        knots = np.unique(batch[~out])
        if not knots.size:
            continue
        values = monotone_fit(batch[~out], context_tokens[~out], seconds[~out], knots, far)
        found = predicted_s(knots, values, far, batch[out], context_tokens[out]) / seconds[out] - 1.0
        errors[out] = np.where((batch[out] >= knots[0]) & (batch[out] <= knots[-1]), found, np.nan)
    return errors


def half_interval(errors: np.ndarray) -> float:
    """Half of the interval around a prediction, as a share of it: the COVERAGE quantile of hold-out errors; infinite
    where there is none."""
    known = np.abs(errors[~np.isnan(errors)])
    return float(np.quantile(known, COVERAGE)) if known.size else float("inf")
