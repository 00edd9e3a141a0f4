"""Planner: predicted remaining time under each layout, and the best schedule of switches."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from pat.layout import Layout
from pat.lengths import LengthModel, expected_alive
from pat.profile import StepProfile
from pat.switch_cost import SwitchModel

SEGMENTS = 64
WHOLE_RESERVE = 1 / 0.7
"""SGLang reserves the whole of its clip, not 0.7 of it, for each request of the prefill pass under way."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of the rest of a rollout, in K segments of decode steps.

    steps             [K] decode steps in each segment
    busy              [K] probability that any sequence is still running
    alive             [K] sequences running, given that any is
    context_tokens    [K] mean context at the start of the segment
    """

    steps: np.ndarray
    busy: np.ndarray
    alive: np.ndarray
    context_tokens: np.ndarray

    def lives(self) -> tuple[np.ndarray, np.ndarray]:
        """[K] both: mean remaining tokens of a sequence running at the start of each segment, and the mean context of a
        running sequence from there on, each of its decode steps counted alike."""
        sequence_steps = np.maximum(self.steps * self.busy * self.alive, 1e-9)
        to_come = from_here(sequence_steps)
        context = from_here(sequence_steps * (self.context_tokens + self.steps / 2)) / to_come
        return to_come / np.maximum(self.busy * self.alive, 1e-9), context


def from_here(values: np.ndarray) -> np.ndarray:
    """[K] sum of each value and all that follow it."""
    return np.cumsum(values[::-1])[::-1]


@dataclass(frozen=True, slots=True)
class Plan:
    """The best way on from a layout. ``hops``: (decode steps from now, layout) of each switch, in order.

    ``half_s``: half of the 90% interval of ``stay_s - best_s``, from those of the profile's step times.
    """

    stay_s: float
    best_s: float
    hops: tuple[tuple[float, Layout], ...]
    first_cost_s: float = 0.0
    half_s: float = 0.0

    @property
    def now(self) -> Layout | None:
        """The layout to switch to at once, if any."""
        return self.hops[0][1] if self.hops and self.hops[0][0] == 0 else None


def outlook(lengths: LengthModel, generated_tokens: np.ndarray, context_tokens: float) -> Outlook:
    """Expected course of the running sequences [n], by the length model's survival curve."""
    ahead_max = max(1.0, lengths.cap_tokens - float(generated_tokens.min()))
    at = segment_edges(ahead_max)
    alive = expected_alive(lengths.edges_tokens, lengths.survival(), generated_tokens, at)
    return expected_course(at, 0.5 * (alive[:-1] + alive[1:]), context_tokens, len(generated_tokens))


@lru_cache(maxsize=1 << 15)
def segment_edges(ahead_max: float) -> np.ndarray:
    """Step counts from 0 to ``ahead_max`` between which an outlook has its segments: geometric, whole, no two alike."""
    return np.unique(np.concatenate([[0.0], np.geomspace(1.0, ahead_max, SEGMENTS).round()]))


def expected_course(at: np.ndarray, alive: np.ndarray, context_tokens: float, sequences: int) -> Outlook:
    """The outlook of ``alive`` [K] expected, of ``sequences`` now, between the step counts ``at`` [K + 1].

    They end independently: with p = alive / sequences, busy = 1 - (1 - p)^sequences.
    """
    busy = -np.expm1(sequences * np.log1p(-np.minimum(alive / sequences, 1.0 - 1e-12)))
    return Outlook(np.diff(at), busy, np.maximum(alive / np.maximum(busy, 1e-12), 1.0), context_tokens + at[:-1])


def known_course(remaining_tokens: np.ndarray, context_tokens: np.ndarray) -> Outlook:
    """The outlook of a clairvoyant: the remaining length of every sequence is known. [n] both."""
    order = np.argsort(remaining_tokens, kind="stable")
    remaining, context = remaining_tokens[order], np.asarray(context_tokens, dtype=float)[order]
    at = np.unique(np.r_[0, remaining])
    alive = len(remaining) - np.searchsorted(remaining, at[:-1], side="right")
    tail_context = np.cumsum(context[::-1])[::-1]
    mean = tail_context[len(remaining) - alive] / alive + at[:-1]
    return Outlook(np.diff(at).astype(float), np.ones(len(alive)), alive.astype(float), mean)


@dataclass(frozen=True, eq=False)
class Planner:
    """Compares layouts for one model and machine.

    capacity_tokens            KV tokens that one replica of each layout can hold
    admission_reserve_tokens   what the engine wants free for each request it admits to a new rollout, beside its
                               prompt: SGLang's new-token ratio 0.7 of its clip of 4,096
    step_factor, switch_factor what predicted seconds are multiplied by, see :mod:`pat.correction`
    """

    profile: StepProfile
    switches: SwitchModel
    layouts: tuple[Layout, ...]
    capacity_tokens: dict[Layout, int]
    admission_reserve_tokens: float = 0.7 * 4096
    step_factor: dict[Layout, float] = field(default_factory=dict)
    switch_factor: float = 1.0

    def replica_step_s(self, layout: Layout, batch: int, context_tokens: float) -> float:
        """Predicted seconds of a decode step of one replica with ``batch`` sequences, without correction."""
        return self.profile.table(layout.tp, batch).one_step_s(batch, context_tokens)

    def step_s(self, layout: Layout, alive: int, context_tokens: float) -> float:
        """Seconds for all ``alive`` sequences to advance by a token: one step, or more where the KV cache is short."""
        batch = -(-alive // layout.dp)
        fits = max(1, int(self.capacity_tokens[layout] / context_tokens))
        run = min(batch, fits)
        return self.replica_step_s(layout, run, context_tokens) * batch / run * self.step_factor.get(layout, 1.0)

    def segment_s(self, ahead: Outlook, fresh: bool = False) -> np.ndarray:
        """[L, K] expected seconds of each segment under each layout.

        A layout's time is that of the replica with the longest sequence. It begins with n / dp of the n sequences; of
        the others there, each is alive with probability (alive - 1) / (n - 1). At most as many run as its KV cache
        holds. Fractions are averaged between whole batches. What the others wait for comes on top, see
        :meth:`queue_s`.
        """
        now, dp = float(ahead.alive[0]), np.array([[a.dp] for a in self.layouts])
        beside = np.maximum(0.0, now / dp - 1.0) / max(1.0, now - 1.0)
        batch = np.minimum(1.0 + (ahead.alive - 1.0) * beside, self.concurrent(ahead, fresh))
        low, out = np.floor(batch), np.empty_like(batch)
        for i, (layout, most) in enumerate(zip(self.layouts, batch.max(axis=1).tolist(), strict=True)):
            table = self.profile.table(layout.tp, int(most) + 1)
            low_s, high_s = table.run_s(np.stack([low[i], low[i] + 1]), ahead.context_tokens, ahead.steps)
            out[i] = low_s + (batch[i] - low[i]) * (high_s - low_s)
        return ahead.busy * out * self._factors()

    def concurrent(self, ahead: Outlook, fresh: bool) -> np.ndarray:
        """[L, K] sequences that a replica's KV cache holds at once if all go on together from the start of each
        segment: capacity / the greatest context to come, weighted by the share then alive. At least one.

        ``fresh``: a rollout yet to begin, where the engine admits only as many as its reserve for each allows.
        """
        alive = np.maximum(ahead.alive * ahead.busy, 1e-9)
        load = alive * (ahead.context_tokens + ahead.steps)
        peak_tokens = np.maximum.accumulate(load[::-1])[::-1] / alive
        if fresh:
            peak_tokens[0] = max(peak_tokens[0], ahead.context_tokens[0] + self.admission_reserve_tokens)
        return np.maximum(1.0, np.array([[self.capacity_tokens[a]] for a in self.layouts]) / peak_tokens)

    def queue_s(self, ahead: Outlook, fresh: bool = False) -> np.ndarray:
        """[L, K] seconds until the last sequence has begun, in a layout entered at the start of each segment.

        Those that do not fit wait; as sequences of all ages then run side by side, capacity / mean context of them
        do, and as many end in each mean remaining length. 0 where all fit.
        """
        dp = np.array([[a.dp] for a in self.layouts])
        waiting = ahead.alive * ahead.busy / dp - self.concurrent(ahead, fresh)
        out, queues = np.zeros_like(waiting), np.flatnonzero((waiting > 0).any(axis=1))
        remaining_tokens, context_tokens = ahead.lives() if len(queues) else (None, None)
        for i in queues:
            layout = self.layouts[i]
            mixed = np.maximum(1.0, self.capacity_tokens[layout] / context_tokens)
            running = np.where(waiting[i] > 0, np.ceil(mixed), 1).astype(int)
            step_s = self.profile.table(layout.tp, int(running.max())).step_s(running, context_tokens)
            step_s = step_s * self.step_factor.get(layout, 1.0)
            out[i] = np.maximum(waiting[i], 0.0) / mixed * remaining_tokens * step_s
        return out

    def _factors(self) -> np.ndarray:
        return np.array([[self.step_factor.get(a, 1.0)] for a in self.layouts])

    def may_queue(self, ahead: Outlook) -> bool:
        """Whether in some layout not all sequences of a new rollout may begin at once: the engine keeps
        :data:`WHOLE_RESERVE` of the reserve free for those of the same prefill pass."""
        begins = ahead.context_tokens[0] + WHOLE_RESERVE * self.admission_reserve_tokens
        load = ahead.alive * ahead.busy * (ahead.context_tokens + ahead.steps)
        each = max(begins, float(load.max() / ahead.alive[0]))
        return any(each * ahead.alive[0] / a.dp > self.capacity_tokens[a] for a in self.layouts)

    def ends_together(self, ahead: Outlook) -> bool:
        """Whether in every layout a sequence of each replica is expected to reach the cap: then the fullest replica
        decides, not that of the longest sequence."""
        return bool(ahead.alive[-1] * ahead.busy[-1] > max(a.dp for a in self.layouts))

    def switch_s(self, ahead: Outlook) -> np.ndarray:
        """[L, L, K] expected seconds of a switch between every two layouts at the start of each segment."""
        seconds = self.switches.estimates_s(self.layouts, ahead.alive, ahead.context_tokens)
        return seconds * (ahead.busy * self.switch_factor)

    def plan(self, layout: Layout, ahead: Outlook, max_hops: int = 3) -> Plan:
        """The schedule with the least expected time that begins in ``layout`` and has at most ``max_hops`` switches."""
        return self.plans(ahead, max_hops)[layout]

    def plans(
        self, ahead: Outlook, max_hops: int = 3, fresh: bool = False, earliest_steps: int = 0
    ) -> dict[Layout, Plan]:
        """The best schedule from every layout.

        With A the time from now to segment j in a layout, and W_h(j, L) = min over L' of switch(L -> L', j) plus the
        best with h - 1 hops left: best_h(k, L) = min over j >= k of A(j) - A(k) + W_h(j, L), and never switching is
        j = K. Exact for the outlook given, O(hops x L^2 x K), no loop over segments. Hops before ``earliest_steps`` are
        not considered.
        """
        queue = self.queue_s(ahead, fresh)
        segment_s = self.segment_s(ahead, fresh)
        rows, columns = np.ogrid[: segment_s.shape[0], : segment_s.shape[1]]
        spent = np.zeros((len(rows), segment_s.shape[1] + 1))  # A [L, K + 1]
        np.cumsum(segment_s, axis=1, out=spent[:, 1:])
        spent[:, 1:] += queue[:, :1]  # staying beyond now costs the queue's delay, as does entering later:
        switch = self.switch_s(ahead)
        switch[:, :, 1:] += queue[:, 1:]
        if earliest_steps:
            switch[:, :, np.cumsum(ahead.steps) - ahead.steps < earliest_steps] = np.inf
        total = spent[:, -1:]
        best = total - spent[:, :-1]  # no hop left: [L, K]
        chosen: list[tuple[np.ndarray, np.ndarray]] = []
        for _ in range(max_hops):
            after = switch + best[None, :, :]  # from, to, segment
            after[rows[:, 0], rows[:, 0]] = np.inf
            target = after.argmin(axis=1)  # [L, K]
            reach = spent[:, :-1] + after[rows, target, columns]
            when = reversed_argmin(reach)  # [L, K]: the best segment >= k to switch in
            best_reach = reach[rows, when]
            switching = best_reach < total
            when = np.where(switching, when, -1)
            best = np.where(switching, best_reach, total) - spent[:, :-1]
            chosen.append((when, target))
        return {
            layout: self._trace(here, ahead, float(total[here, 0]), float(best[here, 0]), chosen, switch, segment_s)
            for here, layout in enumerate(self.layouts)
        }

    def _trace(self, here, ahead, stay_s, best_s, chosen, switch, segment_s) -> Plan:
        """Follow the choices from the first segment on."""
        starts = np.cumsum(ahead.steps) - ahead.steps
        course = [(0, here)]
        hops, segment, first_cost_s = [], 0, 0.0
        for when, target in reversed(chosen):
            j = int(when[here, segment])
            if j < 0:
                break
            there = int(target[here, j])
            if not hops:
                first_cost_s = float(switch[here, there, j])
            hops.append((float(starts[j]), self.layouts[there]))
            here, segment = there, j
            course.append((j, there))
        return Plan(stay_s, best_s, tuple(hops), first_cost_s, self._half_s(segment_s, course))

    def _half_s(self, segment_s: np.ndarray, course: list[tuple[int, int]]) -> float:
        """Of the difference between staying and a course of (segment, layout): where the two differ, errors of step
        times are taken to be independent from segment to segment, so their squares add up."""
        halves = [self.profile.grids[a.tp].half_interval for a in self.layouts]
        if len(course) == 1 or not any(halves):
            return 0.0
        squares, stay = (np.array(halves)[:, None] * segment_s) ** 2, course[0][1]
        ends = [j for j, _ in course[1:]] + [segment_s.shape[1]]
        spans = zip(course, ends, strict=True)
        return float(sum((squares[a, i:j] + squares[stay, i:j]).sum() for (i, a), j in spans if a != stay)) ** 0.5

    def first_layout(
        self, ahead: Outlook, prompt_tokens: float, max_hops: int = 3, earliest_steps: int = 0
    ) -> tuple[Layout, Plan]:
        """The layout to begin a rollout in, prefill of ``prompt_tokens`` in all included, and the plan from there."""
        plans = self.plans(ahead, max_hops, fresh=True, earliest_steps=earliest_steps)
        first = min(self.layouts, key=lambda a: (self._begin_s(a, prompt_tokens) + plans[a].best_s, a.tp))
        return first, plans[first]

    def first_layouts(
        self, ahead: Outlook, prompt_tokens: float, max_hops: int, earliest_steps: int, early_share: float
    ) -> list[Layout]:
        """Layouts to begin a rollout in, the best first. One that is to be left at the first chance gives way to one
        that is not and takes at most ``early_share`` longer."""
        plans = self.plans(ahead, max_hops, fresh=True, earliest_steps=earliest_steps)
        starts = np.cumsum(ahead.steps) - ahead.steps
        soon = float(min(starts[starts >= earliest_steps], default=0.0))

        def seconds(a: Layout) -> float:
            early = bool(plans[a].hops) and plans[a].hops[0][0] <= soon
            return self._begin_s(a, prompt_tokens) + plans[a].best_s * (1.0 + early_share * early)

        return sorted(self.layouts, key=lambda a: (seconds(a), a.tp))

    def _begin_s(self, layout: Layout, prompt_tokens: float) -> float:
        """Prefill of a replica's share of all prompt tokens."""
        return float(self.profile.prefill_s(layout.tp, prompt_tokens / layout.dp))


def reversed_argmin(values: np.ndarray) -> np.ndarray:
    """[L, K] for each k the index j >= k of the smallest value; the earliest of equals."""
    flipped = values[:, ::-1]
    lowest = np.minimum.accumulate(flipped, axis=1)
    is_new = np.empty(flipped.shape, dtype=bool)
    is_new[:, 0] = True
    is_new[:, 1:] = flipped[:, 1:] <= lowest[:, :-1]
    index = np.maximum.accumulate(np.where(is_new, np.arange(values.shape[1]), 0), axis=1)
    return (values.shape[1] - 1 - index)[:, ::-1]
