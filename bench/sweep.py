"""Sweeps: one question for many machines and workloads, kept as records and taken up where they were left."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import pandas as pd

from bench.backends.simulated.rollout import simulate
from bench.experiment import Cluster, Experiment
from bench.files import write_whole
from bench.machine import Machine, machine_of
from bench.models import model_shape
from bench.parallel import parallel
from bench.predicted import Cell, arms_of, trace_of
from bench.profiles.grid import tps_of
from bench.profiles.wire import slower_links, slower_profile
from bench.provenance import provenance
from bench.records import fingerprint_of
from bench.workloads.trace import LengthTrace


@dataclass(frozen=True, slots=True)
class Point:
    """One machine and workload of a sweep; ``x`` and ``series`` say where it belongs in the sweep's figure.

    wire       0: the GPU's own links; 1: PCIe without peer-to-peer; geometric between them (``profiles/wire.py``)
    switch_s   fixed seconds of a switch, KV cache apart; None: those of prepared seats
    """

    sweep: str
    x: float
    series: str = ""
    model: str = "LLaMA3.1-8B"
    gpu: str = "h100_sxm"
    gpus: int = 8
    batch: int = 128
    lengths: str = "lognormal:7.25,1.41"
    max_response_tokens: int = 24576
    host_term: str = "sglang-0.5"
    wire: float = 0.0
    switch_s: float | None = None
    seeds: int = 3

    @property
    def fingerprint(self) -> str:
        """Of the point and of the code that answers it."""
        return fingerprint_of(json.dumps(asdict(self), sort_keys=True))

    def experiment(self) -> Experiment:
        tps = tuple(tp for tp in tps_of(model_shape(self.model)) if tp <= self.gpus)
        return Experiment(
            name="sweep",
            tier="predicted",
            model=self.model,
            cluster=Cluster(gpu=self.gpu, gpus_per_node=self.gpus),
            max_response_tokens=self.max_response_tokens,
            batches=(self.batch,),
            lengths=self.lengths,
            seeds=tuple(range(self.seeds)),
            tps=tps,
            arms=("static", "pat-planned"),
        )


@lru_cache(maxsize=64)
def machine_at(model: str, gpu: str, gpus: int, cap_tokens: int, host_term: str, wire: float) -> Machine:
    """The machine that points with these fields share, and so its step tables."""
    point = Point("", 0, model=model, gpu=gpu, gpus=gpus, max_response_tokens=cap_tokens)
    machine = machine_of(point.experiment(), host_term)
    if not wire:
        return machine
    profile = slower_profile(machine.profile, machine.shape, gpu, wire)
    return replace(machine, profile=profile, links=slower_links(machine.links, wire))


def evaluate(points: Sequence[Point]) -> list[list[dict]]:
    """Rows of points of one system and workload, which may differ in what a switch costs: for each point one a seed,
    its fields, seconds of each arm (``TP1_s`` .. ``pat_s``), what PAT did. Each arm is simulated once."""
    p, rows, costs = points[0], [[] for _ in points], dict.fromkeys(q.switch_s for q in points)
    experiment = p.experiment()
    machine = machine_at(p.model, p.gpu, p.gpus, p.max_response_tokens, p.host_term, p.wire)
    for seed in experiment.seeds:
        trace = trace_of(experiment, p.batch, seed)
        statics = seconds_of(p, machine, trace, seed, ("static",))
        adaptive = {s: seconds_of(p, dear(machine, s), trace, seed, ("pat-planned",)) for s in costs}
        for point, kept in zip(points, rows, strict=True):
            row = asdict(point) | {"seed": seed, "tokens": int(trace.response_tokens.sum())}
            kept.append(row | {"fingerprint": point.fingerprint} | statics | adaptive[point.switch_s])
    return rows


def dear(machine: Machine, switch_s: float | None) -> Machine:
    """The machine with switches of that fixed cost; its own for None."""
    if switch_s is None:
        return machine
    return replace(machine, seats=replace(machine.seats, pause_s=switch_s, resume_s=0.0, source="given by the sweep"))


def seconds_of(point: Point, machine: Machine, trace: LengthTrace, seed: int, arms: tuple[str, ...]) -> dict:
    """Columns of the rollouts of these arms."""
    columns, experiment = {}, point.experiment().model_copy(update={"arms": arms})
    for arm in arms_of(Cell(experiment, point.batch, point.host_term, seed), machine, trace):
        lengths = trace.prompt_tokens, trace.response_tokens, point.max_response_tokens
        done = simulate(machine.system(arm.switches), arm.policy, *lengths)
        if arm.name != "pat-planned":
            columns[f"TP{done.first.tp}_s"] = done.rollout_s
            continue
        path = " ".join(f"TP{a.tp}" for a in (done.first, *(e.new for e in done.switches)))
        columns |= {"pat_s": done.rollout_s, "pat_path": path}
    return columns


def by_system(points: Sequence[Point]) -> list[list[Point]]:
    """Points that ask about one system and workload, together; in the order of the first of each."""
    groups: dict[Point, list[Point]] = {}
    for point in points:
        groups.setdefault(replace(point, sweep="", x=0, series="", switch_s=None), []).append(point)
    return list(groups.values())


def run_sweep(
    points: list[Point],
    out: Path,
    name: str,
    ray: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> pd.DataFrame:
    """Rows of all points, in their order, kept in OUT/raw/NAME.jsonl; only points that are not there yet are run.

    Ctrl-C keeps what is finished. ``progress`` is told how many points are done.
    """
    path = out / "raw" / f"{name}.jsonl"
    kept, wanted = read_rows(path), {p.fingerprint: p for p in points}
    kept = {mark: rows for mark, rows in kept.items() if mark in wanted}
    for (_, model, gpu), point in {(p.wire > 0, p.model, p.gpu): p for p in points}.items():
        if any(mark not in kept for mark, p in wanted.items() if (p.model, p.gpu) == (model, gpu)):
            machine_of(point.experiment(), point.host_term)  # its step grid once, not in every worker
    pending = by_system([p for mark, p in wanted.items() if mark not in kept])
    path.parent.mkdir(parents=True, exist_ok=True)
    if pending:
        write_rows(path, kept.values())
        with path.open("a") as file:
            for index, answers in parallel(evaluate, pending, ray=ray):
                for point, rows in zip(pending[index], answers, strict=True):
                    kept[point.fingerprint] = rows
                    file.write("".join(json.dumps(row) + "\n" for row in rows))
                file.flush()
                progress(len(kept))
        made = json.dumps(provenance(), indent=1, sort_keys=True)
        path.with_suffix(".provenance.json").write_text(made + "\n")
    progress(len(wanted))
    in_order = [kept[mark] for mark in wanted]
    write_rows(path, in_order)
    return pd.DataFrame([row for rows in in_order for row in rows])


def read_rows(path: Path) -> dict[str, list[dict]]:
    """Rows by the fingerprint of their point; points that lack a seed, and lines that are cut, are left out."""
    found: dict[str, list[dict]] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
            found.setdefault(row["fingerprint"], []).append(row)
        except (ValueError, KeyError, TypeError):
            continue
    return {mark: rows for mark, rows in found.items() if len(rows) == rows[0].get("seeds")}


def write_rows(path: Path, points) -> None:
    write_whole(path, "".join(json.dumps(row) + "\n" for rows in points for row in rows))
