"""Policies: when to change the layout of a running rollout, and to which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pat.layout import Layout
from pat.lengths import LengthModel
from pat.planner import Outlook, Planner, outlook


@dataclass(frozen=True, slots=True, eq=False)
class RolloutState:
    """What a policy may know of a running rollout: nothing of how long any response will be.

    generated_tokens  [n] response tokens so far of the running sequences
    context_tokens    [n] prompt and response tokens so far
    waiting           sequences that have not begun or were retracted
    finished_tokens   [m] lengths of the responses that have ended
    switches          switches made so far in this rollout
    sequence_ids      [n] which sequences of the rollout are running, where the engine tells
    """

    time_s: float
    layout: Layout
    generated_tokens: np.ndarray
    context_tokens: np.ndarray
    waiting: int
    finished_tokens: np.ndarray
    switches: int = 0
    sequence_ids: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Keep:
    """Stay in the present layout."""

    why: str = ""


@dataclass(frozen=True, slots=True)
class Switch:
    """Go to ``layout`` at the next step boundary. Predicted: seconds saved against staying, and the switch's cost."""

    layout: Layout
    gain_s: float
    cost_s: float
    why: str = ""


class Policy(Protocol):
    """``interval_steps``: decode steps between two questions; None: never asked."""

    interval_steps: int | None

    def first_layout(self, prompt_tokens: np.ndarray) -> Layout:
        """The layout to begin a rollout in, given the prompts' lengths [n]."""

    def decide(self, state: RolloutState) -> Keep | Switch: ...


@dataclass(frozen=True)
class StaticPolicy:
    """One layout for the whole rollout."""

    layout: Layout
    interval_steps: int | None = None

    def first_layout(self, prompt_tokens: np.ndarray) -> Layout:
        return self.layout

    def decide(self, state: RolloutState) -> Keep | Switch:
        return Keep("static")


class Foresight(Protocol):
    """What is expected of the rest of a rollout."""

    def at_start(self, prompt_tokens: np.ndarray) -> Outlook: ...

    def during(self, state: RolloutState) -> Outlook: ...


@dataclass(frozen=True, eq=False)
class LengthForesight:
    """By a length model, corrected by what the running rollout reveals. Waiting sequences count as just begun."""

    lengths: LengthModel

    def at_start(self, prompt_tokens: np.ndarray) -> Outlook:
        return outlook(self.lengths, np.zeros(len(prompt_tokens)), float(np.mean(prompt_tokens)))

    def during(self, state: RolloutState) -> Outlook:
        generated = np.r_[state.generated_tokens, np.zeros(state.waiting)]
        lengths = self.lengths.updated(state.finished_tokens, state.generated_tokens)
        return outlook(lengths, generated, float(np.mean(state.context_tokens)))


@dataclass(frozen=True, eq=False)
class AdaptivePolicy:
    """PAT: switches when the predicted benefit beats the predicted cost by a margin and waiting would not be better.

    start       the layout to begin in; None: the planner chooses it
    max_hops    switches in one rollout (the paper: 1)
    margin      what a switch must save, its cost already paid, as a multiple of that cost
    """

    planner: Planner
    foresight: Foresight
    start: Layout | None = None
    max_hops: int = 3
    margin: float = 0.25
    interval_steps: int = 64

    def first_layout(self, prompt_tokens: np.ndarray) -> Layout:
        if self.start is not None:
            return self.start
        ahead = self.foresight.at_start(prompt_tokens)
        return self.planner.first_layout(ahead, float(np.sum(prompt_tokens)), self.max_hops, self.interval_steps)[0]

    def decide(self, state: RolloutState) -> Keep | Switch:
        hops = self.max_hops - state.switches
        if hops <= 0:
            return Keep("no switch left")
        if len(state.generated_tokens) == 0:
            return Keep("nothing is running")
        if not self._another_is_faster(state):
            return Keep("the present layout is the fastest for now")
        plan = self.planner.plan(state.layout, self.foresight.during(state), hops)
        if plan.now is None:
            return Keep("waiting or staying is better")
        gain_s, cost_s = plan.stay_s - plan.best_s, plan.first_cost_s
        if gain_s <= self.margin * cost_s:
            return Keep(f"gain {gain_s:.3f} s is within the margin of the cost {cost_s:.3f} s")
        return Switch(plan.now, gain_s, cost_s, f"saves {gain_s:.3f} s after a cost of {cost_s:.3f} s")

    def _another_is_faster(self, state: RolloutState) -> bool:
        """Whether a step of the present batch would be shorter elsewhere: the cheap test before any planning."""
        running, step_s = len(state.context_tokens), self.planner.step_s
        alive, context = running + state.waiting, float(state.context_tokens.sum()) / running
        here_s = step_s(state.layout, alive, context)
        return any(step_s(a, alive, context) < here_s for a in reversed(self.planner.layouts) if a != state.layout)
