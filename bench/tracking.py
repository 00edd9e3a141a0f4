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
MAX_PREDICTED_STEPS = 200
TRACKERS = ("wandb", "none")
MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")


Logged = dict[str, tuple[pd.DataFrame, dict[str, float]]]
"""Rollouts side by side: by prefix, the metrics of each step and those of the whole."""


class Tracker(Protocol):
    """Where rollouts are logged. One run an experiment, or one for all that is predicted; a rollout's metrics are
    prefixed by its arm."""

    def start(self, run: str, config: dict) -> None: ...

    def rollouts(self, logged: Logged) -> None: ...

    def finish(self) -> None: ...


class NoTracker:
    """Logs nothing."""

    def start(self, run: str, config: dict) -> None:
        pass

    def rollouts(self, logged: Logged) -> None:
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
        if mode not in MODES:
            raise UserError(f"WANDB_MODE={mode!r} is not known; known ones: {', '.join(MODES)}")
        settings = wandb.Settings(
            silent=True,
            console="off",
            x_disable_stats=True,
            x_save_requirements=False,
            disable_git=True,
            disable_code=True,
            x_disable_meta=True,
            host="hidden",
        )
        try:
            self.run = wandb.init(project="pat", name=run, config=config, dir=self.out, mode=mode, settings=settings)
        except wandb.errors.Error as error:  # its text may hold an address or a key
            raise UserError(
                f"--tracker wandb: cannot start ({type(error).__name__}); "
                "check WANDB_API_KEY and the network, or set WANDB_MODE=offline, or use --tracker none"
            ) from None

    def rollouts(self, logged: Logged) -> None:
        for row in merged(logged):
            self.run.log(row)

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


def merged(logged: Logged) -> list[dict[str, float]]:
    """Rows to log: the i-th steps of all rollouts together (a call of wandb costs about 1 ms), the summaries last."""
    columns = {f"{prefix}/{name}": list(steps[name]) for prefix, (steps, _) in logged.items() for name in steps}
    longest = max(map(len, columns.values()), default=0)
    rows = [{name: v[i] for name, v in columns.items() if i < len(v)} for i in range(longest)]
    return [*rows, {f"{prefix}/{name}": v for prefix, (_, summary) in logged.items() for name, v in summary.items()}]


def step_metrics(steps: pd.DataFrame, most: int = MAX_STEPS) -> pd.DataFrame:
    """Per-step metrics of a rollout, at most ``most`` rows, evenly chosen.

    steps: rows with time_s, replica, tp, kind, steps, batch, seconds. active_sequences and tokens_per_s are those of
    the row's replica.
    """
    decode = steps[steps.kind == "decode"].sort_values("time_s")
    if len(decode) > most:
        decode = decode.iloc[np.linspace(0, len(decode) - 1, most).round().astype(int)]
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
