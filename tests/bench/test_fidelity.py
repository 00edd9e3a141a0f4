"""Replays: a rollout by the profile's own law is predicted exactly; on a slower machine it errs by its factor."""

import numpy as np
import pandas as pd
import pytest

from bench.backends.simulated.rollout import System, simulate
from bench.experiment import Cluster, Experiment
from bench.fidelity import CHUNK_TOKENS, REACTION_S, replay, step_sums, switch_rows
from bench.live_arms import capacities, planner_of, policy_of
from bench.measured import kv_tokens_per_rank
from bench.records import RolloutSummary
from bench.workloads.trace import LengthTrace
from pat.layout import Layout
from pat.policy import StaticPolicy
from tests.bench.test_live_profile import BOTH, samples_of, step_s

EXPERIMENT = Experiment(
    name="cpu-tiny",
    tier="measured",
    model="tiny",
    cluster=Cluster(gpu="cpu", nodes=1, gpus_per_node=2),
    max_response_tokens=100,
    max_prompt_tokens=50,
    batches=(8,),
    samples_per_prompt=2,
    lengths="lognormal:3.2,1.0",
    tps=(1, 2),
    arms=("static", "pat-forced"),
)


def trace_of() -> LengthTrace:
    response = np.array([5, 9, 12, 20, 30, 41, 60, 90])
    return LengthTrace.of([f"p{i // 2}" for i in range(8)], np.tile([0, 1], 4), np.full(8, 40), response, 100)


def run(arm: str, slower: float = 1.0):
    """(record, steps, rollout) of an arm on a machine that follows the samples' law, but takes ``slower`` times."""
    trace, samples = trace_of(), samples_of()
    capacity = capacities(kv_tokens_per_rank(EXPERIMENT, trace.prompt_tokens), EXPERIMENT.layouts)
    planner = planner_of(samples, capacity, 2)
    policy = policy_of(EXPERIMENT, planner, arm, 8, 0) if arm == "pat-forced" else StaticPolicy(Layout.parse(arm[7:]))
    system = System(
        planner.profile, planner.switches, capacity, CHUNK_TOKENS, reaction_s=REACTION_S, reports_at_once=True
    )
    rollout = simulate(system, policy, trace.prompt_tokens, trace.response_tokens, 100)
    events = [
        {
            "old": str(e.old),
            "new": str(e.new),
            "total_s": slower * (e.wait_s + e.cost.total_s),
            "migrated": e.alive,
            "recomputed": 0,
            "queued": 0,
            "waiting": 0,
        }
        for e in rollout.switches
    ]
    starts = [(0.0, str(rollout.first))]
    starts += [(e.time_s + e.wait_s + slower * e.cost.total_s, str(e.new)) for e in rollout.switches]
    record = RolloutSummary(
        experiment="cpu-tiny",
        arm=arm,
        tier="measured",
        batch=8,
        host_term="real",
        seed=0,
        layouts=starts,
        rollout_s=slower * rollout.rollout_s,
        prompt_tokens=320,
        response_tokens=267,
        tokens_per_s=1.0,
        decode_p50_ms=1.0,
        decode_p90_ms=1.0,
        decode_p99_ms=1.0,
        switches=events,
        trace_sha256=trace.sha256,
    )
    return record, single_steps(rollout.segments, slower), rollout


def single_steps(segments: dict, slower: float) -> pd.DataFrame:
    """Runs of equal steps, taken apart."""
    rows = pd.DataFrame(segments)
    each = rows.loc[rows.index.repeat(rows.steps)]
    within = each.groupby(level=0).cumcount()
    context = each.context_tokens + within
    seconds = [step_s(tp, b, c) for tp, b, c in zip(each.tp, each.batch, context, strict=True)]
    return each.assign(context_tokens=context, seconds=slower * np.array(seconds), steps=1)


@pytest.mark.parametrize("arm", ["static-TP1xDP2", "static-TP2xDP1", "pat-forced"])
@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_a_machine_that_is_slower_by_a_factor_shows_as_that_error(arm, slower):
    record, steps, rollout = run(arm, slower)
    found = replay(EXPERIMENT, record, trace_of(), samples_of(), steps)
    assert found.rollout_error == pytest.approx(1 / slower - 1, abs=1e-4)
    assert found.step_error == pytest.approx(1 / slower - 1, abs=1e-4)
    measured, predicted = found.layouts
    assert measured == predicted == [str(rollout.first), *(str(e.new) for e in rollout.switches)]


def test_the_switch_of_the_forced_arm_is_set_beside_the_measured_one():
    record, steps, rollout = run("pat-forced")
    assert rollout.switches, "the law makes TP2 twice as fast: it must go up"
    rows = switch_rows(replay(EXPERIMENT, record, trace_of(), samples_of(), steps))
    for row, event in zip(rows, rollout.switches, strict=True):
        assert row["measured"] == row["predicted"] == f"{event.old} → {event.new}"
        assert row["predicted_s"] == pytest.approx(row["measured_s"])
        assert row["predicted_at_s"] == pytest.approx(row["measured_at_s"])
        assert row["measured_alive"] == row["predicted_alive"] == event.alive


def test_a_switch_that_only_one_of_the_two_made_has_no_partner():
    record, steps, rollout = run("pat-forced")
    none = record.model_copy(update={"switches": [], "layouts": record.layouts[:1]})
    rows = switch_rows(replay(EXPERIMENT, none, trace_of(), samples_of(), steps))
    assert len(rows) == len(rollout.switches)
    assert rows[0]["measured"] is None
    assert np.isnan(rows[0]["measured_s"])


def test_steps_are_summed_by_tp_and_batch():
    rows = [("decode", 1, 2, 30.0), ("decode", 1, 2, 40.0), ("decode", 2, 8, 50.0), ("extend", 1, 2, 9.0)]
    steps = pd.DataFrame(rows, columns=["kind", "tp", "batch", "context_tokens"]).assign(seconds=0.5)
    sums = step_sums(steps, samples_of().profile()).set_index(["tp", "batch"])
    assert sums["count"].to_dict() == {(1, 2): 2, (2, 8): 1}
    assert sums.measured_s.to_dict() == {(1, 2): 1.0, (2, 8): 0.5}
    assert sums.predicted_s[1, 2] == pytest.approx(step_s(1, 2, 30) + step_s(1, 2, 40), rel=1e-6)
    assert sums.predicted_s[2, 8] == pytest.approx(step_s(2, 8, 50), rel=1e-6)


def test_the_first_question_comes_with_the_first_prefill():
    """As the engine's own reports: before any decode step, and one step after a switch."""
    trace, asked = trace_of(), []

    class Asked(StaticPolicy):
        def decide(self, state):
            asked.append(int(state.generated_tokens.max(initial=0)))
            return super().decide(state)

    capacity = dict.fromkeys(BOTH, 10_000)
    planner = planner_of(samples_of(), capacity, 2)
    for at_once, generated in ((True, 1), (False, 5)):
        asked.clear()
        system = System(planner.profile, planner.switches, capacity, reports_at_once=at_once)
        simulate(system, Asked(BOTH[0], 4), trace.prompt_tokens, trace.response_tokens, 100)
        assert asked[0] == pytest.approx(generated, abs=1 - at_once)
        assert np.diff(asked[:3]) == pytest.approx(4, abs=1)
