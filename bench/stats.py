"""Means over seeds with their intervals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of n values and half the width of its 95% interval (Student's t); NaN where n < 2."""

    mean: float
    half: float
    n: int

    def text(self, digits: int = 1, unit: str = "", sign: bool = False) -> str:
        """``12.3 ± 0.4``; without the interval where there is none."""
        mean = f"{self.mean:{'+' if sign else ''},.{digits}f}{unit}"
        return mean if np.isnan(self.half) else f"{mean} ± {self.half:.{digits}f}"


def interval(values: Iterable[float]) -> Interval:
    """95% interval of the mean of independent values (seeds)."""
    array = np.asarray(list(values), dtype=float)
    n = len(array)
    if n == 0:
        raise ValueError("interval of no values")
    half = float(stats.t.ppf(0.975, n - 1) * array.std(ddof=1) / np.sqrt(n)) if n > 1 else float("nan")
    return Interval(float(array.mean()), half, n)


def gain_percent(base_s: Iterable[float], new_s: Iterable[float]) -> Interval:
    """How much faster ``new`` is than ``base``, pair by pair: 100 (base / new - 1), the gain in throughput."""
    pairs = np.asarray(list(base_s), dtype=float) / np.asarray(list(new_s), dtype=float)
    return interval(100 * (pairs - 1))


def reduction_percent(base_s: Iterable[float], new_s: Iterable[float]) -> Interval:
    """How much less time ``new`` takes than ``base``, pair by pair: 100 (1 - new / base), the paper's measure."""
    pairs = np.asarray(list(new_s), dtype=float) / np.asarray(list(base_s), dtype=float)
    return interval(100 * (1 - pairs))


def weighted_percentiles(values: np.ndarray, weights: np.ndarray, percents: tuple[float, ...]) -> list[float]:
    """Percentiles of ``values`` each counted ``weights`` times: the smallest value that reaches the share."""
    order = np.argsort(values, kind="stable")
    share = np.cumsum(weights[order]) / np.sum(weights)
    return [
        float(values[order][np.searchsorted(share, p / 100, side="left").clip(0, len(values) - 1)]) for p in percents
    ]
