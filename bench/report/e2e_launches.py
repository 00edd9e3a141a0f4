"""Launches of an end-to-end experiment, and what they differ in: by arm, seed, iteration and phase."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.e2e.experiment import E2eExperiment
from bench.e2e.iterations import Iteration, IterationStore
from bench.report.tables import percent
from bench.stats import reduction_percent

TRAINING = ("old_log_prob", "update_actor")
"""What no arm touches: where a launch takes longer in it, the machine was slower."""


@dataclass(frozen=True, eq=False)
class Launches:
    """One experiment: iterations of each arm by seed and number, the discarded first ones left out of ``kept``."""

    experiment: E2eExperiment
    made: dict
    arms: dict[str, list[Iteration]]

    def kept(self, arm: str) -> list[Iteration]:
        return [one for one in self.arms[arm] if one.iteration > 1]

    def seconds(self, arm: str, phase: str) -> np.ndarray:
        """[iterations] seconds of a phase; 0 where VeRL did not time it."""
        return np.array([one.metrics.get(f"timing_s/{phase}", 0.0) for one in self.kept(arm)])

    def apart(self, arm: str, values: np.ndarray) -> np.ndarray:
        """What an interval of ``values``, one a kept iteration, is taken over: the means of launches where there are
        several, else the values themselves."""
        seeds = np.array([one.seed for one in self.kept(arm)])
        found = np.unique(seeds)
        return np.array([values[seeds == seed].mean() for seed in found]) if len(found) > 1 else values

    @property
    def statics(self) -> list[str]:
        return [arm for arm in self.arms if arm.startswith("static-")]

    @property
    def best_static(self) -> str | None:
        """Least mean time of an iteration."""
        return min(self.statics, key=lambda arm: self.seconds(arm, "step").mean(), default=None)


def launches(out: Path) -> list[Launches]:
    """Every end-to-end experiment with records of its last run; arms with no kept iteration are left out."""
    found = []
    for store, made, experiment in IterationStore.all_of(out, E2eExperiment):
        arms: dict[str, list[Iteration]] = {arm: [] for arm in experiment.arm_names}
        for one in sorted(store.current(), key=lambda one: (one.seed, one.iteration)):
            arms.setdefault(one.arm, []).append(one)
        arms = {arm: ones for arm, ones in arms.items() if any(one.iteration > 1 for one in ones)}
        if arms:
            found.append(Launches(experiment, made, arms))
    return found


def series(ones: list[Iteration], metric: str) -> tuple[list[int], list[float]]:
    """(iterations, the metric's mean over seeds in each)."""
    values: dict[int, list[float]] = {}
    for one in ones:
        if metric in one.metrics:
            values.setdefault(one.iteration, []).append(one.metrics[metric])
    return sorted(values), [float(np.mean(values[i])) for i in sorted(values)]


def reduction(one: Launches, arm: str, base: str | None, *phases: str) -> str:
    """Paired by seed and iteration number; by seed alone, means of launches, where there are several."""
    if base is None or base not in one.arms or arm == base:
        return "–"
    mine, theirs = ({(it.seed, it.iteration): it for it in one.kept(a)} for a in (arm, base))
    both = sorted(mine.keys() & theirs.keys())
    if len(groups := {seed: [key for key in both if key[0] == seed] for seed, _ in both}) <= 1:
        groups = {key: [key] for key in both}

    def seconds(launch: dict[tuple[int, int], Iteration]) -> list[float]:
        took_s = {key: sum(launch[key].metrics.get(f"timing_s/{phase}", 0.0) for phase in phases) for key in both}
        return [float(np.mean([took_s[key] for key in keys])) for keys in groups.values()]

    return percent(reduction_percent(seconds(theirs), seconds(mine))) if both and any(seconds(theirs)) else "–"


def difference(ones: list[Iteration], base: list[Iteration], metric: str) -> float | None:
    """Largest over iterations, relative where the value is above 1."""
    theirs = {(it.seed, it.iteration): it.metrics.get(metric) for it in base}
    pairs = [(it.metrics.get(metric), theirs.get((it.seed, it.iteration))) for it in ones]
    found = [abs(a - b) / max(1.0, abs(b)) for a, b in pairs if a is not None and b is not None]
    return max(found, default=None)


def own_percent(one: Launches, arm: str) -> float | None:
    """Reports and decisions, in percent of the iterations' time; None where no rollout counted them."""
    own = [
        (it.rollout["reports_s"] + sum(d["decide_s"] for d in it.rollout["decisions"]), it.metrics["timing_s/step"])
        for it in one.kept(arm)
        if it.rollout and "reports_s" in it.rollout
    ]
    return 100 * sum(s for s, _ in own) / sum(s for _, s in own) if own else None


def stayed_as(one: Launches, arm: str) -> str | None:
    """The static arm in whose layout an adaptive arm was throughout; None where there is none."""
    rollouts = [it.rollout for it in one.arms[arm] if it.rollout]
    places = {str(r[end]) for r in rollouts for end in ("start", "end")}
    if len(places) != 1 or any(r["switches"] for r in rollouts):
        return None
    static = f"static-{places.pop()}"
    return static if static in one.statics else None
