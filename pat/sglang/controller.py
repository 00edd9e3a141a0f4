"""The controller in the engine's process: gathers the replicas' reports, asks the policy, orders switches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pat.correction import Observed
from pat.layout import Layout
from pat.policy import Keep, Policy, RolloutState, Switch
from pat.sglang.guard import EngineDied
from pat.sglang.reports import Steps

JOIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Decision:
    """One question to the policy: when (since the rollout's begin), on what, the answer, and the seconds it took."""

    time_s: float
    layout: Layout
    alive: int
    answer: Keep | Switch
    decide_s: float


class Controller:
    """Runs in a thread of its own during a rollout.

    switch     goes to a layout, as AdaptiveEngine.switch
    layout     the present layout
    epoch      number of the last switch, as in reports; those of an earlier epoch tell only who has ended
    in_flight  requests submitted and not answered; reports that do not cover as many are not complete yet
    """

    def __init__(
        self,
        policy: Policy,
        switch: Callable[[Layout], object],
        layout: Callable[[], Layout],
        epoch: Callable[[], int],
        in_flight: Callable[[], int],
    ) -> None:
        self.policy, self.switch, self.layout, self.epoch, self.in_flight = policy, switch, layout, epoch, in_flight
        self.decisions: list[Decision] = []
        self.error: Exception | None = None
        self._latest: dict[int, Steps] = {}
        self._came_s: dict[int, float] = {}
        self._observed: dict[int, Observed] = {}
        self._finished: list[int] = []
        self._begin_s = 0.0
        self._reports_s: dict[int, float] = {}
        self._switches = 0
        self._news, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, prompt_tokens: np.ndarray) -> None:
        """A rollout begins: go to the layout that the policy wants to begin in. Nothing must be running."""
        self.decisions, self.error = [], None
        self._latest, self._came_s, self._observed, self._finished, self._switches = {}, {}, {}, [], 0
        self._reports_s = {}
        first = self.policy.first_layout(np.asarray(prompt_tokens))
        if first != self.layout():
            self.switch(first)
        self._begin_s = time.monotonic()
        self._news.clear()
        self._over.clear()
        if self.policy.interval_steps is not None:
            self._thread = threading.Thread(target=self._run, name="pat-controller", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """The rollout is over. Raises what went wrong in the policy meanwhile; the answers are not affected."""
        self._over.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join(timeout=JOIN_S)
            self._thread = None
        if self.error is not None:
            raise self.error

    @property
    def reports_s(self) -> float:
        """Seconds of this rollout that the replica which spent most has spent on reports."""
        return max(self._reports_s.values(), default=0.0)

    def take(self, report: Steps) -> None:
        """A replica's report, in the thread that receives it.

        The last one of an earlier rollout may come after its answers: it is left out.
        """
        if report.sent_s < self._begin_s:
            return
        now_s, before = time.monotonic(), self._latest.get(report.replica)
        self._finished += report.finished
        self._reports_s[report.replica] = self._reports_s.get(report.replica, 0.0) + report.own_s
        if before is not None and (seen := timed(before, report, now_s - self._came_s[report.replica])):
            self._observed[report.replica] = seen
        self._latest[report.replica], self._came_s[report.replica] = report, now_s
        self._news.set()

    def state(self) -> RolloutState | None:
        """The rollout as reported; None while a replica has not told of requests that are in flight."""
        layout, epoch = self.layout(), self.epoch()
        reports = [report for report in dict(self._latest).values() if report.epoch == epoch]
        generated = np.array([n for r in reports for n in r.generated])
        waiting = sum(r.waiting for r in reports)
        if len(generated) + waiting < self.in_flight():
            return None
        return RolloutState(
            time_s=time.monotonic() - self._begin_s,
            layout=layout,
            generated_tokens=generated,
            context_tokens=np.array([n for r in reports for n in r.context]),
            waiting=waiting,
            finished_tokens=np.array(self._finished),
            switches=self._switches,
            observed=tuple(o for d, o in dict(self._observed).items() if d in {r.replica for r in reports}),
        )

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._news.wait()
                self._news.clear()
                state = self.state()
                if state is not None and state.running and not self._over.is_set():
                    self._ask(state)
        except EngineDied:
            return  # the requests in flight tell
        except Exception as error:
            self.error = error

    def _ask(self, state: RolloutState) -> None:
        start_s = time.perf_counter()
        answer = self.policy.decide(state)
        decide_s = time.perf_counter() - start_s
        self.decisions.append(Decision(state.time_s, state.layout, state.running, answer, decide_s))
        if isinstance(answer, Switch) and answer.layout != state.layout:
            start_s = time.monotonic()
            self.switch(answer.layout)
            self._observed = {}  # of the old layout
            self._switches += 1
            self.policy.switched(answer.cost_s, time.monotonic() - start_s)


def timed(before: Steps, after: Steps, seconds: float) -> Observed | None:
    """The mean decode step between two reports of a replica, and its mean batch; None where a sequence began meanwhile
    (a prefill was among the steps) or the layout changed.

    Of those that ended, contexts are not known: the mean is that of the sequences before and after.
    """
    steps, ended = after.step - before.step, len(after.finished)
    if before.epoch != after.epoch or steps <= 0 or not after.generated:
        return None
    if len(before.generated) != len(after.generated) + ended:
        return None
    tokens = sum(after.generated) + sum(after.finished) - sum(before.generated)
    most = steps * len(before.generated)
    if tokens != most and not (ended and 0 < tokens < most):
        return None
    context = (sum(before.context) / len(before.context) + sum(after.context) / len(after.context)) / 2
    return Observed(max(1, round(tokens / steps)), context, seconds / steps)
