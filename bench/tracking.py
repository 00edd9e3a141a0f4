"""Tracking: per-step latency and rollout summaries in wandb, under the names that VeRL's users know."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np
import pandas as pd

from bench.errors import UserError
from bench.records import RolloutSummary
from bench.workloads.trace import LengthTrace

MAX_STEPS = 2000
TRACKERS = ("wandb", "none")


class Tracker(Protocol):
    """Where rollouts are logged. One run an experiment; a rollout's metrics are prefixed by its arm."""

    def start(self, run: str, config: dict) -> None: ...

    def rollout(self, prefix: str, steps: pd.DataFrame, summary: dict) -> None: ...

    def finish(self) -> None: ...


class NoTracker:
    """Logs nothing."""

    def start(self, run: str, config: dict) -> None:
        pass

    def rollout(self, prefix: str, steps: pd.DataFrame, summary: dict) -> None:
        pass

    def finish(self) -> None:
        pass


class WandbTracker:
    """wandb; offline, in the output folder, unless WANDB_API_KEY or WANDB_MODE says otherwise."""

    def __init__(self, out: Path) -> None:
        self.out, self.run = out, None

    def start(self, run: str, config: dict) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        logging.getLogger("wandb").setLevel(logging.ERROR)
        import wandb

        self.out.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        settings = wandb.Settings(
            silent=True,
            console="off",
            x_disable_stats=True,
            x_save_requirements=False,
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,
        )
        self.run = wandb.init(project="pat", name=run, config=config, dir=self.out, mode=mode, settings=settings)

    def rollout(self, prefix: str, steps: pd.DataFrame, summary: dict) -> None:
        for row in steps.to_dict("records"):
            self.run.log({f"{prefix}/{name}": value for name, value in row.items()})
        self.run.log({f"{prefix}/{name}": value for name, value in summary.items()})

    def finish(self) -> None:
        if self.run is not None:
            with suppress(ConnectionError):
                self.run.finish()
            self.run = None


def make_tracker(name: str, out: Path) -> Tracker:
    """By name; UserError tells the known ones."""
    if name not in TRACKERS:
        raise UserError(f"--tracker {name!r} is not known; known ones: {', '.join(TRACKERS)}")
    return WandbTracker(out) if name == "wandb" else NoTracker()


def step_metrics(steps: pd.DataFrame) -> pd.DataFrame:
    """Per-step metrics of a rollout, at most :data:`MAX_STEPS` rows, evenly chosen.

    steps: rows with time_s, replica, tp, kind, steps, batch, seconds. active_sequences and tokens_per_s are those of
    the row's replica.
    """
    decode = steps[steps.kind == "decode"].sort_values("time_s")
    if len(decode) > MAX_STEPS:
        decode = decode.iloc[np.linspace(0, len(decode) - 1, MAX_STEPS).round().astype(int)]
    latency_s = decode.seconds / decode.steps
    return pd.DataFrame(
        {
            "step/time_s": decode.time_s,
            "step/latency_ms": 1e3 * latency_s,
            "step/active_sequences": decode.batch,
            "step/layout_tp": decode.tp,
            "step/tokens_per_s": decode.batch / latency_s,
        }
    )


def summary_metrics(record: RolloutSummary, trace: LengthTrace) -> dict[str, float]:
    """A rollout under VeRL's metric names."""
    lengths = trace.response_tokens
    return {
        "timing_s/gen": record.rollout_s,
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": float(trace.truncated.mean()),
        "perf/throughput": record.tokens_per_s,
    }
