"""Distributions of response lengths, named in experiments as ``lognormal:mu,sigma`` and the like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.stats import norm

Quantile = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """``quantile`` maps probabilities [n] to response tokens [n], before rounding and truncation at a cap."""

    name: str
    quantile: Quantile

    def tokens(self, probabilities: np.ndarray, cap_tokens: int) -> np.ndarray:
        """Whole response tokens of 1 .. cap."""
        return np.clip(np.round(self.quantile(probabilities)), 1, cap_tokens).astype(np.int64)


def require(holds: bool, rule: str) -> None:
    """ValueError that tells the rule a parameter breaks."""
    if not holds:
        raise ValueError(rule)


def lognormal(mu: float, sigma: float) -> Quantile:
    require(sigma >= 0, "sigma must be at least 0")
    return lambda p: np.exp(mu + sigma * norm.ppf(p))


def pareto(smallest: float, alpha: float) -> Quantile:
    """Heavy tail: P(length > x) = (smallest / x) ** alpha."""
    require(smallest >= 1, "smallest must be at least 1 token")
    require(alpha > 0, "alpha must be above 0")
    return lambda p: smallest * (1 - p) ** (-1 / alpha)


def uniform(low: float, high: float) -> Quantile:
    require(1 <= low <= high, "low must be at least 1 token, and high at least low")
    return lambda p: low + (high - low) * p


def constant(tokens: float) -> Quantile:
    require(tokens >= 1, "tokens must be at least 1")
    return lambda p: np.full_like(p, tokens)


def bimodal(short: float, long: float, long_share: float) -> Quantile:
    """``long_share`` of the responses at ``long`` tokens, the rest at ``short``."""
    require(1 <= short <= long, "short must be at least 1 token, and long at least short")
    require(0 <= long_share <= 1, "long_share must lie between 0 and 1")
    return lambda p: np.where(p < 1 - long_share, short, long)


FAMILIES: dict[str, tuple[Callable[..., Quantile], tuple[str, ...]]] = {
    "lognormal": (lognormal, ("mu", "sigma")),
    "pareto": (pareto, ("smallest", "alpha")),
    "uniform": (uniform, ("low", "high")),
    "constant": (constant, ("tokens",)),
    "bimodal": (bimodal, ("short", "long", "long_share")),
}


@lru_cache(maxsize=8)
def recorded(path: str) -> Quantile:
    """The response lengths of a trace file (:func:`bench.workloads.trace.read_trace`), as a distribution."""
    from bench.workloads.trace import read_trace

    lengths = np.sort(read_trace(path).response_tokens)
    return lambda p: lengths[np.minimum((p * len(lengths)).astype(int), len(lengths) - 1)].astype(float)


def parse(text: str) -> LengthDistribution:
    """``"lognormal:7.25,1.41"``, or ``"trace:FILE"``; ValueError tells the known families, or the parameter at
    fault."""
    family, _, arguments = text.partition(":")
    known = "; ".join(f"{name}:{','.join(parameters)}" for name, (_, parameters) in FAMILIES.items()) + "; trace:FILE"
    if family == "trace":
        return LengthDistribution(text, recorded(arguments))
    if family not in FAMILIES:
        raise ValueError(f"length distribution {text!r} is not known; known ones: {known}")
    make, parameters = FAMILIES[family]
    try:
        values = [float(value) for value in arguments.split(",")]
    except ValueError:
        values = []
    if len(values) != len(parameters) or not np.isfinite(values).all():
        raise ValueError(f"length distribution {text!r}: {family} takes {','.join(parameters)} as finite numbers")
    try:
        return LengthDistribution(text, make(*values))
    except ValueError as error:
        raise ValueError(f"length distribution {text!r}: {error}") from None
