"""Section of predictor.md: measured rollouts replayed in the simulator, from their profile alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.fidelity import Replay, replay, switch_rows
from bench.profiles.samples import Samples
from bench.report.gen import Recorded
from bench.report.plots import replay_plot
from bench.report.tables import NONE, error_summary, markdown, share
from bench.workloads.trace import read_trace

TITLE = "## Fidelity: measured rollouts replayed"


@dataclass(frozen=True, eq=False)
class Replayed:
    """A measured experiment with the profile its policies planned with, and its rollouts replayed from it."""

    name: str
    samples: Samples
    replays: list[Replay]


def replayed_of(one: Recorded, profiles: list[Samples], out: Path) -> Replayed | None:
    """The rollouts of a measured experiment replayed; None where there is no profile of its model and machine."""
    machine = one.made.get("provenance", {}).get("machine", {})
    mine = [s for s in profiles if s.model == one.experiment.model and s.provenance["machine"] == machine]
    if one.experiment.tier != "measured" or not mine:
        return None
    replays = []
    for record in one.records:
        steps = one.store.read_steps(record)
        trace = out / "raw" / "traces" / f"{record.trace_sha256[:12]}.jsonl"
        if steps is not None and trace.is_file():
            replays.append(replay(one.experiment, record, read_trace(trace), mine[0], steps))
    return Replayed(one.experiment.name, mine[0], replays) if replays else None


def fidelity_section(replayed: list[Replayed], out: Path) -> list[str]:
    if not replayed:
        return [
            TITLE,
            "No measured rollouts with a profile of the same model and machine are among the records; "
            "`python -m bench gen cpu-llama cpu-qwen3` makes both.",
        ]
    replay_plot({one.name: one.replays for one in replayed}, out / "plots" / "predictor.svg")
    totals, rollouts, switches = [], [], []
    for one in replayed:
        mine = [row | {"arm": r.record.arm, "seed": r.record.seed} for r in one.replays for row in switch_rows(r)]
        both = [row for row in mine if row["measured"] == row["predicted"]]
        errors = {
            "decode step, mean of a rollout": [r.step_error for r in one.replays],
            "rollout time": [r.rollout_error for r in one.replays],
            "switch time": [row["predicted_s"] / row["measured_s"] - 1 for row in both],
            "point of the switch, share of the rollout": point_errors(one.replays),
        }
        totals += [{"experiment": one.name, "what": what} | error_summary(found) for what, found in errors.items()]
        rollouts += [rollout_row(one.name, r) for r in one.replays]
        switches += [switch_row(one.name, row) for row in mine]
    parts = [
        TITLE,
        "Each measured rollout is run again in the simulator: same trace, same policy, all times from the profile that "
        "the policies planned with (steps, prefill, switches of an idle engine, rates of moving KV cache). Nothing of "
        "the rollout itself is used. Mean decode step: predicted for the very batches and contexts that were measured.",
        markdown(totals),
        "![measured and predicted](plots/predictor.svg)",
        markdown(rollouts),
    ]
    if switches:
        parts += [
            "Switches, from the order to routing into the new layout, the wait for the step boundary included; *at*: "
            "since the rollout began, with the sequences then running. – where one of the two did not switch.",
            markdown(switches),
        ]
    return [
        *parts,
        "Records: `raw/<experiment>.jsonl` (rollout_s, layouts, switches), `raw/<experiment>.steps/` (seconds), "
        "`raw/profile-<model>.parquet`, `raw/traces/`.",
    ]


def point_errors(replays: list[Replay]) -> list[float]:
    """(predicted - measured) time of each switch that both made, as a share of the measured rollout."""
    return [
        (row["predicted_at_s"] - row["measured_at_s"]) / r.record.rollout_s
        for r in replays
        for row in switch_rows(r)
        if row["measured"] == row["predicted"]
    ]


def rollout_row(experiment: str, r: Replay) -> dict[str, str]:
    measured, predicted = (" → ".join(course) for course in r.layouts)
    sums, count = r.steps[["measured_s", "predicted_s"]].sum(), r.steps["count"].sum()
    return {
        "experiment": experiment,
        "arm": r.record.arm,
        "seed": str(r.record.seed),
        "layouts": measured if measured == predicted else f"{measured} (predicted: {predicted})",
        "rollout, s": f"{r.record.rollout_s:.2f}",
        "predicted, s": f"{r.predicted.rollout_s:.2f}",
        "error": share(r.rollout_error, sign=True),
        "decode step, ms": f"{1e3 * sums.measured_s / count:.1f}",
        "predicted, ms": f"{1e3 * sums.predicted_s / count:.1f}",
        "error ": share(r.step_error, sign=True),
        "load": NONE if r.record.load_average is None else f"{r.record.load_average:.1f}",
    }


def switch_row(experiment: str, row: dict) -> dict[str, str]:
    def one(name: str, form: str, factor: float = 1.0) -> str:
        return NONE if np.isnan(row[name]) else format(factor * row[name], form)

    return {
        "experiment": experiment,
        "arm": row["arm"],
        "seed": str(row["seed"]),
        "switch": row["measured"] or NONE,
        "predicted": row["predicted"] or NONE,
        "time, ms": one("measured_s", ".0f", 1e3),
        "predicted, ms": one("predicted_s", ".0f", 1e3),
        "at, s": one("measured_at_s", ".2f"),
        "predicted at, s": one("predicted_at_s", ".2f"),
        "sequences": one("measured_alive", ".0f"),
        "predicted sequences": one("predicted_alive", ".0f"),
    }
