"""The oracle: it knows the length of every response, which no policy can, and searches the best schedule for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from pat.layout import Layout
from pat.planner import Outlook, known_course
from pat.policy import RolloutState

SHIFTS = (0.7, 0.85, 0.93, 0.97, 1.03, 1.07, 1.15, 1.3)
"""What the time of a switch is multiplied by in the search."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A first layout, and (seconds from the start, layout) of each switch."""

    first: Layout
    hops: tuple[tuple[float, Layout], ...] = ()


@dataclass(frozen=True, eq=False)
class Clairvoyant:
    """Foresight with the true prompt and response lengths [N] of the rollout, by sequence index."""

    prompt_tokens: np.ndarray
    response_tokens: np.ndarray

    def at_start(self, prompt_tokens: np.ndarray) -> Outlook:
        return known_course(self.response_tokens, prompt_tokens)

    def during(self, state: RolloutState) -> Outlook:
        """Sequences that wait count as not begun."""
        running = self.response_tokens[state.sequence_ids] - state.generated_tokens
        waiting = state.waiting_ids
        return known_course(
            np.maximum(np.concatenate([running, self.response_tokens[waiting]]), 1),
            np.concatenate([state.context_tokens, self.prompt_tokens[waiting]]),
        )

    def sample(self, sequences: int) -> np.ndarray:
        return self.response_tokens


def search(
    seconds: Callable[[Schedule], float], starts: Iterable[Schedule], layouts: tuple[Layout, ...], trials: int = 60
) -> Schedule:
    """The fastest schedule found from the best of ``starts``, by at most ``trials`` calls of ``seconds``.

    Descent by neighbours: a switch earlier or later, left out, to another layout; another first layout. It is never
    worse than any of the starts; how far it is from the true optimum is not known.
    """
    known: dict[Schedule, float] = {}

    def of(schedule: Schedule) -> float:
        if schedule not in known:
            known[schedule] = seconds(schedule)
        return known[schedule]

    best = min(starts, key=of)
    trials += len(known)
    improved = True
    while improved and len(known) < trials:
        improved = False
        for neighbour in neighbours(best, layouts):
            if len(known) >= trials:
                break
            if neighbour not in known and of(neighbour) < known[best]:
                best, improved = neighbour, True
                break
    return best


def neighbours(schedule: Schedule, layouts: tuple[Layout, ...]) -> Iterable[Schedule]:
    """Schedules one change away; times stay in order, and no switch goes to the layout it comes from."""
    hops = schedule.hops
    for i, (time_s, layout) in enumerate(hops):
        low = hops[i - 1][0] if i else 0.0
        high = hops[i + 1][0] if i + 1 < len(hops) else np.inf
        for shift in SHIFTS:
            if low < time_s * shift < high:
                yield Schedule(schedule.first, (*hops[:i], (time_s * shift, layout), *hops[i + 1 :]))
    for i in range(len(hops)):
        yield from proper(Schedule(schedule.first, hops[:i] + hops[i + 1 :]))
    for layout in layouts:
        yield from proper(Schedule(layout, hops))


def proper(schedule: Schedule) -> Iterable[Schedule]:
    """The schedule, unless a switch of it goes nowhere."""
    courses = [schedule.first, *(layout for _, layout in schedule.hops)]
    if all(a != b for a, b in itertools.pairwise(courses)):
        yield schedule
