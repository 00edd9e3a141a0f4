"""Sections of predictor.md: the planner beside the oracle, without its parts, and in random scenarios."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from bench.report.comparison import WORTH_PERCENT, Comparison
from bench.report.tables import NONE, markdown

REGRET = "## Oracle and regret (predicted)"
ABLATIONS = "## Ablations"
SCENARIOS = "## Random scenarios"
KNOWN_ARMS = ("pat-paper", "restart", "pat-planned", "oracle")
WORST_SHOWN = 5


def regret_section(comparisons: list[Comparison]) -> list[str]:
    rows = []
    for c in comparisons:
        mine, oracle = c.gain("pat-planned", c.best_static), c.gain("oracle", c.best_static)
        if mine is None or oracle is None:
            continue
        regret = 100 * (c.rollout_s["pat-planned"] / c.rollout_s["oracle"] - 1)
        reached = c.share_of_oracle("pat-planned")
        rows.append(
            {
                "cell": c.experiment.name,
                "batch": str(c.batch),
                "host term": c.host_term,
                "best static": c.best_static.removeprefix("static-"),
                "gain": mine.text(1, "%", sign=True),
                "oracle's gain": oracle.text(1, "%", sign=True),
                "reached": NONE if reached is None else f"{100 * reached:.0f}%",
                "regret, mean": f"{regret.mean():.1f}%",
                "regret, worst": f"{regret.max():.1f}%",
            }
        )
    if not rows:
        return [REGRET, "No predicted cell with an oracle has been run yet."]
    return [
        REGRET,
        "Gains in tokens/s over the best static layout of the cell. The oracle knows every length and plans on the "
        f"same trace; – where it gains less than {WORTH_PERCENT}%. Regret: how much longer than the oracle's the "
        "planner's rollouts take, over the seeds.",
        markdown(rows),
        "Records: `raw/<experiment>.jsonl`; keys: rollout_s of arms static-*, pat-planned, oracle.",
    ]


def ablation_section(comparisons: list[Comparison]) -> list[str]:
    """Arms that are neither static nor one of the main ones: what each loses against the planner."""
    arms = dict.fromkeys(
        arm for c in comparisons for arm in c.rollout_s if arm not in KNOWN_ARMS and not arm.startswith("static-")
    )
    rows = []
    for arm in arms:
        gains = {
            (c.experiment.name, c.batch, c.host_term): gain.mean
            for c in comparisons
            if (gain := c.gain(arm, "pat-planned")) is not None
        }
        if gains:
            worst = min(gains, key=gains.get)
            values = np.array(list(gains.values()))
            rows.append(
                {
                    "arm": arm,
                    "cells": str(len(values)),
                    "against PAT (planned), mean": f"{values.mean():+.2f}%",
                    "best": f"{values.max():+.2f}%",
                    "worst": f"{values.min():+.2f}%",
                    "worst in": f"{worst[0]}, {worst[1]}, {worst[2]}",
                }
            )
    if not rows:
        return [
            ABLATIONS,
            "The records of ablation arms are not there; `python -m bench gen bench/experiments/ablations/*.yaml` "
            "makes them.",
        ]
    return [
        ABLATIONS,
        "Tokens/s against the whole planner, over all cells that ran the arm.",
        markdown(rows),
        "Records: `raw/<experiment>.jsonl`; keys: rollout_s by arm.",
    ]


def scenario_section(out: Path) -> list[str]:
    """Random scenarios by family of lengths, and the worst of all."""
    path = out / "raw" / "scenarios.jsonl"
    if not path.is_file() or path.stat().st_size == 0:
        return [SCENARIOS, "The records of random scenarios are not there; `python -m bench scenarios` makes them."]
    frame = pd.read_json(path, lines=True)
    rows = []
    for family, group in frame.groupby(frame.lengths.str.split(":").str[0]):
        gains = group.gain_percent
        rows.append(
            {
                "lengths": family,
                "scenarios": str(len(group)),
                "gain over best static, mean": f"{gains.mean():+.2f}%",
                "greatest": f"{gains.max():+.2f}%",
                "least": f"{gains.min():+.2f}%",
                "more than 1% slower": str(int((gains < -1).sum())),
            }
        )
    worst = frame.nsmallest(WORST_SHOWN, "gain_percent")
    names = ("scenario", "model", "gpu", "gpus", "host_term", "lengths", "cap_tokens", "batch", "best_static")
    shown = [
        {name: str(getattr(one, name)) for name in names}
        | {"gain": f"{one.gain_percent:+.2f}%", "layouts": " → ".join(layout for _, layout in one.layouts)}
        for one in worst.itertuples()
    ]
    return [
        SCENARIOS,
        f"{len(frame)} random scenarios (model, GPUs, lengths, cap, batch, host term), each against the best of its "
        f"static layouts in hindsight. {int((frame.gain_percent < -1).sum())} are more than 1% slower; the worst is "
        f"{frame.gain_percent.min():+.2f}%.",
        markdown(rows),
        f"The {len(worst)} worst:",
        markdown(shown),
        "Records: `raw/scenarios.jsonl`, one line a scenario; keys: gain_percent, planned_s, static_s.",
    ]
