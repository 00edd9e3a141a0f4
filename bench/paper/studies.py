"""Simulations that results/paper.md needs beside the records of bench-gen, as tasks with outcomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import numpy as np
from scipy.optimize import brentq

from baselines.limit import physical_limit_s
from bench.backends.simulated.cures import (
    Cured,
    longest_first,
    over_provisioned,
    partial_rollouts,
    sibling_estimate,
)
from bench.backends.simulated.mixed import Mix, best_count, mixed_s, mixes
from bench.backends.simulated.rollout import System
from bench.experiment import load_experiment
from bench.gpus import gpu
from bench.launch_plan import kv_capacity_tokens
from bench.machine import paper_numbers
from bench.paper.setting import BATCH, SWAPS, Bench, Setting, Swap, shorter
from bench.predicted import earlier_lengths, trace_of
from bench.profiles.host_terms import PAPER_ERA
from pat.lengths import LengthModel
from pat.planner import known_course
from pat.policy import LengthForesight

SEEDS = tuple(range(6))
FIT_SEEDS = (0, 1, 2)
EXTRA_SHARE = 0.25
"""Sequences in flight beyond those wanted, in over-provisioned and partial rollouts."""
ITERATIONS = 6
PAIR_SEEDS = (0, 1)
LARGE = 1024
LARGE_SEEDS = (0, 1, 2)
MOVES_PERCENT = 2.0
"""A swap that changes neither arm's tokens/s by more than this is no half of a pair."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work: ``change`` says what differs from the cell as it stands."""

    study: str
    cell: str
    change: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One line of ``paper.jsonl``: the numbers of one arm and seed under a task."""

    study: str
    cell: str
    change: str
    arm: str
    seed: int
    values: dict[str, float]
    mark: str = ""

    @property
    def task(self) -> Task:
        return Task(self.study, self.cell, self.change)


def paper_cells() -> list[str]:
    """Names of the cells that the paper gives figures of."""
    short = {"LLaMA3.1-8B": "llama", "Qwen3-14B": "qwen"}
    cells = [c for c in paper_numbers()["generation"] if "testbed" in c]
    return [f"{c['testbed']}-{short[c['model']]}-{c['max_response'] // 1024}k" for c in cells]


def paper_cell(name: str) -> dict:
    """The paper's figures of a cell."""
    return [c for c in paper_numbers()["generation"] if "testbed" in c][paper_cells().index(name)]


def all_cells() -> list[str]:
    """The grid of the evaluation."""
    return [
        f"{testbed}-{model}-{cap}k"
        for testbed in paper_numbers()["testbeds"]
        for model in ("llama", "qwen")
        for cap in (6, 8, 16, 24)
    ]


def setting_of(cell: str) -> Setting:
    return Setting(load_experiment(cell))


def swap_named(name: str) -> Swap:
    return next(swap for swap in SWAPS if swap.name == name)


def tasks() -> list[Task]:
    """Everything the report needs."""
    out = []
    for cell in paper_cells():
        setting = setting_of(cell)
        out += [Task("swap", cell, swap.name) for swap in SWAPS if swap.applies(setting)]
        if "baseline_tok_s" in paper_cell(cell):
            out += [Task("pairs", cell), *(Task("calibrated", cell, knob) for knob in KNOBS)]
        large = (LARGE,) if setting.experiment.cluster.gpu != "a40" else ()
        out += [Task("cures", cell, str(batch)) for batch in (BATCH, *large)]
        out.append(Task("mixed", cell))
    out += [Task("fit", cell, fit) for cell in all_cells() for fit in PAPER_ERA]
    out += [Task("predictor", cell) for cell in paper_cells()]
    out += [Task("utilisation", cell) for cell in paper_cells()]
    return out


def both(setting: Setting, seeds: tuple[int, ...]) -> list[tuple[str, int, dict[str, float]]]:
    """(arm, seed, values) of VeRL and PAT under a setting; none where the layout they start in does not fit."""
    bench = Bench.of(setting)
    if setting.start not in bench.machine.layouts:
        return []
    out = []
    for seed in seeds:
        trace = bench.trace(seed)
        tokens = int(trace.response_tokens.sum())
        for arm, rollout in (("verl", bench.static(trace)), ("pat", bench.pat(trace, seed))):
            events = rollout.switches
            values = {
                "rollout_s": rollout.rollout_s,
                "tokens_per_s": tokens / rollout.rollout_s,
                "switches": len(events),
                "switch_s": sum(e.cost.total_s for e in events),
                "kv_s": sum(e.cost.kv_s for e in events),
            }
            out.append((arm, seed, values))
    return out


def swap(task: Task) -> list[Outcome]:
    """Both arms with one assumption replaced."""
    setting = swap_named(task.change).change(setting_of(task.cell))
    return [Outcome(task.study, task.cell, task.change, *row) for row in both(setting, SEEDS)]


def pairs(task: Task) -> list[Outcome]:
    """The two swaps of different groups that together come nearest the paper's three figures of the cell: the largest
    relative difference of VeRL's and PAT's tokens/s, over all pairs. One outcome: the best pair, over all seeds."""
    setting, paper = setting_of(task.cell), paper_cell(task.cell)
    as_is = both(setting, PAIR_SEEDS)
    known = [s for s in SWAPS[1:] if s.group != "switch" and s.applies(setting)]
    known = [s for s in known if moved_percent(both(s.change(setting), PAIR_SEEDS), as_is) > MOVES_PERCENT]
    found = []
    for i, first in enumerate(known):
        for second in known[i + 1 :]:
            if first.group == second.group:
                continue
            miss = distance(both(second.change(first.change(setting)), PAIR_SEEDS), paper)
            found.append((miss, first.name, second.name))
    _, first, second = min(found)
    changed = swap_named(second).change(swap_named(first).change(setting))
    name = f"{first} + {second}"
    return [Outcome(task.study, task.cell, task.change, f"{arm}: {name}", s, v) for arm, s, v in both(changed, SEEDS)]


def moved_percent(rows: list, base: list) -> float:
    """The largest change of a rollout's time, in percent; infinite for no rows."""
    return max(
        (100 * abs(r["rollout_s"] / b["rollout_s"] - 1) for (*_, r), (*_, b) in zip(rows, base, strict=bool(rows))),
        default=np.inf,
    )


def distance(rows: list[tuple[str, int, dict[str, float]]], paper: dict) -> float:
    """The larger relative difference of mean tokens/s from the paper's, of VeRL's and PAT's; infinite for no rows."""
    if not rows:
        return np.inf
    means = {a: np.mean([v["tokens_per_s"] for arm, _, v in rows if arm == a]) for a in ("verl", "pat")}
    return max(
        abs(means["verl"] / paper["baseline_tok_s"] - 1),
        abs(means["pat"] / paper["pat_tok_s"] - 1),
    )


KNOBS: dict[str, tuple[Callable[[Setting, float], Setting], float, float]] = {
    "median length": (shorter, 0.05, 4.0),
    "host term's base": (lambda s, ms: replace(s, host_base_s=1e-3 * ms), -1.2, 40.0),
    "device step time": (lambda s, factor: replace(s, step_factor=factor), 0.2, 5.0),
}
"""What may be calibrated on VeRL's tokens/s: the change by a number, and the range it is looked for in."""


def calibrated(task: Task) -> list[Outcome]:
    """One knob set so that VeRL's mean tokens/s meets the paper's; PAT's then follows. No outcome where it cannot."""
    setting, wanted = setting_of(task.cell), paper_cell(task.cell)["baseline_tok_s"]
    change, low, high = KNOBS[task.change]

    def miss(x: float) -> float:
        bench = Bench.of(change(setting, x))
        traces = [bench.trace(seed) for seed in SEEDS]
        return float(np.mean([t.response_tokens.sum() / bench.static(t).rollout_s for t in traces])) / wanted - 1

    if miss(low) * miss(high) > 0:
        return []
    x = float(brentq(miss, low, high, rtol=1e-4))
    rows = both(change(setting, x), SEEDS)
    return [Outcome(task.study, task.cell, task.change, arm, s, v | {"knob": x}) for arm, s, v in rows]


def fit(task: Task) -> list[Outcome]:
    """All static layouts and PAT under one fit of the paper-era host term, on the seeds of bench-gen."""
    bench, out = Bench.of(replace(setting_of(task.cell), host=task.change)), []
    for seed in FIT_SEEDS:
        trace = bench.trace(seed)
        arms = {f"static-{a}": bench.static(trace, a) for a in bench.machine.layouts} | {"pat": bench.pat(trace, seed)}
        tokens = int(trace.response_tokens.sum())
        for arm, rollout in arms.items():
            values = {"rollout_s": rollout.rollout_s, "tokens_per_s": tokens / rollout.rollout_s}
            out.append(Outcome(task.study, task.cell, task.change, arm, seed, values))
    return out


def cures(task: Task) -> list[Outcome]:
    """Other cures in VeRL's default layout and in the cell's best static one; ``change`` is the batch."""
    batch = int(task.change)
    bench = Bench.of(replace(setting_of(task.cell), batch=batch))
    experiment, system = bench.setting.experiment, bench.machine.system(bench.switches())
    cap, samples = experiment.max_response_tokens, experiment.samples_per_prompt
    more = -(-int(batch * (1 + EXTRA_SHARE)) // samples) * samples
    seeds = SEEDS if batch == BATCH else LARGE_SEEDS
    static = {
        layout: {seed: bench.static(bench.trace(seed), layout).rollout_s for seed in seeds}
        for layout in bench.machine.layouts
    }
    best = min(static, key=lambda layout: np.mean(list(static[layout].values())))
    out = []
    for seed in seeds:
        trace = bench.trace(seed)
        limit_s = physical_limit_s(bench.machine.profile, trace.prompt_tokens, trace.response_tokens)
        large = trace_of(experiment, more, seed)
        fresh = [trace_of(experiment, more, 7001 + 97 * seed + i) for i in range(ITERATIONS)]
        for name, layout in {"default": bench.setting.start, "best": best}.items():
            partial = partial_rollouts(system, layout, fresh, more, batch, cap)
            arms = {
                "static": [Cured(static[layout][seed], int(trace.response_tokens.sum()))],
                "longest first, lengths known": [longest_first(system, layout, trace, trace.response_tokens, cap)],
                "longest first, by the prompt": [longest_first(system, layout, trace, sibling_estimate(trace), cap)],
                "partial rollout": partial,
                "over-provisioned": [over_provisioned(system, layout, large, batch, cap)],
            }
            for arm, cured in arms.items():
                values = {k: float(np.mean([asdict(c)[k] for c in cured])) for k in asdict(cured[0])}
                values |= {"limit_s": limit_s, "tp": layout.tp}
                out.append(Outcome(task.study, task.cell, task.change, f"{arm}, {name}", seed, values))
    return out


def mixed(task: Task) -> list[Outcome]:
    """Every mix of two layouts. Known: true lengths, and the best count for them. By the prompt: siblings' lengths,
    and the count that was best in an earlier rollout of the same law."""
    bench = Bench.of(setting_of(task.cell))
    experiment, machine = bench.setting.experiment, bench.machine
    cap, batch = experiment.max_response_tokens, bench.setting.batch
    longest = experiment.max_prompt_tokens + cap
    capacity = {tp: kv_capacity_tokens(machine.shape, gpu(experiment.cluster.gpu), tp) for tp in experiment.tps}
    system = System(machine.profile, bench.switches(), {})
    fitting = tuple(tp for tp in experiment.tps if capacity[tp] >= longest)
    sizes = np.unique(np.geomspace(1, batch - 1, 16).round().astype(int))

    def seconds(mix: Mix, trace, estimate):
        return lambda count: mixed_s(system, capacity, mix, trace, estimate, count, cap)

    out = []
    for mix in mixes(experiment.cluster.world, experiment.cluster.gpus_per_node, fitting):
        for seed in SEEDS:
            trace, earlier = bench.trace(seed), trace_of(experiment, batch, 1_000_003 + 1009 * seed)
            limit_s = physical_limit_s(machine.profile, trace.prompt_tokens, trace.response_tokens)
            learnt = best_count(sizes, seconds(mix, earlier, sibling_estimate(earlier)))
            known = best_count(sizes, seconds(mix, trace, trace.response_tokens))
            for how, estimate, count in (
                ("lengths known", trace.response_tokens, known),
                ("by the prompt", sibling_estimate(trace), learnt),
            ):
                values = {"rollout_s": seconds(mix, trace, estimate)(count), "count": count, "limit_s": limit_s}
                out.append(Outcome(task.study, task.cell, task.change, f"{mix}, {how}", seed, values))
    return out


def predictor(task: Task) -> list[Outcome]:
    """Predicted and simulated time of every static layout, with the lengths known and with the length model."""
    bench, out = Bench.of(setting_of(task.cell)), []
    experiment, planner = bench.setting.experiment, bench.machine.planner(bench.switches())
    for seed in SEEDS:
        trace = bench.trace(seed)
        lengths = earlier_lengths(experiment, bench.setting.batch, seed)
        foresight = LengthForesight(LengthModel.fit(lengths, experiment.max_response_tokens))
        outlooks = {
            "known": known_course(trace.response_tokens, trace.prompt_tokens),
            "model": foresight.at_start(trace.prompt_tokens),
        }
        plans = {name: planner.plans(ahead, 1, fresh=True) for name, ahead in outlooks.items()}
        for layout in bench.machine.layouts:
            prefill_s = float(bench.machine.profile.prefill_s(layout.tp, trace.prompt_tokens.sum() / layout.dp))
            values = {"rollout_s": bench.static(trace, layout).rollout_s}
            values |= {name: plan[layout].stay_s + prefill_s for name, plan in plans.items()}
            out.append(Outcome(task.study, task.cell, task.change, str(layout), seed, values))
    return out


def utilisation(task: Task) -> list[Outcome]:
    """TFLOP/s a GPU of VeRL's default: until half of the sequences have ended, and while one alone is left.

    FLOPs of a token: 2 x parameters + 4 x layers x heads x head size x context, over all GPUs of the cell.
    """
    bench, out = Bench.of(setting_of(task.cell)), []
    shape, world = bench.machine.shape, bench.setting.experiment.cluster.world
    for seed in SEEDS:
        trace = bench.trace(seed)
        rollout = bench.static(trace)
        ended = np.sort(rollout.finished_s)
        s = rollout.segments
        per_token = 2 * shape.params + 4 * shape.layers * shape.heads * shape.head_dim * (
            s["context_tokens"] + s["steps"] / 2
        )
        rate = np.where(s["kind"] == "decode", s["steps"] * s["batch"], 0) * per_token / s["seconds"]
        end_s = s["time_s"] + s["seconds"]

        def mean(low: float, high: float, s=s, rate=rate, end_s=end_s) -> float:
            within = np.maximum(0, np.minimum(end_s, high) - np.maximum(s["time_s"], low))
            return float((rate * within).sum() / max(high - low, 1e-9) / world / 1e12)

        values = {"aligned": mean(0.0, ended[len(ended) // 2]), "tail": mean(ended[-2], ended[-1])}
        if ended[-1] == ended[-2]:
            values["tail"] = mean(ended[ended < ended[-1]][-1], ended[-1])
        out.append(Outcome(task.study, task.cell, task.change, str(bench.setting.start), seed, values))
    return out


STUDIES: dict[str, Callable[[Task], list[Outcome]]] = {
    f.__name__: f for f in (swap, pairs, calibrated, fit, cures, mixed, predictor, utilisation)
}


def run_task(task: Task) -> list[Outcome]:
    return STUDIES[task.study](task)
