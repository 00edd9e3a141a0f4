"""``bench whatif``: would adaptive tensor parallelism pay off for this model, these GPUs and these lengths?"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from baselines.limit import physical_limit_s
from bench.backends.simulated.fleet import Waits, simulate_fleet
from bench.backends.simulated.rollout import Rollout, simulate
from bench.errors import UserError
from bench.experiment import Cluster, Experiment, first_fault
from bench.gpus import gpu
from bench.launch_plan import gpu_memory
from bench.machine import Machine, machine_of
from bench.models import model_shape
from bench.predicted import Cell, arms_of, earlier_lengths, trace_of
from bench.profiles.grid import TPS
from bench.stats import Interval, gain_percent, interval
from bench.parallel import parallel
from bench.workloads.trace import LengthTrace, read_trace
from pat.layout import Layout, layouts
from pat.lengths import LengthModel
from pat.model import ModelShape
from pat.policy import LengthForesight

NODE_GPUS = 8
FLEET_SEQUENCES = 2048
"""From here on the arrays of a fleet are quicker than replica after replica."""
WAITING_SEQUENCES = 4096
"""Where sequences wait for KV memory, a rollout of more of them is simulated on its heaviest nodes alone."""
HEAVY_SEEDS_COST = 20_000
"""Sequences x seeds from which seeds are worth a process each."""
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
    seeds: int = 5
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
                seeds=tuple(range(self.seeds)),
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


@dataclass(frozen=True, slots=True, eq=False)
class SeedResult:
    """One seed: seconds by TP, PAT's seconds and layouts, on ``nodes`` simulated."""

    static_s: dict[int, float]
    pat_s: float
    pat_layouts: tuple[str, ...]
    limit_s: float
    tokens: int
    nodes: int
    peak_batch: dict[int, int]


def answer(question: Question) -> Answer:
    """Simulate every static layout and PAT over the seeds; UserError for bad input, before anything runs."""
    experiment = question.experiment()
    machine = machine_of(experiment, question.host_term)  # builds or reads the step grids, and refuses what cannot run
    if experiment.verl_default not in machine.layouts:
        experiment = experiment.model_copy(update={"verl_default_tp": machine.layouts[0].tp})
    work = [(experiment, question.host_term, seed) for seed in experiment.seeds]
    heavy = question.batch * len(work) >= HEAVY_SEEDS_COST and waits(machine, question)
    results = [r for _, r in sorted(parallel(run_seed, work, processes=None if heavy else 1), key=lambda pair: pair[0])]
    world = experiment.cluster.world
    longest = experiment.max_prompt_tokens + experiment.max_response_tokens
    return Answer(
        question,
        experiment,
        machine.shape,
        machine.profile.provenance,
        tuple(fit(machine.shape, question, a, longest) for a in experiment.layouts),
        {Layout.of(tp, world): np.array([r.static_s[tp] for r in results]) for tp in results[0].static_s},
        np.array([r.pat_s for r in results]),
        tuple(r.pat_layouts for r in results),
        np.array([r.limit_s for r in results]),
        np.array([r.tokens for r in results]),
        expected_schedule(experiment, machine),
        min(r.nodes for r in results),
        any(machine.profile.extrapolated(tp, n, longest / 2) for r in results for tp, n in r.peak_batch.items()),
        tuple(notes(question)),
    )


def waits(machine: Machine, question: Question) -> bool:
    """Whether some layout's KV cache may be too small for its share of the batch, at a few thousand tokens each."""
    return any(question.batch / a.dp * 4096 > tokens for a, tokens in machine.capacity_tokens.items())


def run_seed(work: tuple[Experiment, str, int]) -> SeedResult:
    """Every arm of one seed, on the whole fleet or, where that would take long, on its heaviest nodes."""
    experiment, host, seed = work
    batch = experiment.batches[0]
    trace, machine = trace_of(experiment, batch, seed), machine_of(experiment, host)
    tokens, limit_s = int(trace.response_tokens.sum()), physical_limit_s(
        machine.profile, trace.prompt_tokens, trace.response_tokens
    )
    nodes, whole = experiment.cluster.nodes, experiment
    try:
        rollouts = simulated(experiment, machine, host, seed, trace, exact=batch <= WAITING_SEQUENCES)
    except Waits:
        experiment, trace = heaviest_nodes(experiment, trace, WAITING_SEQUENCES)
        machine, nodes = machine_of(experiment, host), experiment.cluster.nodes
        rollouts = simulated(experiment, machine, host, seed, trace, exact=True)
    static = {r.first.tp: r.rollout_s for name, r in rollouts.items() if name.startswith("static-")}
    pat, world = rollouts["pat-planned"], whole.cluster.world
    names = tuple(str(Layout.of(a.tp, world)) for a in (pat.first, *(e.new for e in pat.switches)))
    peak = {a.tp: -(-batch // Layout.of(a.tp, world).dp) for a in machine.layouts}
    return SeedResult(static, pat.rollout_s, names, limit_s, tokens, nodes, peak)


def simulated(
    experiment: Experiment, machine: Machine, host: str, seed: int, trace: LengthTrace, exact: bool
) -> dict[str, Rollout]:
    """Every arm on one trace. ``exact``: replica by replica where sequences wait, else Waits."""
    cap, out = experiment.max_response_tokens, {}
    for arm in arms_of(Cell(experiment, len(trace), host, seed), machine, trace):
        asked = machine.system(arm.switches), arm.policy, trace.prompt_tokens, trace.response_tokens, cap
        if exact and len(trace) < FLEET_SEQUENCES:
            out[arm.name] = simulate(*asked)
            continue
        try:
            out[arm.name] = simulate_fleet(*asked)
        except Waits:
            if not exact:
                raise
            out[arm.name] = simulate(*asked)
    return out


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
    """The planner's schedule for a rollout of typical lengths, with its times in seconds."""
    batch = experiment.batches[0]
    lengths = LengthModel.fit(earlier_lengths(experiment, batch, seed=0), experiment.max_response_tokens)
    prompts = trace_of(experiment, batch, seed=0).prompt_tokens
    planner = machine.planner(machine.switches(machine.parts("seats")))
    ahead = LengthForesight(lengths).at_start(prompts)
    first, plan = planner.first_layout(ahead, float(prompts.sum()))
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
