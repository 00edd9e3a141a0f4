"""A rollout on the server: gathers VeRL's requests, which come one by one, and puts them under one policy decision."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pat.policy import Policy
from pat.sglang.engine import AdaptiveEngine, SwitchVetoed
from pat.verl.policies import PolicyChoice
from pat.verl.records import RolloutRecord

log = logging.getLogger(__name__)


@dataclass
class Request:
    """One request of a rollout. ``place`` in the batch; ``response_tokens`` once it is answered."""

    place: int
    prompt: Sequence[int]
    response_tokens: int = 0


@dataclass
class Open:
    """The rollout in progress: its requests so far, how many are out, and whether generation may begin."""

    begin_s: float
    requests: list[Request]
    out: int
    begun: asyncio.Future
    news: asyncio.Event
    gather_s: float = 0.0
    start: str = ""
    switches_before: int = 0
    expected_s: float | None = None
    error: str | None = None


class Rollouts:
    """Opens a rollout with the first request that finds none, closes it with the last answer.

    Requests wait until ``expected`` have come or none has for ``quiet_s``: the policy wants to know all prompts, and
    arms shall begin alike. Later ones (a second turn) join. A policy or a switch that fails leaves the rollout in the
    layout it has, with a warning and the record's ``error``; a failed engine fails the requests.
    """

    def __init__(self, engine: AdaptiveEngine, choice: PolicyChoice, expected: int | None, quiet_s: float) -> None:
        self.engine, self.choice, self.expected, self.quiet_s = engine, choice, expected, quiet_s
        self.iteration = 0
        self.current: Open | None = None
        self.closed: list[RolloutRecord] = []
        """Those not yet taken by :meth:`take_closed`."""
        self._closing = asyncio.Lock()

    @asynccontextmanager
    async def request(self, place: int | None, prompt: Sequence[int]):
        """While the block runs, a request is out. Yields it; the block sets its ``response_tokens``."""
        async with self._closing:
            if self.current is None:
                self.current = Open(time.time(), [], 0, asyncio.get_running_loop().create_future(), asyncio.Event())
                self._opening = asyncio.create_task(self._begin(self.current))
            rollout = self.current
            request = Request(len(rollout.requests) if place is None else place, prompt)
            rollout.requests.append(request)
            rollout.out += 1
            rollout.news.set()
        try:
            await asyncio.shield(rollout.begun)
            yield request
        finally:
            async with self._closing:
                rollout.out -= 1
                if rollout.out == 0 and rollout.begun.done():
                    await self._end(rollout)

    def take_closed(self) -> list[RolloutRecord]:
        """Records of the rollouts closed since the last call."""
        closed, self.closed = self.closed, []
        return closed

    async def _begin(self, rollout: Open) -> None:
        try:
            while self.expected is None or len(rollout.requests) < self.expected:
                rollout.news.clear()
                try:
                    await asyncio.wait_for(rollout.news.wait(), self.quiet_s)
                except TimeoutError:
                    if self.expected is None or time.time() - rollout.begin_s > 100 * self.quiet_s:
                        break
            prompts = np.array([len(request.prompt) for request in rollout.requests])
            policy = self.choice.next()
            await asyncio.to_thread(self._enter, rollout, policy, prompts)
            rollout.gather_s = time.time() - rollout.begin_s
            rollout.begun.set_result(None)
        except BaseException as error:
            rollout.begun.set_exception(error)

    def _enter(self, rollout: Open, policy: Policy, prompt_tokens: np.ndarray) -> None:
        controller = self.engine.controller
        controller.policy = policy
        try:
            controller.begin(prompt_tokens)
        except SwitchVetoed as veto:
            rollout.error = str(veto)
            log.warning("rollout %d begins in %s: %s", self.iteration, self.engine.layout, veto)
        rollout.start, rollout.switches_before = str(self.engine.layout), len(self.engine.records)
        rollout.expected_s = self.choice.expected_s(policy, self.engine.layout, prompt_tokens)

    async def _end(self, rollout: Open) -> None:
        self.current = None
        if rollout.begun.exception() is not None:
            return
        end_s = time.time()
        try:
            await asyncio.to_thread(self.engine.controller.end)
        except Exception as error:
            rollout.error = rollout.error or f"{type(error).__name__}: {error}"
            log.warning("rollout %d went on in %s: %s", self.iteration, self.engine.layout, rollout.error)
        requests = sorted(rollout.requests, key=lambda request: request.place)
        record = RolloutRecord(
            iteration=self.iteration,
            begin_s=rollout.begin_s,
            end_s=end_s,
            gather_s=rollout.gather_s,
            start=rollout.start,
            end=str(self.engine.layout),
            places=[request.place for request in requests],
            prompt_tokens=[len(request.prompt) for request in requests],
            response_tokens=[request.response_tokens for request in requests],
            prompts=[prompt_hash(request.prompt) for request in requests],
            switches=[switch.as_row() for switch in self.engine.records[rollout.switches_before :]],
            decisions=[decision_row(decision) for decision in self.engine.controller.decisions],
            reports_s=self.engine.controller.reports_s,
            expected_s=rollout.expected_s,
            lengths_known=self.choice.lengths_known,
            error=rollout.error,
        )
        self.closed.append(record)
        self.choice.learn(record.response_tokens)


def prompt_hash(prompt: Sequence[int]) -> str:
    """Twelve hex digits of a prompt's tokens."""
    return hashlib.sha256(np.asarray(prompt, dtype=np.int64).tobytes()).hexdigest()[:12]


def decision_row(decision: Any) -> dict[str, Any]:
    """A controller's Decision as JSON."""
    answer = asdict(decision.answer) | {"kind": type(decision.answer).__name__}
    if "layout" in answer:
        answer["layout"] = str(decision.answer.layout)
    return {
        "time_s": decision.time_s,
        "layout": str(decision.layout),
        "alive": decision.alive,
        "decide_s": decision.decide_s,
        "answer": answer,
    }
