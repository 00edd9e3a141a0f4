"""What a policy sees of a simulated rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from pat.correction import Observed
from pat.layout import Layout
from pat.policy import RolloutState


@dataclass(frozen=True, eq=False)
class View:
    """As :class:`pat.policy.RolloutState`, its arrays made when a policy asks for them: most questions end before.

    ``whole`` and ``steps`` make them, while the rollout stands where it was when the question was put.
    """

    time_s: float
    layout: Layout
    running: int
    context_sum: float
    waiting: int
    switches: int
    whole: Callable[[], RolloutState]
    steps: Callable[[], tuple[Observed, ...]]

    @cached_property
    def observed(self) -> tuple[Observed, ...]:
        return self.steps()

    @cached_property
    def _state(self) -> RolloutState:
        return self.whole()

    def __getattr__(self, name: str):
        return getattr(self._state, name)
