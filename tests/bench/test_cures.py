"""Other cures of the long tail in closed form: every decode step takes one second, prefill none."""

import numpy as np
import pytest

from bench.backends.simulated.cures import (
    longest_first,
    over_provisioned,
    partial_rollouts,
    run_until,
    sibling_estimate,
)
from bench.backends.simulated.mixed import Mix, best_count, mixed_s, mixes
from bench.backends.simulated.synthetic import constant_profile, make_system
from bench.workloads.trace import LengthTrace
from pat.layout import Layout

CAP = 1000


def trace_of(*lengths: int, prompts: int | None = None) -> LengthTrace:
    n = len(lengths)
    ids = [f"p{i * (prompts or n) // n}" for i in range(n)]
    return LengthTrace.of(ids, range(n), [10] * n, lengths, CAP)


def one_second(tps=(1, 2), capacity=100_000, dp=2):
    layouts = {Layout(tp, max(1, dp // tp)): capacity for tp in tps}
    system, _ = make_system(constant_profile({tp: 1.0 / tp for tp in tps}), layouts)
    return system


def test_until_the_wanted_have_ended():
    """Lengths 3, 5, 9: the second ends after 4 decode steps (its first token comes with the prefill)."""
    system = one_second(dp=1)
    moment_s, generated, ended = run_until(system, Layout(1, 1), np.full(3, 10), np.array([3, 5, 9]), CAP, wanted=2)
    assert moment_s == pytest.approx(4.0)
    assert generated.tolist() == [3, 5, 5]
    assert ended.tolist() == [True, True, False]


def test_over_provisioned_throws_the_longest_away():
    """Of 3, 5, 9 two are wanted: 8 of 13 tokens are kept, of mean length 4 beside 17 / 3."""
    cured = over_provisioned(one_second(dp=1), Layout(1, 1), trace_of(3, 5, 9), wanted=2, cap=CAP)
    assert cured.rollout_s == pytest.approx(4.0)
    assert cured.response_tokens == 8
    assert cured.wasted_token_share == pytest.approx(5 / 13)
    assert cured.mean_length_ratio == pytest.approx(4 / (17 / 3))


def test_partial_rollouts_carry_on():
    """2 of 3 wanted. First 3, 5 end, 9 has 5; then it goes on beside 2 new of 3, whose third token ends the iteration
    after 2 decode steps: it has 5 + 3 by then."""
    fresh = [trace_of(3, 5, 9), trace_of(3, 3, 50), trace_of(40, 50, 60)]
    first, second, third = partial_rollouts(one_second(dp=1), Layout(1, 1), fresh, 3, 2, CAP, warm_up=0)
    assert (first.rollout_s, first.response_tokens, first.stale_token_share) == (pytest.approx(4.0), 8, 0.0)
    assert (second.rollout_s, second.response_tokens, second.stale_token_share) == (pytest.approx(2.0), 6, 0.0)
    assert third.response_tokens == 49
    assert third.stale_token_share == pytest.approx(8 / 49)
    assert third.rollout_s == pytest.approx(39.0)


def test_longest_first_with_room_for_all():
    """All fit at once: the rollout lasts the 8 decode steps of the longest, whatever the order."""
    system = one_second(dp=1)
    trace = trace_of(3, 5, 9)
    cured = longest_first(system, Layout(1, 1), trace, trace.response_tokens, CAP)
    assert cured.rollout_s == pytest.approx(8.0)
    assert cured.response_tokens == 17


def test_siblings_tell_of_a_prompt():
    assert sibling_estimate(trace_of(10, 20, 30, 100, prompts=2)).tolist() == [20, 10, 100, 30]
    assert sibling_estimate(trace_of(10, 30)).tolist() == [20, 20]


def test_mixes_halve_each_node():
    assert [str(m) for m in mixes(8, 8, (1, 2, 4, 8))] == [
        "TP2 x 2 + TP1 x 4",
        "TP4 x 1 + TP1 x 4",
        "TP4 x 1 + TP2 x 2",
    ]
    assert mixes(16, 8, (1, 4)) == [Mix(Layout(4, 2), Layout(1, 8))]


def test_a_mix_takes_the_longer_half():
    """A step takes 1 s in TP1 and 0.5 s in TP2: 9 tokens in 4 s there, 5 tokens in 4 s here."""
    system = one_second()
    mix, trace = Mix(Layout(2, 1), Layout(1, 2)), trace_of(3, 5, 9)

    def seconds(count: int) -> float:
        return mixed_s(system, {1: 100_000, 2: 100_000}, mix, trace, trace.response_tokens, count, CAP)

    assert seconds(1) == pytest.approx(4.0)
    assert seconds(0) == pytest.approx(8.0)
    assert best_count(np.array([0, 1]), seconds) == 1


def test_longest_first_where_some_must_queue():
    """Room for two: as they come, 9 waits for the 2 steps of 3 and ends after 10; longest first it begins at once."""
    system, trace = one_second(tps=(1,), capacity=2100, dp=1), trace_of(3, 5, 9)
    as_they_come = longest_first(system, Layout(1, 1), trace, np.zeros(3), CAP)
    assert as_they_come.rollout_s == pytest.approx(10.0)
    assert longest_first(system, Layout(1, 1), trace, trace.response_tokens, CAP).rollout_s == pytest.approx(8.0)
