"""The fleet's arrays against the simulator they stand for: the same numbers to the last bit, or a refusal."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.backends.simulated.fleet import Waits, simulate_fleet
from bench.backends.simulated.rollout import simulate
from bench.backends.simulated.synthetic import make_system, roofline_profile
from pat.host import HostTerm
from pat.layout import layouts
from pat.lengths import LengthModel
from pat.policy import AdaptivePolicy, LengthForesight, StaticPolicy
from tests.bench.test_simulated import Scripted

CAP = 4096
ROOFLINE = roofline_profile(host=HostTerm("paper-like", 1e-3, 5e-5, overlapped=False))


def lengths_of(batch: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(1, 900, batch), np.minimum(rng.lognormal(6, 1.2, batch).astype(int) + 1, CAP)


def assert_same(fleet, rollout) -> None:
    assert fleet.first == rollout.first
    assert fleet.rollout_s == rollout.rollout_s
    assert np.array_equal(fleet.finished_s, rollout.finished_s)
    assert fleet.switches == rollout.switches


@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("batch", [3, 64, 333])
def test_static_layouts_and_the_adaptive_policy(nodes, batch):
    world = layouts(8 * nodes, node=8)
    system, planner = make_system(ROOFLINE, dict.fromkeys(world, 1 << 30))
    prompts, responses = lengths_of(batch, seed=batch)
    model = LengthModel.fit(lengths_of(500, seed=9)[1], CAP)
    adaptive = [partial(AdaptivePolicy, planner, LengthForesight(model), start=a) for a in (None, *world)]
    switched = 0
    for policy in (*(partial(StaticPolicy, a) for a in world), *adaptive):  # each rollout begins with nothing learned
        fleet = simulate_fleet(system, policy(), prompts, responses, CAP)
        assert_same(fleet, simulate(system, policy(), prompts, responses, CAP))
        switched += len(fleet.switches)
    assert switched >= 1 or batch == 3


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 60), st.integers(0, 1000), st.sampled_from([7, 64]))
def test_any_switches(data, batch, seed, interval_steps):
    world = layouts(8)
    system, _ = make_system(ROOFLINE, dict.fromkeys(world, 1 << 30))
    first = data.draw(st.sampled_from(world))
    answers = data.draw(st.lists(st.sampled_from([None, *world]), max_size=6))
    prompts, responses = lengths_of(batch, seed)
    done = [
        run(system, Scripted(first, answers, interval_steps), prompts, responses, CAP)
        for run in (simulate_fleet, simulate)
    ]
    assert_same(*done)


def test_where_sequences_wait_it_refuses():
    world = layouts(8)
    prompts, responses = lengths_of(256, seed=1)
    for capacity, waits in ((1 << 30, False), (60_000, True)):
        system, _ = make_system(ROOFLINE, dict.fromkeys(world, capacity))
        if waits:
            with pytest.raises(Waits):
                simulate_fleet(system, StaticPolicy(world[0]), prompts, responses, CAP)
        else:
            simulate_fleet(system, StaticPolicy(world[0]), prompts, responses, CAP)
