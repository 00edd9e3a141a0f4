"""The controller without an engine: it asks on complete news only, switches once, and tells what went wrong."""

import threading

import numpy as np
import pytest

from pat.correction import Observed
from pat.layout import Layout
from pat.policy import Switch
from pat.sglang.controller import Controller, timed
from pat.sglang.guard import EngineDied
from pat.sglang.reports import Steps
from tests.sglang_live.conftest import SwitchBelow

LOW, HIGH = Layout(1, 2), Layout(2, 1)


class FakeEngine:
    def __init__(self) -> None:
        self.layout, self.epoch, self.in_flight, self.switched = LOW, 0, 0, threading.Event()

    def switch(self, layout) -> None:
        self.layout, self.epoch = layout, self.epoch + 1
        self.switched.set()


def report(replica, epoch, generated, finished=(), waiting=0):
    return Steps(replica, epoch, 8, list(generated), [n + 10 for n in generated], list(finished), waiting)


def controlled(policy):
    engine = FakeEngine()
    return engine, Controller(
        policy, engine.switch, lambda: engine.layout, lambda: engine.epoch, lambda: engine.in_flight
    )


def test_waits_for_all_replicas_then_switches():
    policy = SwitchBelow(4, LOW, HIGH)
    engine, controller = controlled(policy)
    engine.in_flight = 4
    controller.begin(np.array([10] * 4))
    controller.take(report(0, 0, [5, 6]))
    assert controller.state() is None  # replica 1 has not told of its two
    controller.take(report(1, 0, [7, 8]))
    state = controller.state()
    assert sorted(state.generated_tokens) == [5, 6, 7, 8]
    assert sorted(state.context_tokens) == [15, 16, 17, 18]
    engine.in_flight = 2
    controller.take(report(1, 0, [], finished=[9, 9]))
    assert engine.switched.wait(5)
    assert engine.layout == HIGH
    controller.take(report(1, 0, [1, 1]))  # late news of before the switch
    assert controller.state() is None
    controller.take(report(0, 1, [8, 9]))
    assert controller.state().finished_tokens.tolist() == [9, 9]
    controller.end()
    assert [d.answer.layout for d in controller.decisions if isinstance(d.answer, Switch)] == [HIGH]
    assert all(d.decide_s < 0.1 for d in controller.decisions)


def test_late_news_of_an_earlier_rollout_is_not_of_this_one():
    engine, controller = controlled(SwitchBelow(0, LOW, HIGH))
    late = report(0, 0, [], finished=[76])
    engine.in_flight = 1
    controller.begin(np.array([10]))
    controller.take(late)
    controller.take(report(0, 0, [5]))
    assert controller.state().finished_tokens.tolist() == []
    controller.end()


def test_begins_in_the_layout_of_the_policy():
    engine, controller = controlled(SwitchBelow(0, LOW, HIGH, first=HIGH))
    controller.begin(np.array([10]))
    assert engine.layout == HIGH
    controller.end()


def test_an_error_of_the_policy_is_told_at_the_end():
    class Broken(SwitchBelow):
        def decide(self, state):
            raise ZeroDivisionError("no plan")

    engine, controller = controlled(Broken(4, LOW, HIGH))
    engine.in_flight = 1
    controller.begin(np.array([10]))
    controller.take(report(0, 0, [5]))
    controller._thread.join(5)
    with pytest.raises(ZeroDivisionError, match="no plan"):
        controller.end()


def test_a_dead_engine_ends_the_controller_quietly():
    engine, controller = controlled(SwitchBelow(4, LOW, HIGH))

    def dies(layout):
        raise EngineDied("gone")

    controller.switch = dies
    engine.in_flight = 1
    controller.begin(np.array([10]))
    controller.take(report(0, 0, [5]))
    controller._thread.join(5)
    assert not controller._thread.is_alive()
    controller.end()


def steps(step, generated, finished=(), epoch=0) -> Steps:
    return Steps(0, epoch, step, list(generated), [n + 10 for n in generated], list(finished), 0)


def test_the_mean_step_between_two_reports_counts_those_that_ended():
    before = steps(8, [5, 6, 8])
    assert timed(before, steps(12, [9, 10, 12]), 0.4) == Observed(3, (49 / 3 + 61 / 3) / 2, 0.1)
    # one ends after two of the four steps: 4 + 4 + 2 tokens, 2.5 sequences in the mean
    assert timed(before, steps(12, [9, 10], finished=[10]), 0.4) == Observed(2, (49 / 3 + 19.5) / 2, 0.1)


@pytest.mark.parametrize(
    "after",
    [
        steps(12, [9, 10, 12], epoch=1),  # in another layout
        steps(12, [9, 10, 12, 1]),  # a fourth has begun
        steps(12, [9, 10, 1], finished=[12]),  # one has ended, another has begun
        steps(12, [8, 10, 12]),  # not all went on at each step
        steps(8, [5, 6, 8]),
        steps(12, [], finished=[9, 10, 12]),
    ],
)
def test_other_steps_are_not_timed(after):
    assert timed(steps(8, [5, 6, 8]), after, 0.4) is None
