"""Policies: when to change the layout of a running rollout, and to which."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from pat.correction import Correction, Observed
from pat.layout import Layout
from pat.lengths import LengthModel
from pat.planner import Outlook, Planner, outlook


@dataclass(frozen=True, eq=False)
class RolloutState:
    """What a policy may know of a running rollout: nothing of how long any response will be.

    generated_tokens  [n] response tokens so far of the running sequences
    context_tokens    [n] prompt and response tokens so far
    waiting           sequences that have not begun or were retracted
    finished_tokens   [m] lengths of the responses that have ended
    switches          switches made so far in this rollout
    sequence_ids      [n] which sequences of the rollout are running, where the engine tells
    waiting_ids, finished_ids   the same of those that wait, and [m] of those that have ended
    observed          decode steps of the present layout that were timed, the latest of each replica
    """

    time_s: float
    layout: Layout
    generated_tokens: np.ndarray
    context_tokens: np.ndarray
    waiting: int
    finished_tokens: np.ndarray
    switches: int = 0
    sequence_ids: np.ndarray | None = None
    waiting_ids: np.ndarray | None = None
    finished_ids: np.ndarray | None = None
    observed: tuple[Observed, ...] = ()

    @property
    def running(self) -> int:
        """Sequences that are running: n."""
        return len(self.generated_tokens)

    @property
    def context_sum(self) -> float:
        """Context tokens of all that run."""
        return float(self.context_tokens.sum())


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
    """``interval_steps``: decode steps between two questions; None: never asked. ``switched`` tells what a switch that
    the policy asked for took, beside the cost that it named."""

    interval_steps: int | None

    def first_layout(self, prompt_tokens: np.ndarray) -> Layout:
        """The layout to begin a rollout in, given the prompts' lengths [n]."""

    def decide(self, state: RolloutState) -> Keep | Switch: ...

    def switched(self, predicted_s: float, observed_s: float) -> None: ...


@dataclass(frozen=True)
class StaticPolicy:
    """One layout for the whole rollout."""

    layout: Layout
    interval_steps: int | None = None

    def first_layout(self, prompt_tokens: np.ndarray) -> Layout:
        return self.layout

    def decide(self, state: RolloutState) -> Keep | Switch:
        return Keep("static")

    def switched(self, predicted_s: float, observed_s: float) -> None:
        pass


class Foresight(Protocol):
    """What is expected of the rest of a rollout. ``sample``: whole response lengths [n] that may come to be."""

    def at_start(self, prompt_tokens: np.ndarray) -> Outlook: ...

    def during(self, state: RolloutState) -> Outlook: ...

    def sample(self, sequences: int) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class LengthForesight:
    """By a length model, corrected by what the running rollout reveals. Waiting sequences count as just begun.

    ``conditioned``: False leaves out what the running rollout reveals; every sequence is expected to be a new one.
    """

    lengths: LengthModel
    conditioned: bool = True

    def at_start(self, prompt_tokens: np.ndarray) -> Outlook:
        return outlook(self.lengths, np.zeros(len(prompt_tokens)), float(np.mean(prompt_tokens)))

    def during(self, state: RolloutState) -> Outlook:
        generated = np.concatenate([state.generated_tokens, np.zeros(state.waiting)])
        if not self.conditioned:
            return outlook(self.lengths, np.zeros(len(generated)), float(np.mean(state.context_tokens)))
        lengths = self.lengths.updated(state.finished_tokens, state.generated_tokens)
        return outlook(lengths, generated, float(np.mean(state.context_tokens)))

    def sample(self, sequences: int) -> np.ndarray:
        return self.lengths.sample(sequences)


class Rehearsal(Protocol):
    """Seconds that a rollout of these prompts [n] and responses [n] takes under a policy, by a model of the engine."""

    def __call__(self, policy: Policy, prompt_tokens: np.ndarray, response_tokens: np.ndarray) -> float: ...


@dataclass(slots=True)
class Memory:
    """What an adaptive policy keeps while a rollout runs.

    hold      no switch while sequences wait
    left      layouts that this rollout has left
    pending   the switch that was asked for and not confirmed yet: where from
    """

    hold: bool = False
    left: list[Layout] = field(default_factory=list)
    pending: Layout | None = None


@dataclass(frozen=True, eq=False)
class AdaptivePolicy:
    """PAT: switches when the predicted benefit beats the predicted cost by a margin and waiting would not be better.

    start         the layout to begin in; None: the planner chooses it
    max_hops      switches in one rollout (the paper: 1)
    margin        what a switch must save, its cost already paid, as a multiple of that cost; back to a layout that the
                  rollout has left: twice that (hysteresis)
    early_share   what an early switch must save to choose a first layout for its sake, as a share of the rollout: less
                  is within what the luck of the lengths decides
    rehearsal     tries starts out where expectations describe a rollout badly: the KV cache is too short for all, or
                  many end together at the cap
    hold          no switch while sequences wait
    correction    biases of predictions, learned while rollouts run and kept from one to the next
    """

    planner: Planner
    foresight: Foresight
    start: Layout | None = None
    max_hops: int = 3
    margin: float = 0.25
    interval_steps: int = 64
    early_share: float = 0.01
    rehearsal: Rehearsal | None = None
    hold: bool = False
    correction: Correction | None = field(default_factory=Correction)
    memory: Memory = field(default_factory=Memory)

    def first_layout(self, prompt_tokens: np.ndarray) -> Layout:
        self.memory.hold, self.memory.left, self.memory.pending = self.hold, [], None
        if self.start is not None:
            return self.start
        ahead, total = self.foresight.at_start(prompt_tokens), float(np.sum(prompt_tokens))
        best = self.planner.first_layouts(ahead, total, self.max_hops, self.interval_steps, self.early_share)
        queues = self.planner.may_queue(ahead)
        if self.rehearsal is not None and (queues or self.planner.ends_together(ahead)):
            return self._rehearsed(best, prompt_tokens, queues)
        return best[0]

    def _rehearsed(self, best: list[Layout], prompt_tokens: np.ndarray, queues: bool) -> Layout:
        """Of staying in a layout, holding while sequences wait, and switching freely, what takes least on a sample:
        from the best static layout, the second best, and the planner's choice. Where nothing ``queues``, holding is no
        different."""
        response = self.foresight.sample(len(prompt_tokens))
        static_s = {a: self.rehearsal(StaticPolicy(a), prompt_tokens, response) for a in best}
        steady, *others = sorted(static_s, key=static_s.get)

        def tried_s(start: Layout, hold: bool) -> float:
            # a rehearsal learns nothing for the rollout itself
            trial = replace(self, start=start, hold=hold, rehearsal=None, correction=None, memory=Memory())
            return self.rehearsal(trial, prompt_tokens, response)

        # The more a way switches, the more it must save: a sample is not the rollout.
        ways = [(tried_s(steady, True), steady, True)]
        free = {best[0], *others[:1], steady} - (set() if queues else {steady})
        ways += [(tried_s(a, False), a, False) for a in sorted(free)]
        keen = min(ways, key=lambda way: way[0])
        chosen = keen if keen[0] < (1.0 - self.early_share) * ways[0][0] else ways[0]
        self.memory.hold = chosen[2]
        return chosen[1]

    def decide(self, state: RolloutState) -> Keep | Switch:
        memory = self.memory
        if self.correction is not None:
            self.correction.observe(self.planner, state.layout, state.observed)
        hops = self.max_hops - state.switches
        if hops <= 0:
            return Keep("no switch left")
        if state.running == 0:
            return Keep("nothing is running")
        if memory.hold and state.waiting:
            return Keep("held while sequences wait")
        planner = self.planner if self.correction is None else self.correction.applied_to(self.planner)
        if not self._another_is_faster(state, planner):
            return Keep("the present layout is the fastest for now")
        plan = planner.plan(state.layout, self.foresight.during(state), hops)
        if plan.now is None:
            return Keep("waiting or staying is better")
        gain_s, cost_s = plan.stay_s - plan.best_s, plan.first_cost_s
        needed_s = self.margin * cost_s * (2.0 if plan.now in memory.left else 1.0)
        if gain_s <= needed_s:
            return Keep(f"gain {gain_s:.3f} s is within the margin of the cost {cost_s:.3f} s")
        if gain_s <= plan.half_s:
            return Keep(f"gain {gain_s:.3f} s is within the interval of the prediction, {plan.half_s:.3f} s")
        memory.pending = state.layout
        return Switch(plan.now, gain_s, cost_s, f"saves {gain_s:.3f} s after a cost of {cost_s:.3f} s")

    def switched(self, predicted_s: float, observed_s: float) -> None:
        if self.memory.pending is not None:
            self.memory.left.append(self.memory.pending)
            self.memory.pending = None
        if self.correction is not None:
            self.correction.switched(predicted_s, observed_s)

    def _another_is_faster(self, state: RolloutState, planner: Planner) -> bool:
        """Whether a step of the present batch would be shorter elsewhere: the cheap test before any planning."""
        step_s, alive, context = planner.step_s, state.running + state.waiting, state.context_sum / state.running
        here_s = step_s(state.layout, alive, context)
        return any(step_s(a, alive, context) < here_s for a in reversed(planner.layouts) if a != state.layout)
