"""Step times of one layout as a table that answers single steps and whole runs of steps at once."""

from __future__ import annotations

from bisect import bisect_right
from math import floor

import numpy as np


class StepTable:
    """Decode step seconds by batch (row = number of sequences) and mean context, piecewise linear in the context.

    contexts_tokens [C] ascending integers; step_s [B + 1, C], row 0 all zero. Below the first context the first value
    holds; beyond the last the last slope continues. All questions are vectorised over arrays that broadcast.
    """

    def __init__(self, contexts_tokens: np.ndarray, step_s: np.ndarray) -> None:
        knots, values = np.asarray(contexts_tokens, dtype=np.int64), np.asarray(step_s, dtype=float)
        if knots[0] > 0:
            knots, values = np.r_[0, knots], np.hstack([values[:, :1], values])
        if len(knots) == 1:
            knots, values = np.r_[knots, knots + 1], np.hstack([values, values])
        width = np.diff(knots)
        slope = np.diff(values, axis=1) / width
        # Sum over the integers of one interval: n values from v, each `slope` above the one before.
        area = width * values[:, :-1] + slope * (width * (width - 1) / 2)
        self.knots = knots
        self.max_batch = len(values) - 1
        self._value = np.ascontiguousarray(values[:, :-1]).ravel()
        self._slope = slope.ravel()
        self._before = np.hstack([np.zeros((len(values), 1)), np.cumsum(area, axis=1)])[:, :-1].ravel()
        self._intervals = len(knots) - 1
        self._inner = knots[1:-1]
        self._inner_list, self._knots_list = self._inner.tolist(), knots.tolist()

    def _locate(self, batch, context):
        interval = np.searchsorted(self._inner, context, side="right")
        return np.asarray(batch, dtype=np.int64) * self._intervals + interval, context - self.knots[interval]

    def step_s(self, batch, context_tokens):
        """Seconds of one decode step."""
        flat, offset = self._locate(batch, np.asarray(context_tokens, dtype=float))
        return self._value[flat] + self._slope[flat] * offset

    def one_step_s(self, batch: int, context_tokens: float) -> float:
        """:meth:`step_s` of one point, without numpy's overhead: for decisions inside a running rollout."""
        interval = bisect_right(self._inner_list, context_tokens)
        flat = batch * self._intervals + interval
        return self._value.item(flat) + self._slope.item(flat) * (context_tokens - self._knots_list[interval])

    def _until_s(self, batch, context):
        """Sum of step times at contexts 0, 1, ... below ``context``; linear between integers."""
        whole = np.floor(context)
        flat, n = self._locate(batch, whole)
        value, slope = self._value[flat], self._slope[flat]
        return self._before[flat] + n * value + slope * (n * (n - 1) / 2) + (context - whole) * (value + slope * n)

    def run_s(self, batch, context_tokens, steps):
        """Seconds of ``steps`` consecutive decode steps that begin at mean context ``context_tokens``, which grows by
        one a step: the exact sum of :meth:`step_s` over them."""
        start = np.asarray(context_tokens, dtype=float)
        return self._until_s(batch, start + steps) - self._until_s(batch, start)

    def _one_until_s(self, batch: int, context: float) -> float:
        """:meth:`_until_s` of one point, without numpy's overhead."""
        whole = int(context)
        interval = bisect_right(self._inner_list, whole)
        flat, n = batch * self._intervals + interval, whole - self._knots_list[interval]
        before, value, slope = self._before.item(flat), self._value.item(flat), self._slope.item(flat)
        return before + n * value + slope * (n * (n - 1) / 2) + (context - whole) * (value + slope * n)

    def one_run_s(self, batch: int, context_tokens: float, steps: int) -> float:
        """:meth:`run_s` of one point, without numpy's overhead."""
        return self._one_until_s(batch, context_tokens + steps) - self._one_until_s(batch, context_tokens)

    def steps_within(self, batch: int, context_tokens: float, budget_s: float, guess: int | None = None) -> int:
        """How many whole steps (at least 0) fit into ``budget_s`` seconds: exact, by Newton's method from a guess."""
        one_s = self.one_step_s(batch, context_tokens)
        if one_s <= 0:
            raise ValueError(f"step table: a step of {batch} sequences takes {one_s} s")
        limit_s = self._one_until_s(batch, context_tokens) + budget_s
        steps = max(0, int(budget_s / one_s)) if guess is None else guess
        for _ in range(8):
            left_s = limit_s - self._one_until_s(batch, context_tokens + steps)
            shift = floor(left_s / self.one_step_s(batch, context_tokens + steps))
            if shift == 0:
                return steps
            steps = max(0, steps + shift)
        while steps and self._one_until_s(batch, context_tokens + steps) > limit_s:
            steps -= 1
        while self._one_until_s(batch, context_tokens + steps + 1) <= limit_s:
            steps += 1
        return steps
