"""Adaptive TP without a predictor: one switch when a fixed share of the sequences is left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pat.layout import Layout
from pat.policy import Keep, RolloutState, Switch


@dataclass(frozen=True, slots=True)
class Threshold:
    """Begins in ``start`` and goes to ``target`` when at most ``share`` of the rollout's sequences are left."""

    start: Layout
    target: Layout
    share: float = 0.125
    interval_steps: int = 64

    def first_layout(self, prompt_tokens: np.ndarray) -> Layout:
        return self.start

    def decide(self, state: RolloutState) -> Keep | Switch:
        left = state.running + state.waiting
        if state.layout != self.start or self.start == self.target:
            return Keep("no switch left")
        if left > self.share * (left + len(state.finished_tokens)):
            return Keep("above the threshold")
        return Switch(self.target, 0.0, 0.0, f"{left} sequences are left")

    def switched(self, predicted_s: float, observed_s: float) -> None:
        pass
