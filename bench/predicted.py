"""The predicted tier: every arm of one cell on the simulated backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from baselines.limit import physical_limit_s
from baselines.oracle import Clairvoyant, Schedule, search
from baselines.threshold import Threshold
from bench.backends.simulated.fleet import simulate_quickly
from bench.backends.simulated.rollout import Rollout, System, simulate
from bench.backends.simulated.scheduled import Scheduled
from bench.errors import UserError
from bench.experiment import ABLATIONS, Experiment
from bench.machine import Machine, machine_of
from bench.records import RolloutSummary
from bench.stats import weighted_percentiles
from bench.workloads.lengths import parse as parse_lengths
from bench.workloads.trace import LengthTrace, synthetic_trace
from pat.layout import Layout
from pat.lengths import LengthModel
from pat.policy import AdaptivePolicy, Foresight, LengthForesight, Policy, StaticPolicy
from pat.switch_cost import SwitchModel

EARLIER_ROLLOUTS = 4
SEARCH_STARTS, SEARCH_TRIALS = 2, 20


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


@dataclass(frozen=True, eq=False)
class Simulation:
    """Rollouts of one system: what a policy rehearses with, and what the oracle searches in."""

    system: System
    cap_tokens: int

    def __call__(self, policy: Policy, prompt_tokens: np.ndarray, response_tokens: np.ndarray) -> float:
        return simulate_quickly(self.system, policy, prompt_tokens, response_tokens, self.cap_tokens).rollout_s


def arms_of(cell: Cell, machine: Machine, trace: LengthTrace) -> list[Arm]:
    """The arms that the experiment asks for, in order. Static layouts that cannot hold the longest sequence are not."""
    experiment, asked = cell.experiment, cell.experiment.arms
    seats, cap = machine.switches(machine.parts("seats")), experiment.max_response_tokens
    seen = LengthForesight(LengthModel.fit(earlier_lengths(experiment, cell.batch, cell.seed), cap))
    start = experiment.verl_default
    arms = [Arm(f"static-{a}", StaticPolicy(a), seats) for a in machine.layouts] if "static" in asked else []

    def adaptive(name: str, switches: SwitchModel, foresight: Foresight = seen, free: bool = True, **options) -> None:
        """``free``: begins where the planner wants to, tried out; else in VeRL's default layout."""
        if free:
            options |= {"rehearsal": Simulation(machine.system(switches), cap)}
        elif start in machine.layouts:
            options |= {"start": start}
        else:
            return
        arms.append(Arm(name, AdaptivePolicy(machine.planner(switches), foresight, **options), switches))

    if "pat-paper" in asked:
        adaptive("pat-paper", machine.switches(machine.parts("paper")), free=False, max_hops=1)
    if "restart" in asked:
        adaptive("restart", machine.switches(machine.parts("restart"), "recompute"), free=False, max_hops=1)
    if "pat-planned" in asked:
        adaptive("pat-planned", seats)
    for name in asked:
        if name == "pat-threshold":
            arms.append(Arm(name, threshold(machine, start, cap), seats))
        elif name in ABLATIONS:
            switches, options = ablated(name, machine)
            adaptive(name, switches, **options)
            if name == "pat-no-cost":
                arms[-1] = blind_to_cost(arms[-1])
            elif name == "pat-no-lengths":
                policy = replace(arms[-1].policy, foresight=replace(seen, conditioned=False))
                arms[-1] = Arm(name, policy, switches)
    if "oracle" in asked:
        policy = AdaptivePolicy(
            machine.planner(seats), Clairvoyant(trace.prompt_tokens, trace.response_tokens), margin=0.0
        )
        arms.append(Arm("oracle", policy, seats))
    return arms


def ablated(name: str, machine: Machine) -> tuple[SwitchModel, dict]:
    """The switches and policy options of an ablation: what the planner loses without one of its parts.

    pat-one-hop       at most one switch
    pat-migrate, pat-recompute   KV cache always migrated, always recomputed
    pat-no-groups     communicators are made anew in each switch: the paper's unattributed share of a naive restart
    pat-no-cost       switches whenever another layout promises to be faster, at any cost
    pat-no-lengths    what is generated already says nothing about what is to come
    """
    parts = machine.parts("seats")
    if name == "pat-no-groups":
        parts = replace(parts, name="seats, groups made anew", groups_s=machine.parts("restart").groups_s)
    kv = {"pat-migrate": "migrate", "pat-recompute": "recompute"}.get(name, "cheaper")
    return machine.switches(parts, kv), {"max_hops": 1} if name == "pat-one-hop" else {}


def blind_to_cost(arm: Arm) -> Arm:
    """Plans as if switches took no time."""
    policy = arm.policy
    planner = replace(policy.planner, switch_factor=0.0)
    return Arm(arm.name, replace(policy, planner=planner, margin=0.0, max_hops=1 << 10), arm.switches)


def threshold(machine: Machine, start: Layout, cap_tokens: int) -> Threshold:
    """From VeRL's default layout, where it fits, to the layout that is fastest for one sequence of half the cap."""
    tps = {a: machine.profile.decode_s(a.tp, 1, cap_tokens / 2) for a in machine.layouts}
    return Threshold(start if start in tps else min(tps), min(tps, key=tps.get))


def run_cell(cell: Cell, trace: LengthTrace | None = None) -> list[tuple[RolloutSummary, Rollout]]:
    """Every arm of a cell on one trace (its own synthetic one unless given).

    The oracle searches on from the best schedule of all arms: it is at least as fast as any of them with the same
    switches, or with slower ones.
    """
    experiment = cell.experiment
    trace = trace or trace_of(experiment, cell.batch, cell.seed)
    lengths = trace.prompt_tokens, trace.response_tokens, experiment.max_response_tokens
    machine, results = machine_of(experiment, cell.host_term), []
    limit_s = physical_limit_s(machine.profile, trace.prompt_tokens, trace.response_tokens)
    for arm in arms_of(cell, machine, trace):
        system = machine.system(arm.switches)
        rollout = simulate(system, arm.policy, *lengths)
        if arm.name == "oracle":
            rollout = searched(system, machine.layouts, [rollout, *(r for _, r in results)], lengths)
        results.append((summarise(cell, arm.name, trace, rollout, limit_s, machine), rollout))
    return results


def searched(system: System, layouts: tuple[Layout, ...], rollouts: list[Rollout], lengths: tuple) -> Rollout:
    """The rollout of the best schedule found from those of ``rollouts``."""
    best, simulated = min(rollouts, key=lambda rollout: rollout.rollout_s), Scheduled(system, *lengths)

    def seconds(schedule: Schedule) -> float:
        nonlocal best
        rollout = simulated(schedule, limit_s=best.rollout_s)
        if rollout is None:
            return np.inf
        best = min(best, rollout, key=lambda rollout: rollout.rollout_s)
        return rollout.rollout_s

    quickest = sorted(rollouts, key=lambda rollout: rollout.rollout_s)[:SEARCH_STARTS]
    search(seconds, [r.schedule for r in quickest], layouts, SEARCH_TRIALS)
    return best


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
