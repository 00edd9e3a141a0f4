"""Policies: a switch pays for itself by the margin, and nothing is known of lengths to come."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.backends.simulated.rollout import simulate
from bench.backends.simulated.synthetic import constant_profile, make_system, roofline_profile
from bench.backends.simulated.view import View
from pat.host import HostTerm
from pat.layout import layouts
from pat.lengths import LengthModel
from pat.policy import AdaptivePolicy, Keep, LengthForesight, RolloutState, StaticPolicy, Switch
from pat.switch_cost import SwitchParts

WORLD = layouts(8)
TP1, TP2, TP4, TP8 = WORLD
AMPLE = dict.fromkeys(WORLD, 1 << 40)
PROFILE = roofline_profile(host=HostTerm("paper-like", 1.2e-3, 1e-4, overlapped=False))
CAP = 8192


def lengths_of(n: int, seed: int, cap: int = CAP) -> np.ndarray:
    return np.minimum(np.random.default_rng(seed).lognormal(7.0, 1.2, n).astype(int) + 1, cap)


def policy_of(cost_s: float = 0.05, profile=PROFILE, earlier=None, cap: int = CAP, **options):
    system, planner = make_system(profile, AMPLE, SwitchParts("fixed", cost_s, 0.0, 0.0, 0.0, 0.0))
    earlier = lengths_of(512, 99, cap) if earlier is None else earlier
    return system, AdaptivePolicy(planner, LengthForesight(LengthModel.fit(earlier, cap)), **options)


def state_of(layout, generated, finished=(), waiting: int = 0, switches: int = 0) -> RolloutState:
    generated = np.asarray(generated)
    return RolloutState(1.0, layout, generated, generated + 100, waiting, np.asarray(finished), switches)


@dataclass
class Watched:
    """A policy whose questions and answers are kept."""

    policy: AdaptivePolicy
    seen: list = field(default_factory=list)

    @property
    def interval_steps(self):
        return self.policy.interval_steps

    def first_layout(self, prompt_tokens):
        return self.policy.first_layout(prompt_tokens)

    def decide(self, state):
        answer = self.policy.decide(state)
        self.seen.append((state.whole() if isinstance(state, View) else state, answer))
        return answer

    def switched(self, predicted_s, observed_s):
        self.policy.switched(predicted_s, observed_s)


def test_static_keeps_its_layout_and_is_never_asked():
    policy = StaticPolicy(TP4)
    assert policy.first_layout(np.ones(3)) == TP4
    assert policy.interval_steps is None
    assert isinstance(policy.decide(state_of(TP4, [1])), Keep)


def test_start_is_given_or_planned():
    assert policy_of(start=TP2)[1].first_layout(np.full(128, 100)) == TP2
    flat = constant_profile({1: 0.04, 2: 0.03, 4: 0.01, 8: 0.02})
    assert policy_of(profile=flat)[1].first_layout(np.full(128, 100)) == TP4


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(WORLD),
    st.lists(st.integers(1, CAP - 1), min_size=1, max_size=200),
    st.sampled_from([0.001, 0.1, 1.0, 10.0, 100.0]),
    st.sampled_from([0.0, 0.25, 1.0]),
    st.integers(0, 3),
)
def test_a_switch_saves_more_than_its_margin_and_names_the_true_figures(layout, generated, cost_s, margin, switches):
    _, policy = policy_of(cost_s, margin=margin)
    state = state_of(layout, generated, switches=switches)
    answer = policy.decide(state)
    if isinstance(answer, Switch):
        assert switches < policy.max_hops
        assert answer.layout != layout
        assert answer.cost_s >= 0
        assert answer.gain_s > margin * answer.cost_s
        plan = policy.planner.plan(layout, policy.foresight.during(state), policy.max_hops - switches)
        assert answer.gain_s == plan.stay_s - plan.best_s
        assert answer.layout == plan.now


def test_the_margin_decides_at_exactly_gain_over_cost():
    state = state_of(TP1, np.full(8, 2000))
    answer = policy_of(margin=0.0)[1].decide(state)
    ratio = answer.gain_s / answer.cost_s
    assert isinstance(policy_of(margin=ratio * 0.999)[1].decide(state), Switch)
    kept = policy_of(margin=ratio * 1.001)[1].decide(state)
    assert isinstance(kept, Keep)
    assert "within the margin" in kept.why


def test_never_where_the_cost_exceeds_every_benefit():
    """A switch can at most save the time of all steps up to the cap at 5 tokens a second: it costs more."""
    for seed in range(3):
        system, policy = policy_of(cost_s=1e6, start=TP1)
        done = simulate(system, policy, np.full(64, 100), lengths_of(64, seed), CAP)
        assert done.switches == ()


def test_cheap_switches_do_happen():
    system, policy = policy_of(start=TP1)
    done = simulate(system, policy, np.full(64, 100), lengths_of(64, 0), CAP)
    assert 1 <= len(done.switches) <= 3
    assert done.rollout_s < simulate(system, StaticPolicy(TP1), np.full(64, 100), lengths_of(64, 0), CAP).rollout_s


@pytest.mark.parametrize("max_hops", [0, 1, 2])
def test_hops_are_limited(max_hops):
    system, policy = policy_of(cost_s=1e-4, start=TP1, max_hops=max_hops)
    done = simulate(system, policy, np.full(256, 100), lengths_of(256, 0), CAP)
    assert len(done.switches) <= max_hops
    assert (max_hops == 0) == (done.switches == ())


@pytest.mark.parametrize("tokens", [500, 3000])
@pytest.mark.parametrize("batch", [8, 64])
def test_equal_lengths_never_leave_the_best_layout(batch, tokens):
    """Nothing ever gets faster: all end in the same step."""
    system, policy = policy_of(earlier=np.full(512, tokens), cap=4096)
    prompt, response = np.full(batch, 100), np.full(batch, tokens)
    done = simulate(system, policy, prompt, response, 4096)
    best_s = min(simulate(system, StaticPolicy(a), prompt, response, 4096).rollout_s for a in WORLD)
    assert done.switches == ()
    assert done.rollout_s == best_s


def test_same_past_same_decisions():
    """Two traces agree up to 900 tokens: until then the same questions, at the same times, get the same answers."""
    system, policy = policy_of(start=TP1, interval_steps=16)
    short = lengths_of(96, 1)
    long = np.where(short > 900, CAP - short % 50, short)
    logs = []
    for response in (short, long):
        watched = Watched(policy)
        simulate(system, watched, np.full(96, 100), response, CAP)
        logs.append([(s, a) for s, a in watched.seen if len(s.generated_tokens) and s.generated_tokens.max() <= 900])
    assert len(logs[0]) == len(logs[1]) > 20
    for (one, answer), (two, other) in zip(*logs, strict=True):
        assert one.time_s == pytest.approx(two.time_s, rel=1e-12)
        assert sorted(one.generated_tokens) == sorted(two.generated_tokens)
        assert sorted(one.finished_tokens) == sorted(two.finished_tokens)
        assert type(answer) is type(other)
        if isinstance(answer, Switch):
            assert answer.layout == other.layout
            assert answer.gain_s == pytest.approx(other.gain_s, rel=1e-9)
    assert any(isinstance(answer, Switch) for _, answer in logs[0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, CAP - 1), min_size=1, max_size=60), st.sampled_from(WORLD), st.randoms())
def test_the_order_of_the_sequences_says_nothing(generated, layout, random):
    _, policy = policy_of()
    shuffled = random.sample(generated, len(generated))
    answers = [policy.decide(state_of(layout, g, finished=[5, 700])) for g in (generated, shuffled)]
    assert type(answers[0]) is type(answers[1])
    if isinstance(answers[0], Switch):
        assert answers[0].layout == answers[1].layout


def test_waiting_sequences_count():
    """One runs and 400 wait: TP1 is right for the crowd, though TP8 is for the one."""
    _, policy = policy_of()
    alone, crowded = state_of(TP1, [10]), state_of(TP1, [10], waiting=400)
    assert isinstance(policy.decide(alone), Switch)
    assert isinstance(policy.decide(crowded), Keep)
    assert policy.foresight.during(alone).alive[0] == pytest.approx(1, rel=0.1)
    assert policy.foresight.during(crowded).alive[0] == pytest.approx(401, rel=0.01)


def test_nothing_running_or_no_hop_left_is_kept():
    _, policy = policy_of()
    assert policy.decide(state_of(TP1, np.empty(0, dtype=int))).why == "nothing is running"
    assert policy.decide(state_of(TP1, [5], switches=3)).why == "no switch left"


def test_survivors_beyond_the_prior_are_taken_to_go_on():
    """Earlier responses had 200 tokens. Eight that have reached 4,000 change what is expected, and the switch pays."""
    _, policy = policy_of(cost_s=1.0, earlier=np.full(512, 200))
    early = state_of(TP1, np.full(8, 150), finished=[150] * 100)
    late = replace(early, generated_tokens=np.full(8, 4000), context_tokens=np.full(8, 4100))
    assert isinstance(policy.decide(early), Keep)
    assert isinstance(policy.decide(late), Switch)


def test_back_to_a_layout_that_was_left_takes_twice_the_margin():
    state = state_of(TP1, np.full(8, 2000))
    answer = policy_of(margin=0.0)[1].decide(state)
    margin = 0.75 * answer.gain_s / answer.cost_s
    fresh, returning = policy_of(margin=margin)[1], policy_of(margin=margin)[1]
    returning.memory.left.append(answer.layout)
    assert isinstance(fresh.decide(state), Switch)
    assert isinstance(returning.decide(state), Keep)


def test_a_layout_is_left_when_the_switch_is_confirmed():
    _, policy = policy_of(margin=0.0)
    answer = policy.decide(state_of(TP1, np.full(8, 2000)))
    assert policy.memory.left == []
    policy.switched(answer.cost_s, answer.cost_s)
    assert policy.memory.left == [TP1]
    policy.first_layout(np.full(8, 100))
    assert policy.memory.left == []


def test_a_gain_within_the_interval_of_the_prediction_is_no_reason():
    """Step times known to +- 60% cannot tell TP1 from TP8; known to +- 1% they can."""
    state = state_of(TP1, np.full(8, 2000))

    def answer(half: float):
        profile = replace(PROFILE, grids={tp: replace(g, half_interval=half) for tp, g in PROFILE.grids.items()})
        return policy_of(profile=profile)[1].decide(state)

    assert isinstance(answer(0.01), Switch)
    kept = answer(20.0)
    assert isinstance(kept, Keep)
    assert "interval" in kept.why


def test_held_while_sequences_wait():
    _, policy = policy_of(hold=True)
    policy.first_layout(np.full(8, 100))
    alone = state_of(TP1, np.full(8, 2000))
    assert policy.decide(replace(alone, waiting=1)).why == "held while sequences wait"
    assert isinstance(policy.decide(alone), Switch)


def test_starts_are_rehearsed_where_the_kv_cache_is_short_and_only_there():
    """Equal lengths on a short KV cache run in waves, which expectations do not see; a rehearsal does."""
    tried = []
    response = np.full(256, 900)
    for capacity in (20_000, 1 << 40):
        system, planner = make_system(PROFILE, dict.fromkeys(WORLD, capacity))

        def rehearsal(policy, prompt, sample, system=system, capacity=capacity):
            tried.append(capacity)
            return simulate(system, policy, prompt, sample, CAP).rollout_s

        policy = AdaptivePolicy(planner, LengthForesight(LengthModel.fit(response, CAP)), rehearsal=rehearsal)
        done = simulate(system, policy, np.full(256, 100), response, CAP)
        best_s = min(simulate(system, StaticPolicy(a), np.full(256, 100), response, CAP).rollout_s for a in WORLD)
        assert done.rollout_s <= 1.01 * best_s
    assert set(tried) == {20_000}


@pytest.mark.parametrize("factor", [0.05, 0.2, 5.0, 20.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_wrong_prior_costs_no_more_than_staying(factor, seed):
    """Earlier responses were 20 times shorter to 20 times longer. Whatever it does, it is at most 1% slower than the
    layout in which it began."""
    earlier = np.clip((lengths_of(512, 99) * factor).astype(int), 1, CAP)
    system, policy = policy_of(earlier=earlier)
    prompt, response = np.full(128, 100), lengths_of(128, seed)
    done = simulate(system, policy, prompt, response, CAP)
    assert done.rollout_s <= 1.01 * simulate(system, StaticPolicy(done.first), prompt, response, CAP).rollout_s
    forced = simulate(system, replace(policy, start=TP2), prompt, response, CAP)
    assert forced.rollout_s <= 1.01 * simulate(system, StaticPolicy(TP2), prompt, response, CAP).rollout_s


def test_without_length_conditioning_every_sequence_is_a_new_one():
    state = state_of(TP1, np.full(8, 7000))
    foresight = policy_of()[1].foresight
    assert foresight.during(state).steps.sum() == CAP - 7000
    assert replace(foresight, conditioned=False).during(state).steps.sum() == CAP
