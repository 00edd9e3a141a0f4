"""The plots of gen.md, from records alone."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

from bench.report.comparison import Comparison, arm_order
from bench.report.tables import paper_cell_of

TP_COLOUR = {1: "#dbe9f6", 2: "#bcdcc0", 4: "#fbe0a8", 8: "#f4b6a6"}
SVG = {"format": "svg", "metadata": {"Date": None}, "bbox_inches": "tight"}
matplotlib.rcParams["svg.hashsalt"] = "pat"


def course_plot(steps: dict[str, pd.DataFrame], title: str, path: Path) -> None:
    """Active sequences and decode step latency over time, one column an arm, the layout shaded.

    steps: by arm, rows with time_s, replica, tp, steps, batch, seconds (a row is a run of ``steps`` equal steps).
    """
    figure, axes = plt.subplots(
        2, len(steps), figsize=(3.4 * len(steps), 4.6), sharex=True, sharey="row", squeeze=False, layout="constrained"
    )
    for arm, (top, bottom) in zip(sorted(steps, key=arm_order), axes.T, strict=True):
        rows = steps[arm]
        decode = rows[rows.kind == "decode"].sort_values("time_s")
        times, active = active_sequences(decode)
        top.step(times, active, where="post", color="black", linewidth=1)
        bottom.scatter(
            decode.time_s, 1e3 * decode.seconds / decode.steps, s=2, color="black", alpha=0.4, rasterized=True
        )
        for axis in (top, bottom):
            shade_layouts(axis, decode)
        top.set_title(arm, fontsize=9)
        bottom.set_xlabel("time, s")
    axes[0, 0].set_ylabel("active sequences")
    axes[1, 0].set_ylabel("decode step, ms")
    axes[1, 0].set_yscale("log")
    tps = sorted({int(tp) for rows in steps.values() for tp in rows.tp.unique()})
    patches = [plt.Rectangle((0, 0), 1, 1, color=TP_COLOUR.get(tp, "#dddddd")) for tp in tps]
    figure.legend(patches, [f"TP{tp}" for tp in tps], loc="outside lower center", ncol=len(tps), fontsize=8)
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def active_sequences(decode: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """(times, running sequences over all replicas): each replica holds its batch until its next row or its layout's
    end."""
    changes = []
    for _, rows in decode.groupby(["tp", "replica"]):
        starts, batch = rows.time_s.to_numpy(), rows.batch.to_numpy()
        changes.append(np.c_[starts, np.diff(np.r_[0, batch])])
        last = rows.iloc[-1]
        changes.append([[last.time_s + last.seconds, -last.batch]])
    changes = np.concatenate(changes)
    changes = changes[np.argsort(changes[:, 0], kind="stable")]
    return changes[:, 0], np.cumsum(changes[:, 1])


def shade_layouts(axis, decode: pd.DataFrame) -> None:
    """Shade each stretch of one TP degree."""
    tp, time_s = decode.tp.to_numpy(), decode.time_s.to_numpy()
    end_s = float((decode.time_s + decode.seconds).max())
    first = np.flatnonzero(np.r_[True, tp[1:] != tp[:-1]])
    for start, stop in zip(first, [*time_s[first[1:]], end_s], strict=True):
        axis.axvspan(time_s[start], stop, color=TP_COLOUR.get(int(tp[start]), "#dddddd"), zorder=0)


def gain_plot(comparisons: list[Comparison], paper: dict, path: Path) -> None:
    """Gain over VeRL's default and over the best static layout by cell, one panel a (host term, batch)."""
    panels = list(dict.fromkeys((c.host_term, c.batch) for c in comparisons))
    names = list(dict.fromkeys(c.experiment.name for c in comparisons))
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(3.6 * len(panels) + 1, 0.28 * len(names) + 1.6),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    series = (
        ("pat-paper", "verl", "PAT (paper) vs VeRL default", "#4c78a8"),
        ("pat-planned", "verl", "PAT (planned) vs VeRL default", "#9ecae9"),
        ("pat-planned", "best", "PAT (planned) vs best static", "#e45756"),
    )
    height = 0.8 / len(series)
    for axis, panel in zip(axes[0], panels, strict=True):
        cells = {c.experiment.name: c for c in comparisons if (c.host_term, c.batch) == panel}
        for k, (arm, base, label, colour) in enumerate(series):
            rows = [
                (names.index(n), c.gain(arm, c.verl_default if base == "verl" else c.best_static))
                for n, c in cells.items()
            ]
            rows = [(y, g) for y, g in rows if g]
            axis.barh(
                [y + (k - 1) * height for y, _ in rows],
                [g.mean for _, g in rows],
                height,
                label=label,
                color=colour,
                xerr=[0 if np.isnan(g.half) else g.half for _, g in rows],
                error_kw={"linewidth": 0.6},
            )
        marks = [(names.index(n), p) for n, c in cells.items() if (p := paper_cell_of(paper, c)) and panel[1] == 128]
        axis.scatter(
            [100 * (p["speedup"] - 1) for _, p in marks],
            [y for y, _ in marks],
            marker="D",
            s=18,
            color="black",
            label="the paper, vs VeRL",
            zorder=3,
        )
        axis.axvline(0, color="black", linewidth=0.6)
        axis.set_title(f"{panel[0]}, {panel[1]:,} sequences", fontsize=9)
        axis.set_xlabel("gain in tokens/s, %")
    axes[0, 0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0, 0].invert_yaxis()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncol=4, fontsize=8)
    save(figure, path)


def replay_plot(replays: dict[str, list], path: Path) -> None:
    """Predicted over measured of replayed rollouts (:class:`bench.fidelity.Replay` by experiment): mean decode step by
    (rollout, TP, batch), and rollout time; the band is 5% either way."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.9), layout="constrained")
    for k, (name, mine) in enumerate(replays.items()):
        marker = "os^D"[k % 4]
        steps = pd.concat([r.steps for r in mine])
        for tp, rows in steps.groupby("tp"):
            mean_ms = 1e3 * rows[["measured_s", "predicted_s"]].div(rows["count"], axis=0)
            left.scatter(
                mean_ms.measured_s, mean_ms.predicted_s, s=10, marker=marker, label=f"{name}, TP{tp}", alpha=0.7
            )
        times = [(r.record.rollout_s, r.predicted.rollout_s) for r in mine]
        right.scatter(*zip(*times, strict=True), s=22, marker=marker, label=name)
    for axis, what in ((left, "decode step, ms"), (right, "rollout, s")):
        low, high = axis.get_xlim()
        ends = np.array([max(0.0, min(low, axis.get_ylim()[0])), max(high, axis.get_ylim()[1])])
        axis.fill_between(ends, 0.95 * ends, 1.05 * ends, color="0.85", zorder=0)
        axis.plot(ends, ends, color="black", linewidth=0.6, zorder=0)
        axis.set_xlabel(f"{what}, measured")
        axis.set_ylabel(f"{what}, predicted")
        axis.legend(fontsize=7)
    save(figure, path)


def save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, **SVG)
    plt.close(figure)
