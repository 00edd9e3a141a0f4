"""What results/paper.md is made from: records of bench-gen, the studies' outcomes, the measured switch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from bench.experiment import load_experiment
from bench.machine import machine_of, paper_numbers
from bench.models import model_shape
from bench.paper.setting import AS_IS, BATCH
from bench.paper.studies import Outcome, all_cells
from bench.phases import Phases, iteration
from bench.records import RolloutSummary, frame_of
from bench.report.comparison import Comparison
from bench.report.e2e_predicted import trainer_of
from bench.stats import reduction_percent
from bench.workloads.trace import read_trace
from pat.layout import Layout
from pat.switch_cost import wire_share

HOSTS = ("paper-era", "sglang-0.5")
NEAREST = 3


@dataclass(frozen=True, eq=False)
class Evidence:
    """``records``: current records of the paper's grid at its batch, by cell. ``switch``: raw/switch.json or empty."""

    out: Path
    records: dict[str, list[RolloutSummary]]
    made: dict[str, dict]
    outcomes: list[Outcome]
    switch: dict

    @classmethod
    def of(cls, out: Path, recorded: list) -> Evidence:
        """Without outcomes yet. ``recorded``: what bench.report.gen.recorded(out) gives."""
        grid = {r.experiment.name: r for r in recorded if r.experiment.name in all_cells()}
        records = {name: [x for x in r.records if x.batch == BATCH] for name, r in grid.items()}
        path = out / "raw" / "switch.json"
        switch = json.loads(path.read_text()) if path.is_file() else {}
        return cls(out, records, {name: r.made for name, r in grid.items()}, [], switch)

    @property
    def paper(self) -> dict:
        return paper_numbers()

    @property
    def cells(self) -> list[str]:
        """Cells of the grid that have records, in its order."""
        return [cell for cell in all_cells() if self.records.get(cell)]

    @property
    def complete(self) -> bool:
        """Whether every cell has VeRL's default and both PATs under both host terms, and its traces are kept."""
        wanted = [(cell, host) for cell in all_cells() for host in HOSTS]
        if not all(key in self.comparisons for key in wanted):
            return False
        arms = ("pat-paper", "pat-planned")
        return all({c.verl_default, *arms} <= set(c.rollout_s) for c in self.comparisons.values()) and all(
            self.trace_path(row).is_file() for cell in all_cells() for row in self.traces(cell)
        )

    def traces(self, cell: str) -> list[dict]:
        """Rows on the traces of the paper's batch."""
        return [row for row in self.made[cell]["traces"] if row["batch"] == BATCH]

    def trace_path(self, row: dict) -> Path:
        return self.out / "raw" / "traces" / f"{row['sha256'][:12]}.jsonl"

    @cached_property
    def comparisons(self) -> dict[tuple[str, str], Comparison]:
        """By (cell, host term)."""
        found = {}
        for cell in self.cells:
            for c in Comparison.of(load_experiment(cell), frame_of(self.records[cell])):
                found[cell, c.host_term] = c
        return found

    def reduction(self, cell: str, host: str, arm: str = "pat-paper") -> float | None:
        """Mean percent by which ``arm`` shortens generation against VeRL's default."""
        c = self.comparisons.get((cell, host))
        if c is None or arm not in c.rollout_s:
            return None
        return reduction_percent(c.rollout_s[c.verl_default], c.rollout_s[arm]).mean

    def of_study(self, study: str, cell: str, change: str | None = None) -> list[Outcome]:
        return [
            o for o in self.outcomes if (o.study, o.cell) == (study, cell) and (change is None or o.change == change)
        ]

    def values(self, study: str, cell: str, change: str, arm: str, key: str) -> np.ndarray:
        """[S] a value over the seeds, in their order."""
        rows = [o for o in self.of_study(study, cell, change) if o.arm == arm]
        return np.array([o.values[key] for o in sorted(rows, key=lambda o: o.seed)])

    def gain(self, study: str, cell: str, change: str) -> float:
        """Mean percent by which PAT is faster than VeRL in a study, seed by seed."""
        verl, pat = (self.values(study, cell, change, arm, "rollout_s") for arm in ("verl", "pat"))
        return float(100 * (verl / pat - 1).mean())

    def changes(self, study: str, cell: str) -> list[str]:
        """Changes that have outcomes, in their order."""
        return list(dict.fromkeys(o.change for o in self.of_study(study, cell)))

    def nearest(
        self,
        cell: str,
        wanted: float,
        measure: Callable[[str], float],
        among: Callable[[str], bool] = lambda swap: True,
    ) -> list[tuple[str, float]]:
        """The NEAREST single swaps under which ``measure(swap)`` comes nearest ``wanted``, and its values there. Swaps
        that leave it as it stands (to 10% of what is missing) are no explanation, and are left out."""
        base = measure(AS_IS)
        known = [
            (change, measure(change)) for change in self.changes("swap", cell) if change != AS_IS and among(change)
        ]
        moving = [row for row in known if abs(row[1] - base) > 0.1 * abs(base - wanted)]
        return sorted(moving, key=lambda row: abs(row[1] - wanted))[:NEAREST]

    def lengths(self, cell: str) -> list[np.ndarray]:
        """Prompt + response tokens of the sequences [N] of each seed's trace."""
        return [total_tokens(self.trace_path(row)) for row in self.traces(cell)]

    def iteration(self, cell: str, host: str, arm: str, efficiency: float = 1.0) -> list[Phases]:
        """An iteration's phases for every seed of an arm's records; ``verl`` and ``best`` name those statics.
        ``efficiency``: of training passes, as a multiple of what bench/phases.py takes."""
        c = self.comparisons[cell, host]
        name = {"verl": c.verl_default, "best": c.best_static}.get(arm, arm)
        trainer, shape = trainer_of(c.experiment), model_shape(c.experiment.model)
        trainer = replace(
            trainer,
            forward_share=trainer.forward_share * efficiency,
            update_share=trainer.update_share * efficiency,
        )
        return [
            iteration(shape, trainer, lengths, s)
            for s, lengths in zip(c.rollout_s[name], self.lengths(cell), strict=True)
        ]

    def iteration_reduction(self, cell: str, host: str, arm: str = "pat-paper", efficiency: float = 1.0) -> float:
        """Mean percent by which an arm shortens the iteration against VeRL's default."""
        base, new = ([p.step for p in self.iteration(cell, host, a, efficiency)] for a in ("verl", arm))
        return reduction_percent(base, new).mean

    def switched_tokens(
        self, cell: str, host: str = "paper-era", arm: str = "pat-paper"
    ) -> list[tuple[int, Layout, Layout]]:
        """(tokens of KV cache, old, new layout) of every switch of an arm that moved all of it inside its replica."""
        shape, out = machine_of(load_experiment(cell), host).shape, []
        for record in self.records[cell]:
            if (record.arm, record.host_term) != (arm, host):
                continue
            for s in record.switches:
                old, new = Layout.parse(s["from"]), Layout.parse(s["to"])
                share = wire_share(old, new)
                if s["recomputed"] == 0 and share:
                    out.append((int(s["kv_bytes"] / share / shape.kv_bytes_per_token()), old, new))
        return out


@cache
def total_tokens(trace: Path) -> np.ndarray:
    """Prompt + response tokens [N] of a trace's file."""
    found = read_trace(trace)
    return found.prompt_tokens + found.response_tokens
