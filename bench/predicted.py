"""The predicted tier: every arm of one cell on the simulated backend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baselines.limit import physical_limit_s
from baselines.oracle import Clairvoyant
from bench.backends.simulated.rollout import Rollout, simulate
from bench.errors import UserError
from bench.experiment import Experiment
from bench.machine import Machine, machine_of
from bench.records import RolloutSummary
from bench.stats import weighted_percentiles
from bench.workloads.lengths import parse as parse_lengths
from bench.workloads.trace import LengthTrace, synthetic_trace
from pat.lengths import LengthModel
from pat.policy import AdaptivePolicy, LengthForesight, Policy, StaticPolicy
from pat.switch_cost import SwitchModel

EARLIER_ROLLOUTS = 4


@dataclass(frozen=True)
class Cell:
    """One batch of an experiment under one host term and seed."""

    experiment: Experiment
    batch: int
    host_term: str
    seed: int


def trace_of(experiment: Experiment, batch: int, seed: int) -> LengthTrace:
    """The synthetic trace that all arms of a cell run."""
    return synthetic_trace(
        parse_lengths(experiment.lengths),
        prompts=batch // experiment.samples_per_prompt,
        samples=experiment.samples_per_prompt,
        max_response_tokens=experiment.max_response_tokens,
        seed=seed,
        prompt_share=experiment.prompt_share,
    )


def earlier_lengths(experiment: Experiment, batch: int, seed: int) -> np.ndarray:
    """Response lengths of earlier rollouts, from which a policy learns: same law, other seeds."""
    seeds = [1_000_003 + 1009 * seed + k for k in range(EARLIER_ROLLOUTS)]
    return np.concatenate([trace_of(experiment, batch, s).response_tokens for s in seeds])


@dataclass(frozen=True, eq=False)
class Arm:
    """A policy and the switches it makes."""

    name: str
    policy: Policy
    switches: SwitchModel


def arms_of(cell: Cell, machine: Machine, trace: LengthTrace) -> list[Arm]:
    """The arms that the experiment asks for, in order. Static layouts that cannot hold the longest sequence are not."""
    seats, asked = machine.switches(machine.parts("seats")), cell.experiment.arms
    lengths = LengthModel.fit(
        earlier_lengths(cell.experiment, cell.batch, cell.seed), cell.experiment.max_response_tokens
    )
    seen, start = LengthForesight(lengths), cell.experiment.verl_default
    arms = [Arm(f"static-{a}", StaticPolicy(a), seats) for a in machine.layouts] if "static" in asked else []

    def adaptive(name: str, parts: str, kv: str = "cheaper", foresight=seen, **options) -> None:
        if options.get("start") not in (None, *machine.layouts):
            return
        switches = machine.switches(machine.parts(parts), kv)
        arms.append(Arm(name, AdaptivePolicy(machine.planner(switches), foresight, **options), switches))

    if "pat-paper" in asked:
        adaptive("pat-paper", "paper", start=start, max_hops=1)
    if "restart" in asked:
        adaptive("restart", "restart", kv="recompute", start=start, max_hops=1)
    if "pat-planned" in asked:
        adaptive("pat-planned", "seats")
    if "oracle" in asked:
        adaptive("oracle", "seats", foresight=Clairvoyant(trace.response_tokens), margin=0.0)
    return arms


def run_cell(cell: Cell, trace: LengthTrace | None = None) -> list[tuple[RolloutSummary, Rollout]]:
    """Every arm of a cell on one trace (its own synthetic one unless given). The oracle may copy any other arm."""
    experiment = cell.experiment
    trace = trace or trace_of(experiment, cell.batch, cell.seed)
    machine, results = machine_of(experiment, cell.host_term), []
    limit_s = physical_limit_s(machine.profile, trace.prompt_tokens, trace.response_tokens)
    for arm in arms_of(cell, machine, trace):
        system = machine.system(arm.switches)
        cap = experiment.max_response_tokens
        rollout = simulate(system, arm.policy, trace.prompt_tokens, trace.response_tokens, cap)
        if arm.name == "oracle":
            rollout = min([rollout, *(r for _, r in results)], key=lambda r: r.rollout_s)
        results.append((summarise(cell, arm.name, trace, rollout, limit_s, machine), rollout))
    return results


def summarise(
    cell: Cell, arm: str, trace: LengthTrace, rollout: Rollout, limit_s: float, machine: Machine
) -> RolloutSummary:
    """The record of one rollout; tokens/s = response tokens / rollout seconds, all GPUs."""
    segments = rollout.segments
    decode = segments["kind"] == "decode"
    steps = segments["steps"][decode]
    if not len(steps):
        raise UserError(f"experiment {cell.experiment.name}: every response has one token; give longer lengths")
    p50, p90, p99 = weighted_percentiles(1e3 * segments["seconds"][decode] / steps, steps, (50, 90, 99))
    response = int(trace.response_tokens.sum())
    tp = segments["tp"]
    peak_context = float((segments["context_tokens"] + segments["steps"])[decode].max())
    extrapolated = any(
        machine.profile.extrapolated(int(t), int(segments["batch"][tp == t].max()), peak_context) for t in np.unique(tp)
    )
    return RolloutSummary(
        experiment=cell.experiment.name,
        arm=arm,
        tier="predicted",
        batch=cell.batch,
        host_term=cell.host_term,
        seed=cell.seed,
        layouts=[(0.0, str(rollout.first)), *((e.time_s, str(e.new)) for e in rollout.switches)],
        rollout_s=rollout.rollout_s,
        prompt_tokens=int(trace.prompt_tokens.sum()),
        response_tokens=response,
        tokens_per_s=response / rollout.rollout_s,
        decode_p50_ms=p50,
        decode_p90_ms=p90,
        decode_p99_ms=p99,
        switches=[
            {
                "time_s": e.time_s,
                "from": str(e.old),
                "to": str(e.new),
                "alive": e.alive,
                "wait_s": e.wait_s,
                "fixed_s": e.cost.fixed_s,
                "kv_s": e.cost.kv_s,
                "kv_bytes": e.cost.kv_bytes,
                "migrated": e.cost.migrated,
                "recomputed": e.cost.recomputed,
                "predicted_cost_s": e.predicted_cost_s,
                "predicted_gain_s": e.predicted_gain_s,
            }
            for e in rollout.switches
        ],
        retractions=rollout.retractions,
        trace_sha256=trace.sha256,
        physical_limit_s=limit_s,
        extrapolated=extrapolated,
    )
