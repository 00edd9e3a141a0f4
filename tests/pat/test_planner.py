"""Planner: closed forms, and its schedule against the enumeration of all schedules."""

from itertools import combinations_with_replacement, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.backends.simulated.synthetic import constant_profile, formula_grid, make_system, roofline_profile
from pat.layout import Layout, layouts
from pat.lengths import LengthModel
from pat.planner import Outlook, expected_course, known_course, outlook, reversed_argmin
from pat.profile import StepProfile
from pat.switch_cost import SwitchParts

WORLD = layouts(8)
TP1, TP2, TP4, TP8 = WORLD
AMPLE = dict.fromkeys(WORLD, 1 << 40)


def parts(seconds: float) -> SwitchParts:
    return SwitchParts("fixed", seconds, 0.0, 0.0, 0.0, 0.0)


def batch_profile(base_s: dict[int, float], per_sequence_s: dict[int, float]) -> StepProfile:
    """A decode step of b sequences takes base + b * per_sequence; prefill takes no time, so KV moves for free."""
    grids = {
        tp: formula_grid(tp, lambda b, c, tp=tp: base_s[tp] + per_sequence_s[tp] * b + 0 * c, 0, 0) for tp in base_s
    }
    return StepProfile("batch", "none", grids)


def planner_of(profile, cost_s: float, capacity=None, kv: str = "recompute"):
    return make_system(profile, capacity or AMPLE, parts(cost_s), kv=kv)[1]


def best_by_enumeration(segment_s: np.ndarray, switch_s: np.ndarray, here: int, max_hops: int) -> float:
    """The least time over every list of at most ``max_hops`` (segment, layout), segments ascending."""
    layouts_, segments = segment_s.shape
    best = np.inf
    for hops in range(max_hops + 1):
        for when in combinations_with_replacement(range(segments), hops):
            for targets in product(range(layouts_), repeat=hops):
                at, total, start = here, 0.0, 0
                for j, to in zip(when, targets, strict=True):
                    total += segment_s[at, start:j].sum() + (switch_s[at, to, j] if to != at else 0.0)
                    at, start = to, j
                best = min(best, total + segment_s[at, start:].sum())
    return best


def time_of(plan, ahead: Outlook, planner, here: Layout) -> float:
    """Seconds of the schedule that a plan names."""
    segment_s, switch_s, queue_s = planner.segment_s(ahead), planner.switch_s(ahead), planner.queue_s(ahead)
    starts = np.r_[0.0, np.cumsum(ahead.steps)]
    at, start, total = planner.layouts.index(here), 0, 0.0
    for steps, layout in plan.hops:
        j, to = int(np.flatnonzero(starts == steps)[0]), planner.layouts.index(layout)
        total += switch_s[at, to, j]
        if j > start:
            total += queue_s[at, start] + segment_s[at, start:j].sum()
        at, start = to, j
    return total + queue_s[at, start] + segment_s[at, start:].sum()


# --- outlooks


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 99)), min_size=1, max_size=12))
def test_known_course_counts_the_living_at_every_step(sequences):
    remaining, context = (np.array(column) for column in zip(*sequences, strict=True))
    ahead = known_course(remaining, context)
    assert ahead.steps.sum() == remaining.max()
    alive = np.repeat(ahead.alive, ahead.steps.astype(int))
    within = np.concatenate([np.arange(n) for n in ahead.steps.astype(int)])
    mean = np.repeat(ahead.context_tokens, ahead.steps.astype(int)) + within
    for t in range(remaining.max()):
        living = remaining > t
        assert alive[t] == living.sum()
        assert mean[t] == pytest.approx((context[living] + t).mean())
    assert np.all(ahead.busy == 1)


def test_known_course_leaves_out_who_has_ended():
    ahead = known_course(np.array([0, 5, 5, 9, 0]), np.array([100, 10, 20, 30, 100]))
    assert ahead.steps.tolist() == [5, 4]
    assert ahead.alive.tolist() == [3, 1]
    assert ahead.context_tokens.tolist() == [20, 35]


@pytest.mark.parametrize("sequences", [1, 2, 64])
def test_expected_course_is_binomial(sequences):
    """Each is alive with probability p: any with 1 - (1 - p)^n, and then n p / busy of them."""
    share = np.array([1.0, 0.5, 1e-3])
    ahead = expected_course(np.array([0.0, 1, 2, 3]), sequences * share, 7.0, sequences)
    busy = 1 - (1 - share) ** sequences
    assert ahead.busy == pytest.approx(busy, rel=1e-9)
    assert ahead.alive == pytest.approx(sequences * share / busy, rel=1e-9)
    assert ahead.context_tokens.tolist() == [7.0, 8.0, 9.0]


def test_outlook_of_one_sequence_is_its_expected_remaining_length():
    """Exponential law, far from the cap: sum of busy x steps = mean, exactly one sequence while busy."""
    lengths = LengthModel.fit(np.random.default_rng(3).exponential(300, 200_000) + 1, 1 << 16, weight=1e9)
    ahead = outlook(lengths, np.array([50.0]), 150.0)
    assert np.sum(ahead.busy * ahead.steps) == pytest.approx(300, rel=0.03)
    assert np.all(ahead.alive == pytest.approx(1.0))


def test_outlook_ends_at_the_cap_and_declines():
    lengths = LengthModel.fit(np.random.default_rng(0).integers(1, 900, 300), 1000)
    ahead = outlook(lengths, np.array([100.0, 400.0]), 300.0)
    assert ahead.steps.sum() == 900
    assert np.all(np.diff(ahead.busy) <= 1e-12)
    assert ahead.alive[0] == pytest.approx(2.0, rel=0.2)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=1, max_size=3))
def test_reversed_argmin(values):
    values = np.array(values, dtype=float)
    found = reversed_argmin(values)
    for row, index in zip(values, found, strict=True):
        assert index.tolist() == [k + int(np.argmin(row[k:])) for k in range(len(row))]


# --- predicted times


def test_segment_time_is_the_longest_sequences_replica():
    """33 begin, 17 are alive later: of 33 / 8 - 1 that began beside the longest one, each with probability 16 / 32."""
    base, each = dict.fromkeys((1, 2, 4, 8), 1e-2), dict.fromkeys((1, 2, 4, 8), 1e-3)
    planner = planner_of(batch_profile(base, each), 0.0)
    ahead = Outlook(np.full(2, 100.0), np.array([1.0, 0.5]), np.array([33.0, 17.0]), np.full(2, 50.0))
    begin = [100 * (1e-2 + 1e-3 * 33 / a.dp) for a in WORLD]
    later = [0.5 * 100 * (1e-2 + 1e-3 * (1 + 0.5 * (33 / a.dp - 1))) for a in WORLD]
    assert planner.segment_s(ahead) == pytest.approx(np.array([begin, later]).T, rel=1e-12)


def test_segments_wait_where_the_kv_cache_holds_fewer():
    """20 of mean context 100 on one replica that holds 1,000 tokens: 10 run at a time, twice as long."""
    base, each = dict.fromkeys((1, 2, 4, 8), 1e-2), dict.fromkeys((1, 2, 4, 8), 1e-3)
    planner = planner_of(batch_profile(base, each), 0.0, dict.fromkeys(WORLD, 1000))
    ahead = Outlook(np.array([2.0]), np.ones(1), np.array([20.0]), np.array([99.0]))
    fits = 1000 / 101  # at the end of the segment each has a context of 101
    assert planner.segment_s(ahead)[3, 0] == pytest.approx(2 * (1e-2 + 1e-3 * fits))
    # The others wait: 10 run at the mean context of 100, each has 2 tokens to go, a step of 10 takes 20 ms.
    assert planner.queue_s(ahead)[3, 0] == pytest.approx((20 - fits) / 10 * 2 * 2e-2)
    assert planner.step_s(TP8, 20, 100) == pytest.approx(2 * (1e-2 + 1e-3 * 10))
    assert planner.step_s(TP1, 20, 100) == pytest.approx(1e-2 + 1e-3 * 3)


# --- closed forms


@pytest.mark.parametrize(("cost_s", "hops"), [(9.99, 1), (10.01, 0)])
def test_equal_lengths_switch_at_once_or_never(cost_s, hops):
    """1,000 steps left, 10 ms saved in each by TP8: worth 10 s, and never worth waiting."""
    planner = planner_of(constant_profile({1: 0.03, 2: 0.02, 4: 0.02, 8: 0.01}), cost_s)
    plan = planner.plan(TP2, known_course(np.full(64, 1000), np.full(64, 10)))
    assert plan.hops == (((0.0, TP8),) if hops else ())
    assert plan.now == (TP8 if hops else None)
    assert plan.stay_s == pytest.approx(20.0)
    assert plan.best_s == pytest.approx(10 + cost_s if hops else 20.0)
    assert plan.first_cost_s == pytest.approx(cost_s if hops else 0.0)


def test_equal_lengths_never_switch_from_the_fastest_layout():
    planner = planner_of(roofline_profile(), 0.0)
    for batch, layout in product((8, 64, 1024), WORLD):
        ahead = known_course(np.full(batch, 3000), np.full(batch, 100))
        times = planner.segment_s(ahead).sum(axis=1)
        if WORLD[int(times.argmin())] == layout:
            assert planner.plan(layout, ahead).hops == ()


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 60), st.integers(1, 60), st.integers(1, 2000), st.integers(1, 2000), st.floats(0.01, 3.0))
def test_two_lengths_switch_where_the_formula_says(short, long, first, more, cost_s):
    """``short`` sequences of ``first`` tokens, ``long`` of ``first + more``; TP1 base 20 ms, TP8 base 5 ms, 1 ms a
    sequence of the replica. The longest sequence's replica of TP1 runs 1 + (alive - 1) * (n / 8 - 1) / (n - 1), that of
    TP8 all alive. One switch saves the difference in each step after it: its best place is the start, or when the short
    ones have ended, or nowhere."""
    capacity = dict.fromkeys((TP1, TP8), 1 << 40)
    profile = batch_profile({1: 0.020, 8: 0.005}, {1: 0.001, 8: 0.001})
    planner = planner_of(profile, cost_s, capacity)
    remaining = np.r_[np.full(short, first), np.full(long, first + more)]
    plan = planner.plan(TP1, known_course(remaining, np.ones(len(remaining), dtype=int)), max_hops=1)

    def saved_s(alive: int, steps: int) -> float:
        beside = max(0, len(remaining) / 8 - 1) / (len(remaining) - 1)
        return steps * (0.015 - 0.001 * (alive - 1) * (1 - beside))

    late_s = saved_s(long, more) - cost_s
    now_s = late_s + saved_s(short + long, first)
    gain_s = max(0.0, now_s, late_s)
    assert plan.stay_s - plan.best_s == pytest.approx(gain_s, abs=1e-9)
    if min(abs(now_s - late_s), abs(max(now_s, late_s))) > 1e-6:
        expected = () if gain_s == 0 else ((0.0 if now_s > late_s else float(first), TP8),)
        assert plan.hops == expected


def test_several_hops_where_each_layout_has_its_time():
    """Per-sequence time grows with TP's lower DP: 512, 64 and 1 sequences want TP1, TP4 and TP8."""
    profile = batch_profile({1: 0.040, 2: 0.030, 4: 0.012, 8: 0.004}, dict.fromkeys((1, 2, 4, 8), 0.0008))
    planner = planner_of(profile, 0.05)
    remaining = np.r_[np.full(448, 500), np.full(54, 1500), np.full(10, 4000)]
    plan = planner.plan(TP1, known_course(remaining, np.ones(512, dtype=int)))
    assert [str(layout) for _, layout in plan.hops] == ["TP4xDP2", "TP8xDP1"]
    assert [steps for steps, _ in plan.hops] == [500.0, 1500.0]


# --- against all schedules


@st.composite
def problems(draw):
    """Few layouts and few distinct lengths, so that every schedule can be tried."""
    chosen = tuple(sorted(draw(st.sets(st.sampled_from(WORLD), min_size=2, max_size=3))))
    remaining = draw(st.lists(st.sampled_from([3, 40, 200, 900, 1500]), min_size=1, max_size=40))
    base = {a.tp: draw(st.floats(0.001, 0.05)) for a in chosen}
    each = {a.tp: draw(st.floats(0.0, 0.003)) for a in chosen}
    return chosen, np.array(remaining), batch_profile(base, each), draw(st.floats(0.0, 2.0))


@settings(max_examples=150, deadline=None)
@given(problems(), st.integers(0, 3), st.data())
def test_plan_is_the_best_of_all_schedules(problem, max_hops, data):
    chosen, remaining, profile, cost_s = problem
    planner = planner_of(profile, cost_s, dict.fromkeys(chosen, 1 << 40))
    start = data.draw(st.sampled_from(chosen))
    ahead = known_course(remaining, np.full(len(remaining), 10))
    base_s = np.array([[profile.decode_s(a.tp, b, 10) for b in (1, 2)] for a in chosen])
    n, dp = len(remaining), np.array([a.dp for a in chosen])[:, None]
    batch = 1 + (ahead.alive - 1)[None, :] * np.maximum(0, n / dp - 1) / max(1, n - 1)
    segment_s = ahead.steps * (base_s[:, :1] + (base_s[:, 1:] - base_s[:, :1]) * (batch - 1))
    switch_s = np.full((len(chosen), len(chosen), len(ahead.steps)), cost_s)
    plan = planner.plan(start, ahead, max_hops)
    best_s = best_by_enumeration(segment_s, switch_s, chosen.index(start), max_hops)
    assert plan.best_s == pytest.approx(best_s, rel=1e-9)
    assert plan.stay_s == pytest.approx(segment_s[chosen.index(start)].sum(), rel=1e-9)
    assert len(plan.hops) <= max_hops
    assert time_of(plan, ahead, planner, start) == pytest.approx(best_s, rel=1e-9)


@st.composite
def outlooks(draw):
    """Expected courses by a length model, with costs that depend on contexts and batches."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    cap = draw(st.sampled_from([500, 8000]))
    earlier = np.minimum(np.ceil(rng.lognormal(draw(st.floats(3, 8)), 1.0, 200)), cap)
    generated = rng.integers(0, cap // 2, draw(st.integers(1, 300)))
    return outlook(LengthModel.fit(earlier, cap), generated.astype(float), float(generated.mean()) + 100)


@settings(max_examples=60, deadline=None)
@given(outlooks(), st.sampled_from(WORLD), st.sampled_from([0.0, 0.05, 5.0]), st.sampled_from([20_000, 1 << 30]))
def test_more_hops_are_never_worse_and_none_is_worse_than_staying(ahead, start, cost_s, capacity):
    planner = planner_of(roofline_profile(), cost_s, dict.fromkeys(WORLD, capacity), kv="cheaper")
    plans = [planner.plan(start, ahead, hops) for hops in range(4)]
    assert plans[0].best_s == plans[0].stay_s
    assert plans[0].hops == ()
    for fewer, more in pairwise(plans):
        assert more.best_s <= fewer.best_s * (1 + 1e-12)
        assert more.stay_s == fewer.stay_s
    for plan in plans:
        assert time_of(plan, ahead, planner, start) == pytest.approx(plan.best_s, rel=1e-9)
        assert (plan.now is not None) == (bool(plan.hops) and plan.hops[0][0] == 0)
        assert [steps for steps, _ in plan.hops] == sorted(steps for steps, _ in plan.hops)


@settings(max_examples=30, deadline=None)
@given(outlooks(), st.sampled_from([0.05, 5.0]), st.integers(100, 100_000))
def test_first_layout_is_the_best_start(ahead, cost_s, prompt_tokens):
    planner = planner_of(roofline_profile(), cost_s, kv="cheaper")
    first, plan = planner.first_layout(ahead, prompt_tokens)
    time_s = {
        a: 2e-3 + 2.5e-5 / a.tp * prompt_tokens / a.dp + planner.plan(a, ahead).best_s for a in WORLD
    }  # the roofline's prefill
    assert time_s[first] == pytest.approx(min(time_s.values()), rel=1e-9)
    assert plan == planner.plan(first, ahead)
