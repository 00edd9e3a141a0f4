"""Online correction: how far observed step and switch times are from predicted ones, by layout."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import exp, log

from pat.layout import Layout

STEP_WEIGHT, SWITCH_WEIGHT = 0.1, 0.5
"""Weight of the newest observation; those before it fade by the rest."""
GREATEST = log(4.0)
"""One observation counts for at most a factor of four: a pause of the machine is no bias."""
DEAD_BAND = 0.005
"""Biases below half a percent are left alone: the planner's cached tables stay as they are."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A timed decode step of one replica: its batch, mean context and seconds."""

    batch: int
    context_tokens: float
    seconds: float


@dataclass(slots=True, eq=False)
class Correction:
    """Biases as natural logarithms of observed / predicted: ``step`` by layout, and of switches as a whole.

    A layout that has not run yet takes the mean bias of those that have: a machine that is slow is slow in all.
    """

    step: dict[Layout, float] = field(default_factory=dict)
    switch: float = 0.0

    def observe(self, planner, layout: Layout, observed: tuple[Observed, ...]) -> None:
        """Timed decode steps of ``layout``; ``planner`` predicts without any correction."""
        if not observed:
            return
        total = sum(one.seconds for one in observed)
        predicted = sum(planner.replica_step_s(layout, one.batch, one.context_tokens) for one in observed)
        if total <= 0 or predicted <= 0:
            return
        seen = clipped(log(total / predicted))
        before = self.step.get(layout)
        self.step[layout] = seen if before is None else before + STEP_WEIGHT * (seen - before)

    def switched(self, predicted_s: float, observed_s: float) -> None:
        """``predicted_s`` is what the policy named, the present bias in it."""
        if predicted_s > 0 and observed_s > 0:
            self.switch += SWITCH_WEIGHT * clipped(log(observed_s / predicted_s))

    def factor(self, layout: Layout) -> float:
        """By which predicted seconds of a decode step of ``layout`` are multiplied."""
        mean = sum(self.step.values()) / len(self.step) if self.step else 0.0
        bias = self.step.get(layout, mean)
        return exp(bias) if abs(bias) > DEAD_BAND else 1.0

    def applied_to(self, planner):
        """The planner with the biases; itself where there are none."""
        factors = {layout: self.factor(layout) for layout in planner.layouts}
        switch = exp(self.switch) if abs(self.switch) > DEAD_BAND else 1.0
        if switch == 1.0 and all(factor == 1.0 for factor in factors.values()):
            return planner
        return replace(planner, step_factor=factors, switch_factor=switch)


def clipped(value: float) -> float:
    return max(-GREATEST, min(GREATEST, value))
