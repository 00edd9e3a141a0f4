"""Random scenarios: is adaptive TP ever slower than the best static layout? Drawn, run over the cores, recorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from bench.experiment import Cluster, Experiment
from bench.files import write_whole
from bench.parallel import parallel
from bench.predicted import Cell, run_cell
from bench.provenance import commit
from bench.records import fingerprint_of
from bench.workloads.lengths import parse as parse_lengths

COUNT = 500
SEED = 20260605
MODELS = ("LLaMA3.1-8B", "Qwen3-14B")
CLUSTERS = (("h100_sxm", 1), ("h200_sxm", 1), ("a100_sxm", 1), ("a40", 1), ("a40", 2))
CAPS_TOKENS = (4096, 8192, 16384, 24576)
HOST_TERMS = ("paper-era", "sglang-0.5")
FAMILIES = ("lognormal", "bimodal", "pareto", "uniform", "constant")
ARMS = ("static", "pat-planned")


def draw(count: int = COUNT, seed: int = SEED) -> list[Cell]:
    """``count`` cells: models x GPUs x families of lengths x caps x host terms in equal shares, batches log-uniform
    from 8 to 1,024 in steps of 8. The same arguments, the same scenarios."""
    rng, cells = np.random.default_rng(seed), []
    for i in range(count):
        gpu, nodes = CLUSTERS[rng.integers(len(CLUSTERS))]
        cap = int(rng.choice(CAPS_TOKENS))
        experiment = Experiment(
            name=f"scenario-{i:03d}",
            tier="predicted",
            model=str(rng.choice(MODELS)),
            cluster=Cluster(gpu=gpu, nodes=nodes, gpus_per_node=8),
            max_response_tokens=cap,
            batches=(8 * round(float(np.exp(rng.uniform(0.0, np.log(128))))),),
            lengths=lengths_of(FAMILIES[i % len(FAMILIES)], cap, rng),
            seeds=(int(rng.integers(1 << 31)),),
            arms=ARMS,
        )
        cells.append(Cell(experiment, experiment.batches[0], str(rng.choice(HOST_TERMS)), experiment.seeds[0]))
    return cells


def lengths_of(family: str, cap_tokens: int, rng: np.random.Generator) -> str:
    """Parameters of a family, so that most of its mass lies below the cap."""
    typical = cap_tokens * float(np.exp(rng.uniform(np.log(0.03), np.log(0.6))))
    parameters = {
        "lognormal": (np.log(typical), rng.uniform(0.3, 1.5)),
        "bimodal": (typical, rng.uniform(typical, cap_tokens), rng.uniform(0.01, 0.3)),
        "pareto": (max(16.0, typical / 4), rng.uniform(0.7, 2.5)),
        "uniform": (rng.uniform(1, typical), rng.uniform(typical, cap_tokens)),
        "constant": (typical,),
    }[family]
    text = f"{family}:" + ",".join(f"{value:.4g}" for value in parameters)
    parse_lengths(text)
    return text


def run(out: Path, count: int, progress: Callable[[int, int], None] = lambda done, of: None) -> Path:
    """Run what is not recorded yet; a row is written as its scenario ends. Returns OUT/raw/scenarios.jsonl."""
    path = out / "raw" / "scenarios.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = {fingerprint_of(cell.experiment.model_dump_json(), cell.host_term): cell for cell in draw(count)}
    kept = {mark: row for row in read(path) if (mark := row.get("fingerprint")) in cells}
    write(path, kept.values())
    todo = {cell.experiment.name: mark for mark, cell in cells.items() if mark not in kept}
    progress(len(kept), len(cells))
    with path.open("a") as file:
        for _, row in parallel(run_one, [cells[mark] for mark in todo.values()], alone=True):
            mark = todo[row["scenario"]]
            kept[mark] = row | {"fingerprint": mark, "commit": commit()}
            file.write(json.dumps(kept[mark]) + "\n")
            file.flush()
            progress(len(kept), len(cells))
    write(path, sorted(kept.values(), key=lambda row: row["scenario"]))
    return path


def read(path: Path) -> list[dict]:
    """Whole rows; one that is cut is left out and runs again."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def write(path: Path, rows: Iterable[dict]) -> None:
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def run_one(cell: Cell) -> dict:
    """A scenario's row: what it is, the rollout seconds of the planner and of every static layout, its course."""
    e, results = cell.experiment, [record for record, _ in run_cell(cell)]
    statics = {r.arm.removeprefix("static-"): r.rollout_s for r in results if r.arm.startswith("static-")}
    planned = next(r for r in results if r.arm == "pat-planned")
    best = min(statics, key=statics.get)
    return {
        "scenario": e.name,
        "model": e.model,
        "gpu": e.cluster.gpu,
        "gpus": e.cluster.world,
        "host_term": cell.host_term,
        "lengths": e.lengths,
        "cap_tokens": e.max_response_tokens,
        "batch": cell.batch,
        "seed": cell.seed,
        "static_s": statics,
        "best_static": best,
        "planned_s": planned.rollout_s,
        "layouts": planned.layouts,
        "retractions": planned.retractions,
        "gain_percent": 100.0 * (statics[best] / planned.rollout_s - 1.0),
    }
