"""The oracle's search: never worse than where it starts, finds what a closed form knows; foresight of all sequences."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.oracle import Clairvoyant, Schedule, neighbours, search
from bench.backends.simulated.rollout import simulate
from bench.backends.simulated.scheduled import Scheduled
from bench.backends.simulated.synthetic import constant_profile, make_system, roofline_profile
from pat.layout import layouts
from pat.policy import AdaptivePolicy, RolloutState, StaticPolicy
from pat.switch_cost import SwitchParts

WORLD = layouts(8)
TP1, TP2, TP4, TP8 = WORLD
AMPLE = dict.fromkeys(WORLD, 1 << 40)


def lengths_of(n: int, seed: int) -> np.ndarray:
    return np.minimum(np.random.default_rng(seed).lognormal(6.5, 1.2, n).astype(int) + 2, 8192)


def test_search_walks_to_the_best_time_of_one_switch():
    """Seconds are the distance of the switch from 10: from 100 it walks there, to the finest shift of 3%."""
    seconds = lambda s: abs(s.hops[0][0] - 10.0) + 1.0 if s.hops else 50.0  # noqa: E731
    found = search(seconds, [Schedule(TP1, ((100.0, TP8),))], (TP1, TP8), trials=400)
    assert found.hops[0][0] == pytest.approx(10.0, rel=0.03)


def test_search_leaves_out_a_switch_that_costs_and_changes_the_first_layout():
    seconds = lambda s: 1.0 * len(s.hops) + (0.0 if s.first == TP4 else 0.5) + 1.0  # noqa: E731
    start = Schedule(TP1, ((5.0, TP2), (7.0, TP8)))
    assert search(seconds, [start], WORLD, trials=400) == Schedule(TP4)


def test_search_asks_no_more_than_its_trials_beyond_the_starts():
    asked = []
    starts = [Schedule(TP1, ((float(t), TP8),)) for t in (1, 2, 3)]
    search(lambda s: asked.append(s) or s.hops[0][0] if s.hops else 9.0, starts, WORLD, trials=7)
    assert len(asked) <= 3 + 7
    assert len(asked) == len(set(asked))


schedules = st.builds(
    lambda first, gaps, to: Schedule(first, tuple(zip(np.cumsum(gaps).tolist(), to, strict=False))),
    st.sampled_from(WORLD),
    st.lists(st.floats(0.1, 50), max_size=3),
    st.lists(st.sampled_from(WORLD), min_size=3, max_size=3),
).filter(lambda s: all(a != b for a, b in pairwise([s.first, *(x for _, x in s.hops)])))


@settings(max_examples=100, deadline=None)
@given(schedules)
def test_neighbours_are_schedules(schedule):
    for other in neighbours(schedule, WORLD):
        course = [other.first, *(layout for _, layout in other.hops)]
        assert all(a != b for a, b in pairwise(course))
        times = [time_s for time_s, _ in other.hops]
        assert times == sorted(times)
        assert len(other.hops) in (len(schedule.hops), len(schedule.hops) - 1)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), schedules)
def test_the_search_is_never_worse_than_its_starts(seed, schedule):
    system, _ = make_system(roofline_profile(), AMPLE)
    lengths = np.full(24, 100), lengths_of(24, seed), 8192
    simulated = Scheduled(system, *lengths)
    seconds = lambda s: simulated(s).rollout_s  # noqa: E731
    starts = [schedule, Schedule(TP4)]
    found = search(seconds, starts, WORLD, trials=15)
    assert seconds(found) <= min(map(seconds, starts))
    alone = Scheduled(system, *lengths)(found)  # what was simulated before leaves no trace
    assert alone.finished_s.tolist() == simulated(found).finished_s.tolist()


@pytest.mark.parametrize("capacity", [1 << 40, 30_000])
def test_a_schedule_repeats_the_rollout_it_was_taken_from(capacity):
    """To the last bit, also where sequences wait: a policy's questions leave no trace."""
    system, planner = make_system(
        roofline_profile(), dict.fromkeys(WORLD, capacity), SwitchParts("fixed", 0.05, 0.0, 0.0, 0.0, 0.0)
    )
    prompt, response = np.full(96, 100), lengths_of(96, 3)
    policy = AdaptivePolicy(planner, Clairvoyant(prompt, response), start=TP1, margin=0.0)
    asked = simulate(system, policy, prompt, response, 8192)
    assert asked.switches
    again = Scheduled(system, prompt, response, 8192)(asked.schedule)
    assert again.finished_s.tolist() == asked.finished_s.tolist()
    static = simulate(system, StaticPolicy(TP2), prompt, response, 8192)
    assert Scheduled(system, prompt, response, 8192)(Schedule(TP2)).rollout_s == static.rollout_s


def test_a_switch_after_the_end_does_not_happen():
    system, _ = make_system(constant_profile({1: 0.02, 2: 0.02, 4: 0.02, 8: 0.02}), AMPLE)
    done = Scheduled(system, np.full(4, 10), np.full(4, 50), 64)(Schedule(TP1, ((1e6, TP8),)))
    assert done.switches == ()


def test_foresight_knows_those_that_wait():
    """Two run, one waits: its whole length is still to come."""
    seer = Clairvoyant(np.array([10, 20, 30]), np.array([100, 500, 700]))
    state = RolloutState(
        time_s=1.0,
        layout=TP1,
        generated_tokens=np.array([40, 40]),
        context_tokens=np.array([50, 60]),
        waiting=1,
        finished_tokens=np.empty(0),
        sequence_ids=np.array([0, 1]),
        waiting_ids=np.array([2]),
    )
    ahead = seer.during(state)
    assert np.cumsum(ahead.steps).tolist() == [60, 460, 700]
    assert ahead.alive.tolist() == [3, 2, 1]
    assert seer.sample(3).tolist() == [100, 500, 700]
