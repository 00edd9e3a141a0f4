"""Rollouts by given schedules of switches, many of one trace: what a search for the best one asks for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from baselines.oracle import Schedule
from bench.backends.simulated.replica import Replica, Sequences
from bench.backends.simulated.rollout import Rollout, SwitchEvent, System, begin, finish, switch
from pat.layout import Layout
from pat.policy import Switch


@dataclass(frozen=True, eq=False)
class Standing:
    """A rollout under way: the replicas of its present layout, the last of all that it has had (``past``)."""

    sequences: Sequences
    replicas: list[Replica]
    past: list[Replica]
    events: list[SwitchEvent]

    def copy(self) -> Standing:
        """One that goes on by itself."""
        s = self.sequences
        sequences = replace(s, generated_tokens=s.generated_tokens.copy(), finished_s=s.finished_s.copy())
        replicas = [
            replace(r, sequences=sequences, admission=replace(r.admission), queue=list(r.queue), log=list(r.log))
            for r in self.replicas
        ]
        return Standing(sequences, replicas, self.past[: -len(replicas)] + replicas, list(self.events))


@dataclass(frozen=True, eq=False)
class Scheduled:
    """As :func:`.rollout.simulate`, with switches at given times and no policy.

    prompt_tokens, response_tokens [N]. What schedules have in common is simulated once: ``known`` holds each just after
    its last switch, ``reached`` what became of it by the times when another switch was tried.
    """

    system: System
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    max_response_tokens: int
    known: dict[Schedule, Standing] = field(default_factory=dict)
    reached: dict[Schedule, dict[float, Standing]] = field(default_factory=dict)

    def __call__(self, schedule: Schedule, limit_s: float = np.inf) -> Rollout | None:
        """A switch after the end does not happen. None where it takes longer than ``limit_s``: the rest is not run."""
        standing = self._after(schedule).copy()
        for replica in standing.replicas:
            replica.advance(limit_s)
            if replica.busy:
                return None
        return finish(standing.sequences, standing.replicas, standing.past, standing.events)

    def _after(self, schedule: Schedule) -> Standing:
        """Just after the last switch of the schedule."""
        if schedule not in self.known:
            if schedule.hops:
                *earlier, (time_s, layout) = schedule.hops
                standing = self._until(Schedule(schedule.first, tuple(earlier)), time_s)
                self.known[schedule] = self._switched(standing, time_s, layout)
            else:
                self.known[schedule] = self._begun(schedule.first)
        return self.known[schedule]

    def _begun(self, layout: Layout) -> Standing:
        sequences = Sequences.of(self.prompt_tokens, self.response_tokens)
        replicas = begin(self.system, layout, sequences, self.max_response_tokens)
        return Standing(sequences, replicas, list(replicas), [])

    def _until(self, schedule: Schedule, time_s: float) -> Standing:
        """At a time after the last switch of the schedule."""
        reached = self.reached.setdefault(schedule, {0.0: self._after(schedule)})
        if time_s not in reached:
            standing = reached[max(t for t in reached if t < time_s)].copy()
            for replica in standing.replicas:
                replica.advance(time_s)
            reached[time_s] = standing
        return reached[time_s].copy()

    def _switched(self, standing: Standing, time_s: float, layout: Layout) -> Standing:
        replicas, sequences = standing.replicas, standing.sequences
        if not any(r.busy for r in replicas):
            return standing
        asked = Switch(layout, 0.0, 0.0)
        event, fresh = switch(self.system, replicas, sequences, self.max_response_tokens, time_s, asked)
        return Standing(sequences, fresh, standing.past + fresh, [*standing.events, event])
