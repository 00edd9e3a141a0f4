"""Online correction: a bias is found, kept by layout, bounded against outliers, and heals a wrong profile."""

from math import exp, log

import numpy as np
import pytest

from bench.backends.simulated.rollout import simulate
from bench.backends.simulated.synthetic import constant_profile, make_system
from pat.correction import STEP_WEIGHT, SWITCH_WEIGHT, Correction, Observed
from pat.layout import layouts
from pat.lengths import LengthModel
from pat.policy import AdaptivePolicy, LengthForesight
from pat.switch_cost import SwitchParts

WORLD = layouts(8)
TP1, TP2, TP4, TP8 = WORLD
AMPLE = dict.fromkeys(WORLD, 1 << 40)
FREE = SwitchParts("fixed", 0.01, 0.0, 0.0, 0.0, 0.0)
STEP_S = {1: 0.04, 2: 0.03, 4: 0.02, 8: 0.01}
CAP = 4096


def planner_of(step_s=STEP_S):
    return make_system(constant_profile(step_s), AMPLE, FREE)[1]


def steps(seconds: float) -> tuple[Observed, ...]:
    return (Observed(4, 100.0, seconds),)


def test_a_right_prediction_leaves_the_planner_alone():
    planner, correction = planner_of(), Correction()
    correction.observe(planner, TP4, steps(STEP_S[4]))
    correction.switched(0.5, 0.5)
    assert correction.applied_to(planner) is planner


def test_the_first_observation_counts_in_full_and_later_ones_by_their_weight():
    planner, correction = planner_of(), Correction()
    correction.observe(planner, TP4, steps(1.5 * STEP_S[4]))
    assert correction.factor(TP4) == pytest.approx(1.5)
    correction.observe(planner, TP4, steps(3.0 * STEP_S[4]))
    assert correction.factor(TP4) == pytest.approx(1.5 * 2.0**STEP_WEIGHT)


def test_layouts_keep_their_own_bias_and_new_ones_take_the_mean():
    planner, correction = planner_of(), Correction()
    correction.observe(planner, TP1, steps(2.0 * STEP_S[1]))
    assert correction.factor(TP8) == pytest.approx(2.0)
    correction.observe(planner, TP8, steps(0.5 * STEP_S[8]))
    assert [correction.factor(a) for a in (TP1, TP8, TP4)] == pytest.approx([2.0, 0.5, 1.0])
    corrected = correction.applied_to(planner)
    assert corrected.step_s(TP1, 8, 100) == pytest.approx(2.0 * planner.step_s(TP1, 8, 100))
    assert corrected.step_s(TP8, 8, 100) == pytest.approx(0.5 * planner.step_s(TP8, 8, 100))


def test_replicas_are_weighed_by_their_time():
    planner, correction = planner_of(), Correction()
    correction.observe(planner, TP4, steps(STEP_S[4]) + steps(3 * STEP_S[4]))
    assert correction.factor(TP4) == pytest.approx(2.0)


def test_one_pause_counts_for_a_factor_of_four_at_most():
    planner, correction = planner_of(), Correction()
    correction.observe(planner, TP4, steps(1000 * STEP_S[4]))
    assert correction.factor(TP4) == pytest.approx(4.0)
    correction.switched(0.1, 100.0)
    assert correction.switch == pytest.approx(SWITCH_WEIGHT * log(4.0))


def test_nothing_timed_teaches_nothing():
    planner, correction = planner_of(), Correction()
    correction.observe(planner, TP4, ())
    correction.switched(0.0, 1.0)
    assert correction.applied_to(planner) is planner


def test_switch_costs_are_corrected_until_they_are_right():
    """Each prediction holds the bias learned so far; a true cost of twice the model's is met in the end."""
    correction = Correction()
    for _ in range(20):
        correction.switched(0.1 * exp(correction.switch), 0.2)
    assert exp(correction.switch) == pytest.approx(2.0, rel=1e-4)


def test_a_wrong_profile_is_found_out_while_the_rollout_runs():
    """The planner believes that TP8 takes 10 ms, in truth 30; it is right about TP1. Begun in TP1 it goes to TP8, sees,
    and leaves for TP4, which takes the mean bias of both: 12 ms x sqrt(3) are less than 30."""
    step_s = {**STEP_S, 4: 0.012}
    true, believed = make_system(constant_profile({**step_s, 8: 0.03}), AMPLE, FREE)[0], planner_of(step_s)
    foresight = LengthForesight(LengthModel.fit(np.full(256, 2000), CAP))

    def run(**options):
        policy = AdaptivePolicy(believed, foresight, start=TP1, **options)
        return simulate(true, policy, np.full(32, 100), np.full(32, 2000), CAP)

    learned, blind = run(), run(correction=None)
    assert [event.new for event in blind.switches] == [TP8]
    assert [event.new for event in learned.switches] == [TP8, TP4]
    assert learned.rollout_s < 0.6 * blind.rollout_s


def test_what_was_learned_serves_the_next_rollout():
    true, _ = make_system(constant_profile({**STEP_S, 8: 0.06}), AMPLE, FREE)
    foresight = LengthForesight(LengthModel.fit(np.full(256, 2000), CAP))
    policy = AdaptivePolicy(planner_of(), foresight)
    run = lambda p: simulate(true, p, np.full(32, 100), np.full(32, 2000), CAP)  # noqa: E731
    run(policy)
    assert policy.correction.factor(TP8) == pytest.approx(4.0)  # the bound of each observation
    assert policy.correction.applied_to(policy.planner) is not policy.planner
