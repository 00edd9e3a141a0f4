"""Predicted iterations of the paper's cells: the simulator's rollouts, and the phase model for the rest."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.e2e.experiment import known_e2e, load_e2e
from bench.experiment import Experiment
from bench.machine import paper_numbers
from bench.models import model_shape
from bench.phases import PEAK_FLOPS, Phases, Trainer, iteration
from bench.profiles.links import links_of
from bench.records import RecordStore, RolloutSummary
from bench.report.tables import percent, text
from bench.stats import interval, reduction_percent
from bench.workloads.trace import read_trace


def trainer_of(experiment: Experiment) -> Trainer:
    """All GPUs of a cell train; the slowest link of the group bounds gathering."""
    links, cluster = links_of(experiment.cluster.gpu), experiment.cluster
    link = links.intra_node_bytes_per_s if cluster.nodes == 1 else links.inter_node_bytes_per_s
    return Trainer(cluster.world, PEAK_FLOPS[cluster.gpu], link)


def phases_of(experiment: Experiment, record: RolloutSummary, out: Path) -> Phases | None:
    """None where the record's trace is not kept."""
    path = out / "raw" / "traces" / f"{record.trace_sha256[:12]}.jsonl"
    if not path.is_file():
        return None
    trace = read_trace(path)
    lengths = trace.prompt_tokens + trace.response_tokens
    return iteration(model_shape(experiment.model), trainer_of(experiment), lengths, record.rollout_s)


def predicted_rows(out: Path) -> list[dict[str, str]]:
    """One row a cell of bench/experiments/e2e and host term whose predicted records are kept."""
    rows, batch = [], paper_numbers()["setup"]["rollout_batch_sequences"]["value"]
    for name in known_e2e():
        cell = load_e2e(name).cell
        store = RecordStore(out, cell) if cell else None
        if store is None or not (records := store.current()):
            continue
        experiment = Experiment.model_validate(store.read_made()["experiment"])
        for host in experiment.host_terms:
            chosen = sorted((r for r in records if r.batch == batch and r.host_term == host), key=lambda r: r.seed)
            arms: dict[str, list[Phases]] = {}
            for record in chosen:
                if (phases := phases_of(experiment, record, out)) is not None:
                    arms.setdefault(record.arm, []).append(phases)
            if row := cell_row(experiment, host, arms):
                rows.append(row)
    return rows


def cell_row(experiment: Experiment, host: str, arms: dict[str, list[Phases]]) -> dict[str, str] | None:
    """None where VeRL's default or PAT was not predicted."""
    default = f"static-{experiment.verl_default}"
    if default not in arms or "pat-paper" not in arms:
        return None
    statics = {arm: np.mean([p.step for p in found]) for arm, found in arms.items() if arm.startswith("static-")}
    base, best = arms[default], arms[min(statics, key=statics.get)]

    def less(arm: str, than: list[Phases], part: str) -> str:
        found = arms.get(arm, [])
        return percent(reduction_percent([getattr(p, part) for p in than], [getattr(p, part) for p in found]))

    row = {"cell": experiment.name, "host term": host}
    for part in ("gen", "old_log_prob", "ref", "update_actor", "update_weights", "step"):
        row[f"VeRL {part}, s"] = text(interval([getattr(p, part) for p in base]), 0)
    row["share of generation"] = f"{100 * np.mean([p.gen_share for p in base]):.0f}%"
    row["PAT (paper): generation less, vs VeRL"] = less("pat-paper", base, "gen")
    row["PAT (paper): iteration less, vs VeRL"] = less("pat-paper", base, "step")
    if "pat-planned" in arms:
        row["PAT (planned): iteration less, vs VeRL"] = less("pat-planned", base, "step")
        row["PAT (planned): iteration less, vs best static"] = less("pat-planned", best, "step")
    return row
