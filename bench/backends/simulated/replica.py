"""One engine replica on the logical clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from bench.backends.simulated.admission import Admission
from pat.correction import Observed
from pat.layout import Layout
from pat.planner import known_course
from pat.profile import StepProfile
from pat.step_table import StepTable

NO_ONE = np.empty(0, dtype=np.int64)
HEAD = 64
"""Waiting sequences looked at first; all of them only where a prefill pass takes this many."""


def sums(values: np.ndarray) -> np.ndarray:
    """[n + 1] the sum of all ``values`` [n] before each, and of all."""
    out = np.zeros(len(values) + 1, dtype=values.dtype)
    np.cumsum(values, out=out[1:])
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """All sequences of a rollout, by index [N]. ``generated_tokens`` and ``finished_s`` change as it goes on."""

    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    generated_tokens: np.ndarray
    finished_s: np.ndarray

    @classmethod
    def of(cls, prompt_tokens: np.ndarray, response_tokens: np.ndarray) -> Sequences:
        prompt, response = (np.asarray(a, dtype=np.int64) for a in (prompt_tokens, response_tokens))
        return cls(prompt, response, np.zeros_like(prompt), np.full(len(prompt), np.nan))

    def context_tokens(self, ids: np.ndarray) -> np.ndarray:
        return self.prompt_tokens[ids] + self.generated_tokens[ids]


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The decode steps ahead until the running batch is disturbed. Segments [K] of equal batch.

    steps, batch, context_tokens (mean, at the segment's start), seconds: each [K]; until_steps, until_s [K + 1]: steps
    and seconds before each segment, and in all; the running sequences ``ids`` [n] in the order in which they end, with
    their remaining decode steps ``ends`` [n].
    """

    ids: np.ndarray
    ends: np.ndarray
    steps: np.ndarray
    batch: np.ndarray
    context_tokens: np.ndarray
    seconds: np.ndarray
    until_steps: np.ndarray
    until_s: np.ndarray


@dataclass(slots=True, eq=False)
class Replica:
    """Runs its sequences step by step: admission, prefill, decode, retraction where the KV cache is full.

    ``full``: the KV budget turned the head of the queue away; as in SGLang, nobody is admitted until one leaves.
    ``clock_s`` is the time of the last settled step boundary; ``schedule`` is what follows. ``log`` collects
    (kind, start seconds, steps, batch, mean context, seconds) of what has been settled, arrays of segments;
    ``asked`` the last answer of :meth:`_where`.
    """

    index: int
    layout: Layout
    sequences: Sequences
    profile: StepProfile
    admission: Admission
    clock_s: float = 0.0
    running: np.ndarray = field(default_factory=lambda: NO_ONE)
    queue: list[int] = field(default_factory=list)
    log: list[tuple] = field(default_factory=list)
    retractions: int = 0
    full: bool = False
    schedule: Schedule | None = None
    asked: tuple = (None, 0.0, None)

    @property
    def busy(self) -> bool:
        return self.schedule is not None

    @property
    def end_s(self) -> float:
        """When the present schedule ends."""
        return self.clock_s + float(self.schedule.until_s[-1])

    def start(self) -> None:
        """Admit what waits, retract where the next step would not fit, make the schedule from the present clock."""
        self._admit()
        if not self.admission.fits_next_step(self._context()):
            self._retract()
        self._make_schedule()

    def advance(self, until_s: float) -> None:
        """Settle every schedule that is over by ``until_s``; afterwards the schedule covers it, or nothing is left."""
        while self.schedule is not None and self.end_s <= until_s:
            self._settle(len(self.schedule.steps), int(self.schedule.until_steps[-1]))
            self.start()

    def stop(self, at_s: float) -> None:
        """Settle up to the first step boundary at or after ``at_s`` and drop the schedule."""
        self.advance(at_s)
        if self.schedule is None or at_s <= self.clock_s:
            self.schedule = None
            return
        plan, elapsed = self.schedule, at_s - self.clock_s
        segment = int(np.searchsorted(plan.until_s[1:], elapsed, side="left"))
        before_s, before = float(plan.until_s[segment]), int(plan.until_steps[segment])
        table, where = self._table(), (int(plan.batch[segment]), float(plan.context_tokens[segment]))
        whole = table.steps_within(*where, elapsed - before_s)
        if before_s + float(table.run_s(*where, whole)) < elapsed:
            whole += 1
        whole = min(whole, int(plan.steps[segment]))
        self._settle(segment, before + whole, partial_steps=whole)
        self.schedule = None

    def peek(self, at_s: float) -> tuple[np.ndarray, int]:
        """(ids still running, decode steps done since the clock) at ``at_s``, which the schedule covers."""
        if self.schedule is None:
            return NO_ONE, 0
        plan, (segment, into) = self.schedule, self._where(at_s)
        done = int(plan.until_steps[segment]) + into
        return plan.ids[plan.ends.searchsorted(done, side="right") :], done

    def standing(self, at_s: float) -> tuple[int, int]:
        """(sequences still running, their context tokens in all) at ``at_s``, which the schedule covers."""
        plan, (segment, into) = self.schedule, self._where(at_s)
        if into == plan.steps[segment]:  # rounding: some have just ended
            ids, done = self.peek(at_s)
            return len(ids), int(self.sequences.context_tokens(ids).sum()) + done * len(ids)
        batch = int(plan.batch[segment])
        return batch, round(float(plan.context_tokens[segment]) * batch) + batch * into

    def step_s(self, at_s: float) -> float:
        """Seconds of a decode step at ``at_s``, which the schedule covers."""
        plan, (segment, into) = self.schedule, self._where(at_s)
        return self._table().one_step_s(int(plan.batch[segment]), float(plan.context_tokens[segment]) + into)

    def observed(self, at_s: float) -> Observed:
        """The decode step at ``at_s``, which the schedule covers, as the engine would time it."""
        plan, (segment, into) = self.schedule, self._where(at_s)
        batch, context = int(plan.batch[segment]), float(plan.context_tokens[segment]) + into
        return Observed(batch, context, self._table().one_step_s(batch, context))

    def _table(self) -> StepTable:
        return self.profile.table(self.layout.tp, int(self.schedule.batch[0]))

    def _where(self, at_s: float) -> tuple[int, int]:
        """(segment of the schedule, whole steps done in it) at ``at_s``. Nothing of it depends on when it will end."""
        plan, elapsed_s = self.schedule, max(0.0, at_s - self.clock_s)
        if self.asked[0] is not plan or self.asked[1] != elapsed_s:
            segment = min(int(plan.until_s.searchsorted(elapsed_s, side="right")), len(plan.steps)) - 1
            into_s, steps = elapsed_s - float(plan.until_s[segment]), int(plan.steps[segment])
            guess = int(into_s / float(plan.seconds[segment]) * steps)
            where = int(plan.batch[segment]), float(plan.context_tokens[segment])
            into = min(self._table().steps_within(*where, into_s, guess), steps)
            self.asked = (plan, elapsed_s, (segment, into))
        return self.asked[2]

    def _context(self) -> np.ndarray:
        return self.sequences.context_tokens(self.running)

    def _admit(self) -> None:
        """Prefill passes from the head of the queue as the KV budget allows; each yields a token a sequence."""
        s = self.sequences
        while self.queue and not self.full:
            running, someone = self.running, len(self.running) > 0
            beside = self._context(), s.generated_tokens[running]
            for head in (HEAD, len(self.queue)):  # the pass seldom reaches beyond the first few
                waiting = np.asarray(self.queue[:head])
                asking = s.context_tokens(waiting), s.generated_tokens[waiting]
                count, turned_away = self.admission.admit(*asking, *beside)
                if count < head:
                    break
            self.full = turned_away and someone  # SGLang forgets it where the pass began with an empty batch
            if count:
                self._prefill(waiting[:count])
                self.queue = self.queue[count:]

    def _prefill(self, new: np.ndarray) -> None:
        s, count, tokens = self.sequences, len(new), int(self.sequences.context_tokens(new).sum())
        seconds = self._prefill_s(tokens)
        self.log.append(("extend", [self.clock_s], [1], [count], [tokens / count], [seconds]))
        self.clock_s += seconds
        s.generated_tokens[new] += 1
        over = s.generated_tokens[new] >= s.response_tokens[new]
        s.finished_s[new[over]] = self.clock_s
        self.running = np.concatenate([self.running, new[~over]])
        self.full &= not over.any()

    def _prefill_s(self, tokens: int) -> float:
        """Chunks of the prefill budget, each with one host step."""
        (whole, rest), tp, profile = divmod(tokens, self.admission.chunk_tokens), self.layout.tp, self.profile
        device_s = whole * profile.one_prefill_s(tp, self.admission.chunk_tokens) + profile.one_prefill_s(tp, rest)
        host_s = profile.host.step_s(tp, 1) * (whole + (rest > 0))
        return float(profile.host.combine(host_s, device_s))

    def _make_schedule(self) -> None:
        if len(self.running) == 0:
            self.schedule = None
            return
        s = self.sequences
        remaining = s.response_tokens[self.running] - s.generated_tokens[self.running]
        if self.queue:
            self.schedule = self._next_only(remaining)
            return
        order = np.argsort(remaining, kind="stable")
        ids, ends = self.running[order], remaining[order]
        course = known_course(ends, s.context_tokens(ids))
        steps, batch, context = course.steps.astype(np.int64), course.alive.astype(np.int64), course.context_tokens
        room = self.admission.room_steps(np.rint(context * batch).astype(np.int64), batch)
        short = np.flatnonzero(room < steps)
        if short.size:  # the KV cache fills up inside this segment, or before it
            last = int(short[0])
            steps = np.append(steps[:last], room[last]) if room[last] > 0 else steps[:last]
            batch, context = batch[: len(steps)], context[: len(steps)]
        table = self.profile.table(self.layout.tp, int(batch[0]))
        seconds = table.run_s(batch, context, steps)
        self.schedule = Schedule(ids, ends, steps, batch, context, seconds, sums(steps), sums(seconds))

    def _next_only(self, remaining: np.ndarray) -> Schedule:
        """While sequences wait, the schedule ends where one may leave and make room; after a retraction SGLang asks
        again at the next step. ``remaining``: decode steps of each running sequence [n]."""
        order = np.argsort(remaining, kind="stable")
        ids, ends, batch = self.running[order], remaining[order], len(remaining)
        total = int(self.sequences.context_tokens(ids).sum())
        steps = min(int(ends[0]) if self.full else 1, int(self.admission.room_steps(total, batch)))
        context = total / batch
        seconds = self.profile.table(self.layout.tp, batch).one_run_s(batch, context, steps)
        return Schedule(
            ids,
            ends,
            np.array([steps]),
            np.array([batch]),
            np.array([context]),
            np.array([seconds]),
            np.array([0, steps]),
            np.array([0.0, seconds]),
        )

    def _settle(self, segments: int, steps: int, partial_steps: int = 0) -> None:
        """Make the first ``segments`` segments, and ``partial_steps`` of the next, history: ``steps`` in all."""
        plan = self.schedule
        count, seconds = plan.steps[:segments], plan.seconds[:segments]
        if segments == 1 and not partial_steps:
            self._settle_one(steps)
            return
        if partial_steps:
            last_s = self._table().run_s(int(plan.batch[segments]), plan.context_tokens[segments], partial_steps)
            count, seconds = np.append(count, partial_steps), np.append(seconds, last_s)
        n, until_s = len(count), sums(seconds)
        start_s = self.clock_s + until_s[:-1]
        self.log.append(("decode", start_s, count, plan.batch[:n], plan.context_tokens[:n], seconds))
        s = self.sequences
        s.generated_tokens[plan.ids] += np.minimum(plan.ends, steps)
        over = np.searchsorted(plan.ends, steps, side="right")
        boundary = np.searchsorted(np.cumsum(count), plan.ends[:over])
        s.finished_s[plan.ids[:over]] = self.clock_s + until_s[1 + boundary]
        self.running = plan.ids[over:]
        self.full &= over == 0
        self.clock_s += float(until_s[-1])
        self.admission.decoded(steps)

    def _settle_one(self, steps: int) -> None:
        """:meth:`_settle` of the first segment, without arrays of one element: while sequences wait, all are such."""
        plan, s = self.schedule, self.sequences
        start_s = np.array([self.clock_s])
        self.log.append(("decode", start_s, plan.steps[:1], plan.batch[:1], plan.context_tokens[:1], plan.seconds[:1]))
        self.clock_s += float(plan.seconds[0])
        s.generated_tokens[plan.ids] += steps
        over = int(plan.ends.searchsorted(steps, side="right"))
        s.finished_s[plan.ids[:over]] = self.clock_s
        self.running = plan.ids[over:]
        self.full &= over == 0
        self.admission.decoded(steps)

    def _retract(self) -> None:
        """Put back the sequences with the fewest response tokens (then the longest prompts) until a step fits. Equals
        go by their index: the order of ``running`` knows who ends first, which no engine does."""
        s = self.sequences
        order = (self.running, s.prompt_tokens[self.running], -s.generated_tokens[self.running])
        keep = self.running[np.lexsort(order)]
        count = self.admission.kept(s.context_tokens(keep))
        keep, back = keep[:count], keep[count:]
        self.queue.extend(back[::-1].tolist())
        self.retractions += len(back)
        self.running = keep
        self.full = False
        self.admission.retracted(s.generated_tokens[keep])
