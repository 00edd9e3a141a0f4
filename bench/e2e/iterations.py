"""Raw records of end-to-end runs: one line an iteration of one arm, from VeRL's file logger and the rollout server."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from bench.records import RecordStore

KEPT = ("timing_s/", "perf/", "response_length/", "prompt_length/", "critic/", "actor/", "training/", "reward/")
"""Prefixes of VeRL's metrics that a record keeps."""


class Iteration(BaseModel):
    """``metrics`` under VeRL's names; ``rollout``: the server's own record (:class:`pat.verl.records.RolloutRecord`),
    ``sync``: of the weight sync that came before it; both None where the server wrote none.
    ``memory_bytes``: of the host, taken during the launch at most; None where it did not end well."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experiment: str
    arm: str
    seed: int
    iteration: int
    metrics: dict[str, float]
    rollout: dict | None = None
    sync: dict | None = None
    load_average: float | None = None
    memory_bytes: int | None = None
    fingerprint: str = ""

    @property
    def key(self) -> tuple:
        return (self.arm, self.seed, self.iteration)


class IterationStore(RecordStore):
    """Under ``OUT/raw/e2e``: ``NAME.jsonl``, ``NAME.made.json`` and ``NAME/ARM``, a folder for each launch."""

    kind = Iteration

    def __init__(self, out: Path, experiment: str) -> None:
        super().__init__(out, experiment)
        self.folder = out / "raw" / "e2e"
        self.path = self.folder / f"{experiment}.jsonl"
        self.made_path = self.folder / f"{experiment}.made.json"
        self.steps_folder = self.folder / experiment


def read_lines(path: Path) -> list[dict]:
    """Objects of a JSONL file; a last line that is still being written is left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def parse(folder: Path, experiment: str, arm: str, seed: int, fingerprint: str) -> list[Iteration]:
    """Iterations of a launch: ``metrics.jsonl`` as VeRL's file logger writes it ({"step": n, "data": {...}}), joined
    with ``records/rollouts.jsonl`` and ``records/syncs.jsonl`` of the rollout server by iteration."""
    rollouts = {row["iteration"]: row for row in read_lines(folder / "records" / "rollouts.jsonl")}
    syncs = {row["iteration"]: row for row in read_lines(folder / "records" / "syncs.jsonl")}
    found = []
    for row in read_lines(folder / "metrics.jsonl"):
        metrics = {name: float(v) for name, v in row["data"].items() if name.startswith(KEPT) and is_number(v)}
        if "timing_s/step" not in metrics:  # a validation, or the end of the run
            continue
        step = int(row["step"])
        found.append(
            Iteration(
                experiment=experiment,
                arm=arm,
                seed=seed,
                iteration=step,
                metrics=metrics,
                rollout=rollouts.get(step),
                sync=syncs.get(step),
                fingerprint=fingerprint,
            )
        )
    return found


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
