"""The simulated backend: closed forms, a step-by-step reference, nothing lost under any policy, same bytes again."""

import hashlib
import math
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.backends.simulated import admission
from bench.backends.simulated.replica import Replica, Sequences
from bench.backends.simulated.rollout import simulate
from bench.backends.simulated.synthetic import constant_profile, make_system, roofline_profile
from pat.host import HostTerm
from pat.layout import Layout, layouts
from pat.lengths import LengthModel
from pat.policy import AdaptivePolicy, Keep, LengthForesight, StaticPolicy, Switch
from tests.bench.reference_simulator import Reference

WORLD = layouts(8)
TP8 = WORLD[-1]
AMPLE = dict.fromkeys(WORLD, 1 << 30)
STEP_S = {1: 2**-6, 2: 2**-7, 4: 2**-8, 8: 2**-9}
ROOFLINE = roofline_profile(host=HostTerm("paper-like", 1e-3, 5e-5, overlapped=False))


@dataclass
class Scripted:
    """Answers the questions in order with the layouts given (None: keep); nothing after them."""

    first: Layout
    answers: list
    interval_steps: int = 3

    def __post_init__(self):
        self.answers, self.told = list(self.answers), []

    def first_layout(self, prompt_tokens):
        return self.first

    def decide(self, state):
        answer = self.answers.pop(0) if self.answers else None
        return Keep() if answer in (None, state.layout) else Switch(answer, 1.0, 0.5)

    def switched(self, predicted_s, observed_s):
        self.told.append((predicted_s, observed_s))


def lengths_of(batch: int, cap: int, seed: int) -> np.ndarray:
    return np.minimum(np.random.default_rng(seed).lognormal(7.25, 1.41, batch).astype(int) + 1, cap)


# --- closed forms


def test_constant_step_time_gives_the_formula_exactly():
    """Rollout = prefill + (longest response - 1) steps, in binary fractions: equal to the last bit."""
    system, _ = make_system(constant_profile(STEP_S, prefill_token_s=2**-12, prefill_fixed_s=2**-5), AMPLE)
    response = np.array([5, 1000, 17, 1, 300, 300, 2, 64])
    for layout in WORLD:
        done = simulate(system, StaticPolicy(layout), np.full(8, 64), response, 1024)
        prefill_s = 2**-5 + 64 * (8 // layout.dp) * 2**-12
        assert done.rollout_s == prefill_s + 999 * STEP_S[layout.tp]
        assert done.finished_s.tolist() == (prefill_s + (response - 1) * STEP_S[layout.tp]).tolist()


@pytest.mark.parametrize("tp", [1, 8])
def test_batch_of_one_is_prefill_plus_the_sum_of_steps(tp):
    system, _ = make_system(ROOFLINE, AMPLE)
    done = simulate(system, StaticPolicy(Layout.of(tp, 8)), np.array([100]), np.array([3000]), 4096)
    steps_s = [ROOFLINE.decode_s(tp, 1, 100 + g) for g in range(1, 3000)]
    prefill_s = float(ROOFLINE.prefill_s(tp, 100)) + ROOFLINE.host.step_s(tp, 1)
    assert done.rollout_s == pytest.approx(prefill_s + math.fsum(steps_s), rel=1e-12)


def test_long_prompts_are_prefilled_in_chunks_each_with_its_fixed_time():
    profile = constant_profile(STEP_S, prefill_token_s=2**-12, prefill_fixed_s=2**-5)
    system, _ = make_system(profile, AMPLE, chunk_tokens=1024)
    done = simulate(system, StaticPolicy(Layout(8, 1)), np.array([2500]), np.array([1]), 8)
    assert done.rollout_s == 3 * 2**-5 + 2500 * 2**-12


def test_a_switch_takes_its_wait_and_its_cost_and_nothing_else():
    """Two replicas of TP4, one sequence each; asked after 3 steps, both at a boundary: no wait."""
    system, _ = make_system(constant_profile(STEP_S), AMPLE)
    done = simulate(system, Scripted(Layout(4, 2), [Layout(8, 1)]), np.full(2, 64), np.array([10, 20]), 32)
    (event,) = done.switches
    assert event.time_s == 3 * STEP_S[4]
    assert event.wait_s == 0.0
    assert event.alive == 2
    resumed_s = event.time_s + event.wait_s + event.cost.total_s
    # 4 tokens are there at the switch: one by prefill, three by decoding
    assert done.finished_s.tolist() == [resumed_s + 6 * STEP_S[8], resumed_s + 16 * STEP_S[8]]


def test_a_switch_waits_for_the_slowest_replica():
    """Replica 1 prefills twice as long, so at the question it is between two boundaries."""
    profile = constant_profile(STEP_S, prefill_token_s=3 * 2**-13)
    system, _ = make_system(profile, AMPLE)
    policy = Scripted(Layout(4, 2), [Layout(8, 1)])
    done = simulate(system, policy, np.array([1, 2]), np.array([10, 10]), 32)
    first_s, second_s = 3 * 2**-13, 6 * 2**-13
    (event,) = done.switches
    assert event.time_s == first_s + 3 * STEP_S[4]
    assert event.time_s + event.wait_s == second_s + 3 * STEP_S[4]  # replica 0 is there already, replica 1 mid-step
    tokens = {"decode": 0}
    for kind, steps, batch in zip(*(done.segments[k] for k in ("kind", "steps", "batch")), strict=True):
        tokens[kind] = tokens.get(kind, 0) + steps * batch
    assert tokens["decode"] == 18


def test_round_robin_over_replicas():
    system, _ = make_system(constant_profile(STEP_S), AMPLE)
    done = simulate(system, StaticPolicy(Layout(2, 4)), np.full(6, 8), np.array([1, 2, 3, 4, 5, 6]), 8)
    decode = done.segments["kind"] == "decode"
    by_replica = [
        int(np.sum((done.segments["steps"] * done.segments["batch"])[decode & (done.segments["replica"] == d)]))
        for d in range(4)
    ]
    assert by_replica == [0 + 4, 1 + 5, 2, 3]


# --- a reference that makes one step at a time


@st.composite
def workloads(draw):
    """Small batches beside a KV cache that holds all, some, or little more than the longest sequence."""
    n = draw(st.integers(1, 12))
    cap = draw(st.sampled_from([8, 40, 200]))
    prompts = draw(st.lists(st.integers(1, 30), min_size=n, max_size=n))
    responses = draw(st.lists(st.integers(1, cap), min_size=n, max_size=n))
    longest = max(p + r for p, r in zip(prompts, responses, strict=True))
    capacity = longest + draw(st.sampled_from([0, 1, 7, 50, 300, 100_000]))
    return prompts, responses, cap, capacity, draw(st.sampled_from([16, 64, 8192])), draw(st.sampled_from(WORLD))


@settings(max_examples=150, deadline=None)
@given(workloads(), st.booleans())
def test_static_rollouts_equal_the_step_by_step_reference(workload, hasty):
    """``hasty``: less is reserved ahead than in SGLang, so that short sequences too are retracted."""
    prompts, responses, cap, capacity, chunk, layout = workload
    system, _ = make_system(ROOFLINE, dict.fromkeys(WORLD, capacity), chunk_tokens=chunk)
    clip, decay_steps = (12, 15) if hasty else (4096, 600)
    with patch.multiple(admission, CLIP_NEW_TOKENS=clip, DECAY_STEPS=decay_steps):
        done = simulate(system, StaticPolicy(layout), np.array(prompts), np.array(responses), cap)
    host_s = ROOFLINE.host.step_s(layout.tp, 1)

    def prefill_s(tokens: int) -> float:
        chunks = [chunk] * (tokens // chunk) + [tokens % chunk] * (tokens % chunk > 0)
        return sum(float(ROOFLINE.prefill_s(layout.tp, c)) + host_s for c in chunks)

    retractions = 0
    for d in range(layout.dp):
        mine = list(zip(prompts, responses, strict=True))[d :: layout.dp]
        if not mine:
            continue
        decode_s = lambda batch, context: ROOFLINE.decode_s(layout.tp, batch, context)  # noqa: E731
        reference = Reference(mine, capacity, cap, chunk, decode_s, prefill_s, clip, decay_steps).run()
        expected = [reference.finished_s[i] for i in range(len(mine))]
        assert done.finished_s[d :: layout.dp] == pytest.approx(expected, rel=1e-9)
        rows = done.segments["replica"] == d
        decode, work = done.segments["kind"] == "decode", done.segments["steps"] * done.segments["batch"]
        assert work[rows & decode].sum() == reference.decode_tokens
        prefilled = done.segments["context_tokens"] * work
        assert prefilled[rows & ~decode].sum() == pytest.approx(reference.prefill_tokens)
        assert reference.peak_kv <= capacity
        retractions += reference.retractions
    assert done.retractions == retractions


def test_the_reference_retracts_and_queues():
    """Guards the test above: the reference itself comes to retractions, and lets sequences wait."""
    hasty = Reference([(10, 100)] * 8, 400, 200, 8192, lambda b, c: 1.0, lambda n: 1.0, 12, 15).run()
    assert hasty.retractions > 0
    assert hasty.prefill_tokens > 8 * 10
    waits = Reference([(10, 100)] * 8, 120, 200, 8192, lambda b, c: 1.0, lambda n: 1.0).run()
    assert waits.clock_s == 8 * (1 + 99)


def test_retraction_does_not_know_who_ends_first():
    """Eight equal prompts in step: who goes back follows from the index, whatever the lengths."""
    system, _ = make_system(constant_profile(STEP_S), dict.fromkeys(WORLD, 400))
    late = {}
    for name, response in {"rising": np.arange(93, 101), "falling": np.arange(100, 92, -1)}.items():
        with patch.multiple(admission, CLIP_NEW_TOKENS=12, DECAY_STEPS=15):
            done = simulate(system, StaticPolicy(Layout(8, 1)), np.full(8, 10), response, 200)
        late[name] = set(np.argsort(done.finished_s)[-2:].tolist())
        assert done.retractions > 0
    assert late["rising"] == late["falling"]


def test_retracted_sequences_queue_in_the_order_in_which_they_left():
    """Fewest response tokens first, then the longest prompt, then the highest index; what stays fits the next step."""
    sequences = Sequences.of([10, 10, 10, 30, 10, 10], [90] * 6)
    sequences.generated_tokens[:] = [5, 7, 2, 5, 40, 5]
    replica = Replica(0, TP8, sequences, ROOFLINE, admission.Admission(70, 90), running=np.arange(6), full=True)
    replica._retract()
    assert sorted(replica.running) == [1, 4]
    assert replica.queue == [2, 3, 5, 0]
    assert replica.retractions == 4
    assert not replica.full
    assert replica.admission.ratio == (47 + 20 * 2) / (2 * 90 + 1)


# --- any policy


@st.composite
def scripts(draw):
    answers = draw(st.lists(st.none() | st.sampled_from(WORLD), max_size=8))
    return Scripted(draw(st.sampled_from(WORLD)), answers, draw(st.integers(1, 20)))


@settings(max_examples=150, deadline=None)
@given(scripts(), workloads(), st.sampled_from(["cheaper", "migrate", "recompute"]))
def test_nothing_is_lost_under_random_switches(policy, workload, kv):
    prompts, responses, cap, capacity, chunk, _ = workload
    prompts, responses = np.array(prompts), np.array(responses)
    system, _ = make_system(ROOFLINE, dict.fromkeys(WORLD, capacity), kv=kv, chunk_tokens=chunk)
    with patch.multiple(admission, CLIP_NEW_TOKENS=12, DECAY_STEPS=15):
        done = simulate(system, policy, prompts, responses, cap)
    s = done.segments
    decode, work = s["kind"] == "decode", s["steps"] * s["batch"]
    # every token comes from one decode step of its sequence, or from one of its prefills
    assert work[decode].sum() + s["batch"][~decode].sum() == responses.sum()
    assert s["batch"][~decode].sum() >= len(responses)
    assert np.all(np.isfinite(done.finished_s))
    assert np.all(done.finished_s >= 0)
    assert done.rollout_s == done.finished_s.max()
    # the KV cache is never over its capacity: the last step of a run holds mean context + steps - 1
    held = s["batch"] * (s["context_tokens"] + s["steps"] - 1)
    assert np.all(held[decode] <= capacity + 1e-6)
    # runs of one replica of one layout do not overlap, and no replica runs during a switch
    for tp in np.unique(s["tp"]):
        for d in np.unique(s["replica"]):
            rows = (s["tp"] == tp) & (s["replica"] == d)
            assert np.all(s["time_s"][rows][1:] >= (s["time_s"] + s["seconds"])[rows][:-1] - 1e-9)
    for event in done.switches:
        begin, end = event.time_s + event.wait_s, event.time_s + event.wait_s + event.cost.total_s
        assert not np.any((s["time_s"] > begin - 1e-12) & (s["time_s"] < end - 1e-9))
        assert not np.any((s["time_s"] < begin - 1e-9) & (s["time_s"] + s["seconds"] > begin + 1e-9))
    assert len(done.switches) <= 8


def test_a_switch_to_a_layout_that_cannot_hold_a_sequence_is_refused():
    capacity = {Layout(1, 8): 100, Layout(8, 1): 1000}
    system, _ = make_system(constant_profile(STEP_S), capacity)
    with pytest.raises(ValueError, match="TP1xDP8 holds 100 KV tokens a replica, one sequence needs 150"):
        simulate(system, Scripted(Layout(8, 1), [Layout(1, 8)]), np.array([50]), np.array([100]), 100)
    with pytest.raises(ValueError, match="TP1xDP8 holds 100 KV tokens"):
        simulate(system, StaticPolicy(Layout(1, 8)), np.array([50]), np.array([100]), 100)


def fingerprint(rollout) -> str:
    digest = hashlib.sha256(rollout.finished_s.tobytes())
    for name in sorted(rollout.segments):
        digest.update(name.encode() + rollout.segments[name].tobytes())
    return digest.hexdigest()


def planned(seed: int):
    cap = 8192
    system, planner = make_system(ROOFLINE, dict.fromkeys(WORLD, 400_000))
    prior = LengthModel.fit(lengths_of(512, cap, 1000 + seed), cap)
    policy = AdaptivePolicy(planner, LengthForesight(prior))
    return simulate(system, policy, np.full(128, 120), lengths_of(128, cap, seed), cap)


def test_same_seed_same_bytes():
    assert fingerprint(planned(0)) == fingerprint(planned(0))
    assert fingerprint(planned(0)) != fingerprint(planned(1))


def test_planned_policy_sees_the_state_it_is_in(monkeypatch):
    """The state at each question agrees with a replay of the static rollout up to that time."""
    states = []

    class Watching(Scripted):
        def decide(self, state):
            states.append((state.running, state.context_sum, state.whole()))
            return Keep()

    system, _ = make_system(constant_profile(STEP_S), AMPLE)
    response = np.array([4, 9, 16, 25])
    simulate(system, Watching(Layout(8, 1), []), np.full(4, 10), response, 32)
    for running, context_sum, state in states:
        assert (running, context_sum) == (state.running, state.context_sum)
        done = 1 + round(state.time_s / STEP_S[8])
        alive = response > done
        assert sorted(state.finished_tokens) == sorted(response[~alive])
        assert state.generated_tokens.tolist() == [done] * alive.sum()
        assert state.context_tokens.tolist() == [10 + done] * alive.sum()
        assert sorted(state.sequence_ids) == np.flatnonzero(alive).tolist()
        assert state.waiting == 0
    assert [round(s.time_s / STEP_S[8]) for *_, s in states][:3] == [3, 6, 9]


# --- scale


def test_65536_sequences_on_512_replicas_touch_each_replica_a_few_times(monkeypatch):
    """A VeRL-like batch: the work is a few schedules a replica, not steps; counted, not timed."""
    calls = []
    make = Replica._make_schedule
    monkeypatch.setattr(Replica, "_make_schedule", lambda self: (calls.append(1), make(self))[1])
    layout = Layout(8, 512)
    system, _ = make_system(ROOFLINE, {layout: 1 << 21})
    response = lengths_of(65536, 16384, 0)
    done = simulate(system, StaticPolicy(layout), np.full(65536, 200), response, 16384)
    decode = done.segments["kind"] == "decode"
    assert (done.segments["steps"] * done.segments["batch"])[decode].sum() == (response - 1).sum()
    assert len(calls) <= 4 * layout.dp
