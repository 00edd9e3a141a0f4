"""The threshold baseline: one switch, when its share of the sequences is left."""

import numpy as np
import pytest

from baselines.threshold import Threshold
from bench.backends.simulated.rollout import simulate
from bench.backends.simulated.synthetic import constant_profile, make_system
from pat.layout import layouts

WORLD = layouts(8)
TP1, TP2, TP4, TP8 = WORLD
STEP_S = {1: 0.04, 2: 0.03, 4: 0.02, 8: 0.01}


@pytest.mark.parametrize(("share", "alive"), [(0.5, 8), (0.25, 4), (0.125, 2)])
def test_switches_once_when_its_share_is_left(share, alive):
    """16 sequences end 100 steps apart: the switch comes when the share of 16 is left, within a question."""
    system, _ = make_system(constant_profile(STEP_S), dict.fromkeys(WORLD, 1 << 40))
    response = 100 * np.arange(1, 17)
    done = simulate(system, Threshold(TP1, TP8, share, interval_steps=16), np.full(16, 10), response, 1600)
    (event,) = done.switches
    assert event.alive == alive
    assert event.new == TP8


def test_never_where_it_begins_in_its_target():
    system, _ = make_system(constant_profile(STEP_S), dict.fromkeys(WORLD, 1 << 40))
    done = simulate(system, Threshold(TP8, TP8), np.full(16, 10), 100 * np.arange(1, 17), 1600)
    assert done.switches == ()
