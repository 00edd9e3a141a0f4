"""``bench whatif``: would adaptive tensor parallelism pay off for this model, these GPUs and these lengths?"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from math import gcd
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from baselines.limit import physical_limit_s
from bench.backends.simulated.fleet import FLEET_SEQUENCES, Waits, simulate_fleet
from bench.backends.simulated.rollout import simulate
from bench.errors import UserError
from bench.experiment import Cluster, Experiment, first_fault
from bench.gpus import gpu
from bench.launch_plan import gpu_memory
from bench.machine import Machine, machine_of
from bench.models import model_shape
from bench.parallel import parallel
from bench.predicted import Cell, arms_of, earlier_lengths, trace_of
from bench.profiles.grid import TPS
from bench.stats import Interval, gain_percent, interval
from bench.workloads.trace import LengthTrace, read_trace
from pat.layout import Layout, layouts
from pat.lengths import LengthModel
from pat.model import ModelShape
from pat.policy import AdaptivePolicy, LengthForesight

NODE_GPUS = 8
WAITING_SEQUENCES = 4096
"""Where sequences wait for KV memory, a rollout of more of them is simulated on its heaviest nodes alone."""
MANY_SEQUENCES = 8192
"""From here on fewer rollouts are simulated."""
MINIMUM_GAIN_PERCENT = 1.0
"""Below this nobody should bother."""


@dataclass(frozen=True, slots=True)
class Question:
    """``gpus`` in all, in ``nodes`` of equal size; ``batch`` sequences (prompts x samples); ``lengths`` as in
    experiments, or the path of a trace."""

    model: str
    gpu: str
    gpus: int
    nodes: int | None
    lengths: str
    max_response_tokens: int
    batch: int
    host_term: str = "sglang-0.5"
    seeds: int | None = None
    max_prompt_tokens: int = 1024

    def experiment(self) -> Experiment:
        """The cell that answers it; UserError names what is wrong and what is known."""
        nodes = self.nodes or -(-self.gpus // NODE_GPUS)
        if self.gpus % nodes:
            raise UserError(f"--gpus {self.gpus} do not divide into {nodes} nodes; give --nodes")
        per_node, samples = self.gpus // nodes, gcd(self.batch, 8)
        try:
            shape, _ = model_shape(self.model), gpu(self.gpu)
            tps = tuple(a.tp for a in layouts(self.gpus, fitting_tps(shape), per_node))
            return Experiment(
                name="what-if",
                tier="predicted",
                model=self.model,
                cluster=Cluster(gpu=self.gpu, nodes=nodes, gpus_per_node=per_node),
                max_response_tokens=self.max_response_tokens,
                max_prompt_tokens=self.max_prompt_tokens,
                batches=(self.batch,),
                samples_per_prompt=samples,
                lengths=self.lengths if ":" in self.lengths and not exists(self.lengths) else f"trace:{self.lengths}",
                seeds=tuple(range(self.seeds or (5 if self.batch < MANY_SEQUENCES else 3))),
                tps=tps,
                verl_default_tp=2 if 2 in tps else tps[0],
                host_terms=(self.host_term,),
                arms=("static", "pat-planned"),
            )
        except ValidationError as error:
            raise UserError(f"what-if: {first_fault(error)}") from None
        except ValueError as error:
            raise UserError(f"what-if: {error}") from None


def exists(path: str) -> bool:
    return Path(path).is_file()


def fitting_tps(shape: ModelShape) -> tuple[int, ...]:
    """TP degrees that divide the model's heads."""

    def divides(tp: int) -> bool:
        try:
            shape.check_tp(tp)
        except ValueError:
            return False
        return True

    return tuple(tp for tp in TPS if divides(tp))


@dataclass(frozen=True, slots=True)
class Hop:
    """One switch of an expected schedule: when, how many sequences run then, where to, what it costs."""

    at_s: float
    decode_steps: float
    alive: float
    layout: Layout
    cost_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule of switches with the least expected time, from the lengths of earlier rollouts alone."""

    first: Layout
    hops: tuple[Hop, ...]
    expected_s: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Memory of one GPU under a layout, bytes; tokens of one replica. ``why_not``: empty where it can run."""

    layout: Layout
    weight_bytes: int
    kv_bytes: int
    kv_tokens: int
    sequences: int
    at_cap: int
    why_not: str


@dataclass(frozen=True, eq=False)
class Answer:
    """``rollout_s`` by layout over seeds [S]; PAT's rollouts; what the machine could hold."""

    question: Question
    experiment: Experiment
    shape: ModelShape
    provenance: dict
    fits: tuple[Fit, ...]
    rollout_s: dict[Layout, np.ndarray]
    pat_s: np.ndarray
    pat_layouts: tuple[tuple[str, ...], ...]
    limit_s: np.ndarray
    tokens: np.ndarray
    schedule: Schedule
    simulated_nodes: int
    switch_source: str
    extrapolated: bool
    notes: tuple[str, ...]

    @property
    def best_static(self) -> Layout:
        return min(self.rollout_s, key=lambda a: self.rollout_s[a].mean())

    def gain(self, base: Layout) -> Interval | None:
        """PAT's gain in tokens/s over a static layout, percent, seed by seed; None where the layout does not fit."""
        return gain_percent(self.rollout_s[base], self.pat_s) if base in self.rollout_s else None

    @property
    def pays(self) -> bool:
        """Whether PAT beats the best static layout by more than chance and by enough to care."""
        gain = self.gain(self.best_static)
        sure = np.isnan(gain.half) or gain.mean > gain.half
        return bool(gain.mean >= MINIMUM_GAIN_PERCENT and sure)

    @property
    def tokens_per_s(self) -> dict[Layout | str, Interval]:
        return {arm: interval(self.tokens / s) for arm, s in (*self.rollout_s.items(), ("pat", self.pat_s))}


@dataclass(frozen=True, slots=True)
class ArmRun:
    """One rollout: its seconds, TP of its layouts in turn, on how many nodes it was simulated."""

    name: str
    tps: tuple[int, ...]
    rollout_s: float
    nodes: int


def answer(question: Question) -> Answer:
    """Simulate every static layout and PAT over the seeds; UserError for bad input, before anything runs."""
    experiment, host = question.experiment(), question.host_term
    machine = machine_of(experiment, host)  # builds or reads the step grids, and refuses what cannot run
    if experiment.verl_default not in machine.layouts:
        experiment = experiment.model_copy(update={"verl_default_tp": machine.layouts[0].tp})
    runs = simulated(experiment, host, len(machine.layouts) + 1)
    traces = [trace_of(experiment, question.batch, seed) for seed in experiment.seeds]
    world, longest = experiment.cluster.world, experiment.max_prompt_tokens + experiment.max_response_tokens
    static = {
        a: np.array([run.rollout_s for seed in runs for run in seed if run.name == "static" and run.tps == (a.tp,)])
        for a in machine.layouts
    }
    pat = [run for seed in runs for run in seed if run.name != "static"]
    peak = {a.tp: -(-question.batch // a.dp) for a in machine.layouts}
    return Answer(
        question,
        experiment,
        machine.shape,
        machine.profile.provenance,
        tuple(fit(machine.shape, question, a, longest) for a in experiment.layouts),
        static,
        np.array([run.rollout_s for run in pat]),
        tuple(tuple(str(Layout.of(tp, world)) for tp in run.tps) for run in pat),
        np.array([physical_limit_s(machine.profile, t.prompt_tokens, t.response_tokens) for t in traces]),
        np.array([int(t.response_tokens.sum()) for t in traces]),
        expected_schedule(experiment, machine),
        min(run.nodes for seed in runs for run in seed),
        machine.parts("seats").source,
        any(machine.profile.extrapolated(tp, n, longest / 2) for tp, n in peak.items()),
        tuple(notes(question)),
    )


def simulated(experiment: Experiment, host: str, arms: int) -> list[list[ArmRun]]:
    """The runs of each seed, in the order of its arms. Where sequences wait for KV memory, arms run side by side."""
    runs: dict[int, list[ArmRun]] = {}
    for seed in experiment.seeds:
        with suppress(Waits):
            runs[seed] = [run_arm((experiment, host, seed, index, False)) for index in range(arms)]
    waiting = [(experiment, host, s, index, True) for s in experiment.seeds if s not in runs for index in range(arms)]
    found = sorted(parallel(run_arm, waiting), key=lambda pair: pair[0])
    for (_, _, seed, _, _), (_, run) in zip(waiting, found, strict=True):
        runs.setdefault(seed, []).append(run)
    return [runs[seed] for seed in experiment.seeds]


def run_arm(work: tuple[Experiment, str, int, int, bool]) -> ArmRun:
    """One arm, by its index, of one seed. ``slow``: replica by replica, on the nodes that end last where there are too
    many sequences; else on the whole fleet, and Waits where a large one has sequences that wait."""
    experiment, host, seed, index, slow = work
    trace, run = trace_of(experiment, experiment.batches[0], seed), simulate
    if slow:
        experiment, trace = heaviest_nodes(experiment, trace, WAITING_SEQUENCES)
    elif len(trace) >= FLEET_SEQUENCES:
        run = simulate_fleet
    machine = machine_of(experiment, host)
    arm = arms_of(Cell(experiment, len(trace), host, seed), machine, trace)[index]
    cap = experiment.max_response_tokens
    done = run(machine.system(arm.switches), arm.policy, trace.prompt_tokens, trace.response_tokens, cap)
    tps = tuple(a.tp for a in (done.first, *(e.new for e in done.switches)))
    return ArmRun(arm.name.partition("-")[0], tps, done.rollout_s, experiment.cluster.nodes)


def heaviest_nodes(experiment: Experiment, trace: LengthTrace, sequences: int) -> tuple[Experiment, LengthTrace]:
    """The nodes that end last, as a smaller experiment of about ``sequences``, at least one node.

    Sequences are dealt out to nodes round robin. Nodes run independently but for a switch, which all make together, so
    that the rollout ends with its slowest node: that of the most tokens, or of the longest sequence.
    """
    nodes = experiment.cluster.nodes
    wanted = max(1, sequences * nodes // len(trace))
    if wanted >= nodes:
        return experiment, trace
    node = np.arange(len(trace)) % nodes
    load = np.bincount(node, weights=trace.response_tokens)
    longest = int(node[trace.response_tokens.argmax()])
    order = [longest, *(k for k in np.argsort(-load, kind="stable") if k != longest)] if wanted > 1 else [load.argmax()]
    keep = np.isin(node, order[:wanted])
    part = LengthTrace(*(getattr(trace, name)[keep] for name in LengthTrace.__dataclass_fields__))
    cluster = experiment.cluster.model_copy(update={"nodes": wanted})
    return experiment.model_copy(update={"cluster": cluster}), part


def expected_schedule(experiment: Experiment, machine: Machine) -> Schedule:
    """The planner's schedule for a rollout of typical lengths, with its times in seconds. The policy itself may begin
    elsewhere where sequences wait: there it tries starts out instead of trusting expectations."""
    batch = experiment.batches[0]
    lengths = LengthModel.fit(earlier_lengths(experiment, batch, seed=0), experiment.max_response_tokens)
    prompts = trace_of(experiment, batch, seed=0).prompt_tokens
    planner = machine.planner(machine.switches(machine.parts("seats")))
    ahead = LengthForesight(lengths).at_start(prompts)
    policy = AdaptivePolicy(planner, LengthForesight(lengths))
    first = planner.first_layouts(
        ahead, float(prompts.sum()), policy.max_hops, policy.interval_steps, policy.early_share
    )[0]
    plan = planner.plans(ahead, policy.max_hops, fresh=True, earliest_steps=policy.interval_steps)[first]
    segment_s, switch_s, queue_s = planner.segment_s(ahead, True), planner.switch_s(ahead), planner.queue_s(ahead, True)
    starts = np.r_[0.0, np.cumsum(ahead.steps)]
    at_s = float(machine.profile.prefill_s(first.tp, prompts.sum() / first.dp))
    here, segment, hops = planner.layouts.index(first), 0, []
    at_s += queue_s[here, 0]
    for steps, layout in plan.hops:
        j, there = int(np.searchsorted(starts, steps)), planner.layouts.index(layout)
        at_s += segment_s[here, segment:j].sum()
        cost_s = float(switch_s[here, there, j])
        hops.append(Hop(float(at_s), steps, float(ahead.alive[j] * ahead.busy[j]), layout, cost_s))
        at_s += cost_s + (queue_s[there, j] if j else 0.0)
        here, segment = there, j
    return Schedule(first, tuple(hops), float(at_s + segment_s[here, segment:].sum()))


def fit(shape: ModelShape, question: Question, layout: Layout, longest_tokens: int) -> Fit:
    """Whether a layout fits the GPU's memory, and how much of the batch it can hold at once."""
    share = -(-question.batch // layout.dp)
    memory = gpu_memory(shape, gpu(question.gpu), layout.tp, share)
    why_not = ""
    if memory.kv_bytes <= 0:
        why_not = "the weights leave no room"
    elif memory.kv_tokens < longest_tokens:
        why_not = f"the KV cache cannot hold one sequence of {longest_tokens:,} tokens"
    kv_bytes, at_cap = max(0, memory.kv_bytes), memory.kv_tokens // longest_tokens
    return Fit(layout, memory.weight_bytes, kv_bytes, memory.kv_tokens, share, at_cap, why_not)


def notes(question: Question) -> list[str]:
    """What the asker should know about the input."""
    if ":" in question.lengths and not exists(question.lengths):
        return []
    trace = read_trace(Path(question.lengths.removeprefix("trace:")))
    said = [f"lengths drawn from the {len(trace):,} responses of {question.lengths}"]
    cut = trace.response_tokens[trace.truncated]
    if cut.size and cut.max() < question.max_response_tokens:
        said.append(
            f"{cut.size:,} of them were cut at {cut.max():,} tokens, below --max-response: their true lengths, and so "
            "the tail, are longer than predicted here"
        )
    return said
