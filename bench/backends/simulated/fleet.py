"""The rollout of :mod:`.rollout` for fleets of thousands of GPUs: all replicas advance at once, as rows of arrays.

It holds where every sequence starts at once and none is ever retracted; there it equals :func:`.rollout.simulate` to
the last bit (tests compare the two). Elsewhere it raises :class:`Waits`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from bench.backends.simulated.admission import CLIP_NEW_TOKENS
from bench.backends.simulated.replica import Sequences
from bench.backends.simulated.rollout import Rollout, SwitchEvent, System, simulate
from bench.backends.simulated.view import View
from pat.correction import Observed
from pat.layout import Layout
from pat.placement import Room, place
from pat.policy import Policy, RolloutState, Switch
from pat.step_table import StepTable

FLEET_SEQUENCES = 2048
"""From here on arrays are quicker than replica after replica."""


class Waits(Exception):
    """Some sequence would have to wait for KV memory: this shortcut does not hold."""


def simulate_fleet(
    system: System, policy: Policy, prompt_tokens: np.ndarray, response_tokens: np.ndarray, max_response_tokens: int
) -> Rollout:
    """As :func:`.rollout.simulate`, without ``past``. Waits where a sequence would queue or be retracted."""
    sequences = Sequences.of(prompt_tokens, response_tokens)
    first = policy.first_layout(sequences.prompt_tokens)
    fleet, events, now_s = started(system, first, sequences, max_response_tokens), [], 0.0
    wait_steps = 0 if system.reports_at_once else policy.interval_steps
    while policy.interval_steps is not None and (busy := fleet.busy(now_s)).any():
        step_s = fleet.step_s(fleet.done(now_s))[busy].max()
        now_s, wait_steps = max(now_s, fleet.clock_s[busy].min()) + wait_steps * step_s, policy.interval_steps
        decision = policy.decide(fleet.observe(now_s, len(events)))
        if isinstance(decision, Switch):
            event, fleet = switched(system, fleet, now_s, decision)
            policy.switched(decision.cost_s, event.cost.total_s)
            wait_steps = 1 if system.reports_at_once else policy.interval_steps
            events.append(event)
    fleet.finish()
    return Rollout(first, float(np.max(sequences.finished_s)), sequences.finished_s, tuple(events), 0, ())


def simulate_quickly(
    system: System, policy: Policy, prompt_tokens: np.ndarray, response_tokens: np.ndarray, max_response_tokens: int
) -> Rollout:
    """The same rollout by the quicker of the two ways. ``policy`` may be asked twice from the start: it must not have
    learned anything from the first time."""
    asked = system, policy, prompt_tokens, response_tokens, max_response_tokens
    if len(prompt_tokens) >= FLEET_SEQUENCES:
        with suppress(Waits):
            return simulate_fleet(*asked)
    return simulate(*asked)


@dataclass(frozen=True, eq=False)
class Fleet:
    """Replicas [R] and what each runs to its end, a row each, padded at its right end to the greatest batch [B].

    clock_s [R] when each begins; ids [R, B] its sequences in the order in which they end, -1 where padded; ends [R, B]
    their remaining decode steps. Segment j of a row lies between its ends j - 1 and j: batch, steps, mean context at
    its start, seconds [R, B] of it; until_s [R, B + 1] seconds before it.
    """

    layout: Layout
    sequences: Sequences
    table: StepTable
    clock_s: np.ndarray
    ids: np.ndarray
    ends: np.ndarray
    batch: np.ndarray
    steps: np.ndarray
    context_tokens: np.ndarray
    seconds: np.ndarray
    until_s: np.ndarray

    @classmethod
    def of(
        cls, system: System, layout: Layout, s: Sequences, running: np.ndarray, replica: np.ndarray, clock_s: np.ndarray
    ) -> Fleet:
        """From the running sequences [n] and the replica of each; Waits where the KV cache would fill up."""
        remaining, replicas = s.response_tokens[running] - s.generated_tokens[running], len(clock_s)
        order = np.lexsort((remaining, replica))
        count = np.bincount(replica, minlength=replicas)
        row = replica[order]
        column = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
        shape = replicas, max(1, int(count.max(initial=0)))
        ids, ends = np.full(shape, -1), np.zeros(shape, dtype=np.int64)
        ids[row, column], ends[row, column] = running[order], remaining[order]
        ends = np.maximum.accumulate(ends, axis=1)  # padding: segments of no steps
        context = np.zeros(shape)
        context[row, column] = s.context_tokens(running[order])
        batch = np.maximum(count[:, None] - np.arange(shape[1]), 1)
        before = np.hstack([np.zeros((replicas, 1), dtype=np.int64), ends[:, :-1]])
        steps = ends - before
        mean = np.cumsum(context[:, ::-1], axis=1)[:, ::-1] / batch + before
        if (np.rint(mean * batch) + batch * (steps - 1))[steps > 0].max(initial=0) > system.capacity_tokens[layout]:
            raise Waits
        table = system.profile.table(layout.tp, shape[1])
        seconds = table.run_s(batch, mean, steps)
        until_s = np.hstack([np.zeros((replicas, 1)), np.cumsum(seconds, axis=1)])
        return cls(layout, s, table, clock_s, ids, ends, batch, steps, mean, seconds, until_s)

    @property
    def end_s(self) -> np.ndarray:
        return self.clock_s + self.until_s[:, -1]

    def busy(self, now_s: float) -> np.ndarray:
        """[R] whether a replica has sequences to run, now or when its clock comes."""
        return (self.end_s > now_s) & (self.ids[:, 0] >= 0)

    def _at(self, values: np.ndarray, segment: np.ndarray) -> np.ndarray:
        return values[np.arange(len(segment)), segment]

    def done(self, at_s: float) -> tuple[np.ndarray, np.ndarray]:
        """[R] both: the segment that each replica is in at ``at_s``, and whole steps done in it."""
        elapsed_s = np.maximum(0.0, at_s - self.clock_s)
        segment = np.minimum((self.until_s <= elapsed_s[:, None]).sum(axis=1), self.steps.shape[1]) - 1
        return segment, self._within(segment, elapsed_s)

    def _within(self, segment: np.ndarray, elapsed_s: np.ndarray) -> np.ndarray:
        """[R] whole steps of each replica's segment that ``elapsed_s`` since its clock covers, at most all of them."""
        batch, context = self._at(self.batch, segment), self._at(self.context_tokens, segment)
        return np.minimum(
            steps_within(self.table, batch, context, elapsed_s - self._at(self.until_s, segment)),
            self._at(self.steps, segment),
        )

    def step_s(self, done: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """[R] seconds of the decode step that each replica is in."""
        segment, into = done
        return self.table.step_s(self._at(self.batch, segment), self._at(self.context_tokens, segment) + into)

    def observe(self, now_s: float, switches: int) -> View:
        """What a policy may see at ``now_s``."""
        (segment, into), busy = self.done(now_s), self.busy(now_s)
        batch, context = self._at(self.batch, segment), self._at(self.context_tokens, segment)

        def whole() -> RolloutState:
            return self.state(now_s, switches, segment, into, busy)

        if (into >= self._at(self.steps, segment))[busy].any():  # rounding: some have just ended
            state = whole()
            running, tokens = state.running, state.context_sum
        else:
            running = int(batch[busy].sum())
            tokens = float((np.rint(context * batch) + batch * into)[busy].sum())
        return View(
            time_s=now_s,
            layout=self.layout,
            running=running,
            context_sum=tokens,
            waiting=0,
            switches=switches,
            whole=whole,
            steps=lambda: self.observed(segment, into, busy),
        )

    def state(
        self, now_s: float, switches: int, segment: np.ndarray, into: np.ndarray, busy: np.ndarray
    ) -> RolloutState:
        """Progress of the living, lengths of the finished."""
        s = self.sequences
        steps = self._at(self.ends, segment) - self._at(self.steps, segment) + into
        alive = (self.ids >= 0) & (self.ends > steps[:, None]) & busy[:, None]
        running = self.ids[alive]
        generated = s.generated_tokens[running] + np.broadcast_to(steps[:, None], alive.shape)[alive]
        finished = np.ones(len(s.prompt_tokens), dtype=bool)
        finished[running] = False
        return RolloutState(
            time_s=now_s,
            layout=self.layout,
            generated_tokens=generated,
            context_tokens=s.prompt_tokens[running] + generated,
            waiting=0,
            finished_tokens=s.response_tokens[finished],
            switches=switches,
            sequence_ids=running,
            waiting_ids=np.empty(0, dtype=np.int64),
            finished_ids=np.flatnonzero(finished),
        )

    def observed(self, segment: np.ndarray, into: np.ndarray, busy: np.ndarray) -> tuple[Observed, ...]:
        """The step that each busy replica is in, as the engine would time it."""
        batch, context = self._at(self.batch, segment), self._at(self.context_tokens, segment) + into
        steps = zip(
            batch[busy].tolist(), context[busy].tolist(), self.step_s((segment, into))[busy].tolist(), strict=True
        )
        return tuple(Observed(*step) for step in steps)

    def stop(self, at_s: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Run up to each replica's first step boundary at or after ``at_s``: (the sequences then running [n], the
        replica of each [n], the boundaries [R])."""
        s, over, elapsed_s = self.sequences, self.end_s <= at_s, at_s - self.clock_s
        last = self.steps.shape[1] - 1
        segment = np.where(over, last, np.minimum((self.until_s[:, 1:] < elapsed_s[:, None]).sum(axis=1), last))
        batch, context, before_s = (self._at(a, segment) for a in (self.batch, self.context_tokens, self.until_s))
        whole = steps_within(self.table, batch, context, np.maximum(elapsed_s - before_s, 0.0))
        whole += before_s + self.table.run_s(batch, context, whole) < elapsed_s
        whole = np.where(over, self._at(self.steps, segment), np.minimum(whole, self._at(self.steps, segment)))
        whole = np.where(elapsed_s > 0, whole, 0)
        part_s = before_s + self.table.run_s(batch, context, whole)
        steps = self._at(self.ends, segment) - self._at(self.steps, segment) + whole
        ended = (self.ids >= 0) & (self.ends <= steps[:, None])
        times_s = self.clock_s[:, None] + np.minimum(self.until_s[:, 1:], part_s[:, None])
        s.finished_s[self.ids[ended]] = times_s[ended]
        real = self.ids >= 0
        s.generated_tokens[self.ids[real]] += np.minimum(self.ends, steps[:, None])[real]
        alive = real & ~ended
        return self.ids[alive], np.nonzero(alive)[0], self.clock_s + part_s

    def finish(self) -> None:
        """Run to the end."""
        real = self.ids >= 0
        self.sequences.finished_s[self.ids[real]] = (self.clock_s[:, None] + self.until_s[:, 1:])[real]


def steps_within(table: StepTable, batch: np.ndarray, context_tokens: np.ndarray, budget_s: np.ndarray) -> np.ndarray:
    """[R] whole decode steps that fit into each budget: :meth:`StepTable.steps_within` for arrays."""
    start = table.run_s(batch, 0.0, context_tokens) + budget_s
    steps = np.maximum(budget_s / table.step_s(batch, context_tokens), 0).astype(np.int64)
    for _ in range(64):
        left_s = start - table.run_s(batch, 0.0, context_tokens + steps)
        shift = np.floor(left_s / table.step_s(batch, context_tokens + steps)).astype(np.int64)
        shift = np.maximum(shift, -steps)
        if not shift.any():
            break
        steps += shift
    return steps


def started(system: System, layout: Layout, s: Sequences, max_response_tokens: int) -> Fleet:
    """All sequences dealt out round robin and prefilled, in passes of whole prompts that fill the prefill budget."""
    n, replicas = len(s.prompt_tokens), layout.dp
    rows = -(-n // replicas)
    prompt = np.zeros(rows * replicas, dtype=np.int64)
    prompt[:n] = s.prompt_tokens
    prompt = prompt.reshape(rows, replicas).T
    count = np.bincount(np.arange(n) % replicas, minlength=replicas)
    asked = prompt.sum(axis=1) + count * (1 + min(max_response_tokens, CLIP_NEW_TOKENS))
    if asked.max() >= system.capacity_tokens[layout] or count.max() > system.max_running:
        raise Waits
    until, at, clock_s = np.cumsum(prompt, axis=1), np.zeros(replicas, dtype=np.int64), np.zeros(replicas)
    begun_s = np.zeros((replicas, rows))
    while (left := at < count).any():
        before = np.where(at > 0, until[np.arange(replicas), at - 1], 0)
        fits = (until - before[:, None] <= system.chunk_tokens) & (np.arange(rows) < count[:, None])
        stop = np.where(left, np.maximum(fits.sum(axis=1), at + 1), at)
        tokens = np.where(left, until[np.arange(replicas), stop - 1] - before, 0)
        clock_s = clock_s + prefill_s(system, layout, tokens, left)
        new = (np.arange(rows) >= at[:, None]) & (np.arange(rows) < stop[:, None])
        begun_s = np.where(new, clock_s[:, None], begun_s)
        at = stop
    s.generated_tokens[:] = 1
    s.finished_s[:] = np.where(s.response_tokens <= 1, begun_s.T.ravel()[:n], np.nan)
    running = np.flatnonzero(s.response_tokens > 1)
    return Fleet.of(system, layout, s, running, running % replicas, clock_s)


def prefill_s(system: System, layout: Layout, tokens: np.ndarray, left: np.ndarray) -> np.ndarray:
    """[R] seconds of a prefill pass of ``tokens`` [R]: chunks of the prefill budget, each with one host step; 0 where
    nothing is ``left``."""
    whole, rest = tokens // system.chunk_tokens, tokens % system.chunk_tokens
    device_s = whole * system.profile.prefill_s(layout.tp, float(system.chunk_tokens))
    device_s = device_s + system.profile.prefill_s(layout.tp, rest)
    host_s = system.profile.host.step_s(layout.tp, 1) * (whole + (rest > 0))
    return np.where(left, system.profile.host.combine(host_s, device_s), 0.0)


def switched(system: System, fleet: Fleet, now_s: float, decision: Switch) -> tuple[SwitchEvent, Fleet]:
    """All replicas stop at their next step boundary, wait for the last, and the new layout goes on."""
    old, new, s = fleet.layout, decision.layout, fleet.sequences
    running, origin, boundary_s = fleet.stop(now_s + system.reaction_s)
    barrier_s = max(now_s, float(boundary_s.max()))
    context = s.context_tokens(running)
    target = place(old, new, origin, context, Room(system.capacity_tokens[new]), system.switches.node)
    if (target < 0).any():
        raise Waits
    cost = system.switches.cost(old, new, context, origin, target)
    event = SwitchEvent(now_s, old, new, len(running), barrier_s - now_s, cost, decision.cost_s, decision.gain_s)
    return event, Fleet.of(system, new, s, running, target, np.full(new.dp, barrier_s + cost.total_s))
