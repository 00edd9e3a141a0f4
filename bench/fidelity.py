"""Fidelity: measured rollouts replayed in the simulator from a step profile alone, and what each gave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from bench.backends.simulated.rollout import Rollout, System, simulate
from bench.experiment import Experiment
from bench.live_arms import LIVE_ARMS, capacities, planner_of, policy_of
from bench.measured import kv_tokens_per_rank
from bench.profiles.samples import Samples
from bench.records import RolloutSummary
from bench.workloads.trace import LengthTrace
from pat.layout import Layout
from pat.policy import Policy, StaticPolicy
from pat.profile import StepProfile

CHUNK_TOKENS = 4096
"""Prefill budget of a step of SGLang on a CPU."""
REACTION_S = 1e-3
"""From a replica's report to the order of a switch: by then the next step has begun."""


@dataclass(frozen=True, eq=False)
class Replay:
    """A measured rollout, its replay, and its decode steps by (tp, batch): ``steps`` with columns tp, batch, count,
    measured_s and predicted_s, sums over the steps that were measured, at their own batches and contexts."""

    record: RolloutSummary
    predicted: Rollout
    steps: pd.DataFrame

    @property
    def rollout_error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted.rollout_s / self.record.rollout_s - 1.0

    @property
    def step_error(self) -> float:
        """Of the mean decode step: predicted / measured - 1."""
        return float(self.steps.predicted_s.sum() / self.steps.measured_s.sum()) - 1.0

    @property
    def layouts(self) -> tuple[list[str], list[str]]:
        """(measured, predicted) courses."""
        predicted = [str(self.predicted.first), *(str(event.new) for event in self.predicted.switches)]
        return [layout for _, layout in self.record.layouts], predicted


def replay(experiment: Experiment, record: RolloutSummary, trace: LengthTrace, samples: Samples, steps: pd.DataFrame):
    """Replay one record of a measured experiment; ``steps``: its logged steps. All that is taken from the record is
    which arm ran on which trace."""
    capacity = capacities(kv_tokens_per_rank(experiment, trace.prompt_tokens), experiment.layouts)
    planner = planner_of(samples, capacity, experiment.cluster.gpus_per_node)
    system = System(
        planner.profile, planner.switches, capacity, CHUNK_TOKENS, reaction_s=REACTION_S, reports_at_once=True
    )
    policy = policy_for(experiment, record, planner)
    rollout = simulate(system, policy, trace.prompt_tokens, trace.response_tokens, experiment.max_response_tokens)
    return Replay(record, rollout, step_sums(steps, planner.profile))


def policy_for(experiment: Experiment, record: RolloutSummary, planner) -> Policy:
    """The policy that an arm of the measured tier runs."""
    if record.arm in LIVE_ARMS:
        return policy_of(experiment, planner, record.arm, record.batch, record.seed)
    return StaticPolicy(Layout.parse(record.arm.removeprefix("static-")))


def step_sums(steps: pd.DataFrame, profile: StepProfile) -> pd.DataFrame:
    """Measured decode steps beside the profile's answer for each, summed by (tp, batch)."""
    decode = steps[steps.kind == "decode"]
    predicted = np.empty(len(decode))
    tp, batch = decode.tp.to_numpy(), decode.batch.to_numpy(int)
    for degree in np.unique(tp):
        mine = tp == degree
        table = profile.table(int(degree), int(batch.max()))
        predicted[mine] = table.step_s(batch[mine], decode.context_tokens.to_numpy()[mine])
    rows = pd.DataFrame({"tp": tp, "batch": batch, "measured_s": decode.seconds.to_numpy(), "predicted_s": predicted})
    sums = rows.groupby(["tp", "batch"], as_index=False).sum()
    return sums.assign(count=rows.groupby(["tp", "batch"]).size().to_numpy())


def switch_rows(replayed: Replay) -> list[dict]:
    """A row for each switch, measured beside predicted, in order; NaN and None where one of the two did not switch.

    measured_s, predicted_s    from the order to routing into the new layout: waiting for the step boundary included
    measured_at_s, predicted_at_s, measured_alive, predicted_alive   the point: since the rollout's begin; sequences
    """
    measured, predicted = replayed.record.switches, replayed.predicted.switches
    starts_s = [time_s for time_s, _ in replayed.record.layouts[1:]]
    rows = []
    for i in range(max(len(measured), len(predicted))):
        row = {"number": i + 1, "measured": None, "predicted": None}
        row |= dict.fromkeys(("measured_s", "predicted_s", "measured_at_s", "predicted_at_s"), np.nan)
        row |= dict.fromkeys(("measured_alive", "predicted_alive"), np.nan)
        if i < len(measured):
            one = measured[i]
            row |= {"measured": f"{one['old']} → {one['new']}", "measured_s": one["total_s"]}
            row["measured_alive"] = sum(one[way] for way in ("migrated", "recomputed", "queued", "waiting"))
            row["measured_at_s"] = starts_s[i] - one["total_s"] if i < len(starts_s) else np.nan
        if i < len(predicted):
            event = predicted[i]
            row |= {"predicted": f"{event.old} → {event.new}", "predicted_s": event.wait_s + event.cost.total_s}
            row |= {"predicted_alive": event.alive, "predicted_at_s": event.time_s}
        rows.append(row)
    return rows
