"""One comparison of a report: the arms of an experiment at one batch, and one host term where predicted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from bench.experiment import Experiment
from bench.stats import Interval, gain_percent, interval
from pat.layout import Layout

WORTH_PERCENT = 0.5
"""Oracle gains below this are not worth a ratio."""

ARM_ORDER = ("pat-paper", "restart", "pat-planned", "pat-live", "pat-forced", "oracle")


def arm_order(arm: str) -> tuple:
    """Sort key of arms in tables and plots: static layouts by TP, then PAT, then the oracle."""
    if arm.startswith("static-"):
        return (0, Layout.parse(arm.removeprefix("static-")).tp)
    return (1, ARM_ORDER.index(arm) if arm in ARM_ORDER else len(ARM_ORDER))


@dataclass(frozen=True, eq=False)
class Comparison:
    """``rollout_s`` and ``tokens_per_s`` by arm, arrays over seeds [S] in the same order for every arm."""

    experiment: Experiment
    batch: int
    host_term: str
    rollout_s: dict[str, np.ndarray]
    tokens_per_s: dict[str, np.ndarray]
    limit_s: np.ndarray | None
    extrapolated: bool

    @classmethod
    def of(cls, experiment: Experiment, frame: pd.DataFrame) -> list[Comparison]:
        """Every comparison in an experiment's records; arms that lack a seed of the others are left out."""
        comparisons = []
        for (batch, host), group in frame.groupby(["batch", "host_term"], sort=False):
            seeds = group.seed.nunique()
            arms = {name: rows.sort_values("seed") for name, rows in group.groupby("arm", sort=False)}
            arms = {name: rows for name, rows in arms.items() if len(rows) == seeds}
            if not arms:
                continue
            limit = next(iter(arms.values())).physical_limit_s.to_numpy(dtype=float)
            comparisons.append(
                cls(
                    experiment,
                    int(batch),
                    str(host),
                    {name: rows.rollout_s.to_numpy() for name, rows in arms.items()},
                    {name: rows.tokens_per_s.to_numpy() for name, rows in arms.items()},
                    None if np.isnan(limit).any() else limit,
                    bool(group.extrapolated.any()),
                )
            )
        return comparisons

    @property
    def statics(self) -> dict[str, np.ndarray]:
        return {name: times for name, times in self.rollout_s.items() if name.startswith("static-")}

    @property
    def best_static(self) -> str | None:
        """The static arm with the least mean rollout time over the seeds; None where no static arm ran."""
        return min(self.statics, key=lambda name: self.statics[name].mean(), default=None)

    @property
    def verl_default(self) -> str:
        return f"static-{self.experiment.verl_default}"

    def throughput(self, arm: str) -> Interval | None:
        return interval(self.tokens_per_s[arm]) if arm in self.tokens_per_s else None

    def gain(self, arm: str | None, base: str | None) -> Interval | None:
        """Percent by which ``arm`` is faster than ``base``, seed by seed; None where either did not run."""
        if arm not in self.rollout_s or base not in self.rollout_s:
            return None
        return gain_percent(self.rollout_s[base], self.rollout_s[arm])

    def share_of_oracle(self, arm: str) -> float | None:
        """Share of the oracle's gain over best static that ``arm`` reaches, from mean gains; None where there is
        next to nothing to gain."""
        oracle, mine = self.gain("oracle", self.best_static), self.gain(arm, self.best_static)
        if oracle is None or mine is None or oracle.mean < WORTH_PERCENT:
            return None
        return mine.mean / oracle.mean
