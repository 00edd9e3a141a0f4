"""When does PAT pay off? Its gain over machines and workloads, as figures, tables and sentences made from the rows."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import NullFormatter, ScalarFormatter

from bench.errors import UserError
from bench.files import write_whole
from bench.profiles.host_terms import host_term
from bench.progress import progress_bar
from bench.report import sensitivity_points as swept
from bench.report.plots import save
from bench.report.sensitivity_points import AXES, HOSTS, Axis, gains, means, points
from bench.report.sensitivity_words import sentences
from bench.report.tables import NONE, markdown
from bench.stats import Interval
from bench.sweep import run_sweep

NAME = "sensitivity"
COLOURS = {"paper-era": "#e45756", "sglang-0.5": "#4c78a8"}


def host_figure(table: pd.DataFrame, path: Path) -> None:
    """Gain over the host term's two numbers: a column a series, best static above, VeRL's default below."""
    rows = table[table.sweep == "host"]
    series = list(dict.fromkeys(rows.series))
    figure, axes = plt.subplots(2, len(series), figsize=(3.3 * len(series), 5.8), layout="constrained", sharey=True)
    for axis_pair, column, title in zip(axes, ("vs_best", "vs_verl"), ("best static", "VeRL default"), strict=True):
        limit = max(5.0, float(np.abs(means(rows, column)).max()))
        for axis, name in zip(axis_pair, series, strict=True):
            grid = means(rows[rows.series == name], column).reshape(len(swept.BASE_MS), len(swept.EACH_MS))
            image = axis.imshow(grid, origin="lower", cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
            for (i, j), value in np.ndenumerate(grid):
                axis.text(j, i, f"{value:+.0f}", ha="center", va="center", fontsize=7)
            axis.set_xticks(range(len(swept.EACH_MS)), [f"{ms:g}" for ms in swept.EACH_MS], fontsize=7)
            axis.set_yticks(range(len(swept.BASE_MS)), [f"{ms:g}" for ms in swept.BASE_MS], fontsize=7)
            axis.set_title(f"{name} sequences, vs {title}", fontsize=9)
            axis.set_xlabel("ms a sequence and step", fontsize=8)
            for preset in map(host_term, HOSTS):
                if preset.overlapped == name.startswith("overlapped"):
                    at = (
                        np.interp(1e3 * preset.per_sequence_s, swept.EACH_MS, range(len(swept.EACH_MS))),
                        np.interp(1e3 * preset.base_s, swept.BASE_MS, range(len(swept.BASE_MS))),
                    )
                    axis.plot(*at, "D", color="black", markersize=6)
                    axis.annotate(preset.name, at, xytext=(5, 5), textcoords="offset points", fontsize=7)
        axis_pair[0].set_ylabel("ms a step", fontsize=8)
        figure.colorbar(image, ax=axis_pair, label="gain, %")
    save(figure, path)


def axes_figure(table: pd.DataFrame, path: Path) -> None:
    """Gain along every other axis: a column an axis, best static above, VeRL's default below."""
    figure, axes = plt.subplots(2, len(AXES), figsize=(3.6 * len(AXES), 6.4), layout="constrained", sharex="col")
    for column, axis in enumerate(AXES):
        rows = table[table.sweep == axis.sweep]
        for plot, gain, title in zip(
            axes[:, column], ("vs_best", "vs_verl"), ("best static", "VeRL default"), strict=True
        ):
            for series, line in rows.groupby("series", sort=False):
                line = line[line[gain].notna()].sort_values("x")
                half = [0.0 if np.isnan(g.half) else g.half for g in line[gain]]
                host, _, kind = series.partition(", ")
                style = "-" if kind in ("1,024 sequences", "PCIe") else "--"
                plot.errorbar(
                    line.x,
                    means(line, gain),
                    half,
                    color=COLOURS[host],
                    linestyle=style,
                    marker=".",
                    label=series,
                    elinewidth=0.5,
                )
            plot.axhline(0, color="black", linewidth=0.6)
            plot.set_title(f"vs {title}", fontsize=9)
            if axis.log:
                plot.set_xscale("log")
                plot.xaxis.set_major_formatter(ScalarFormatter())
                plot.xaxis.set_minor_formatter(NullFormatter())
            plot.legend(fontsize=6)
        axes[1, column].set_xlabel(axis.label, fontsize=8)
    axes[0, 0].set_ylabel("gain in tokens/s, %")
    axes[1, 0].set_ylabel("gain in tokens/s, %")
    save(figure, path)


def axis_table(table: pd.DataFrame, axis: Axis) -> str:
    """Gain over best static / over VeRL's default: a row a value, a column a series."""
    rows = []
    for x, group in table[table.sweep == axis.sweep].groupby("x"):
        row = {axis.label: axis.says(x)}
        for line in group.itertuples():
            row[line.series] = f"{text(line.vs_best)} / {text(line.vs_verl)}"
        rows.append(row)
    return markdown(rows)


def text(gain: Interval | None) -> str:
    return gain.text(1, sign=True) if gain is not None else NONE


def sensitivity_section(out: Path, ray: str | None = None) -> str:
    """Run what is missing, draw the figures into OUT/plots, and return the section as markdown (its heading is ##)."""
    wanted = points()
    with progress_bar() as bar:
        task = bar.add_task("sensitivity", total=len(wanted))
        rows = run_sweep(wanted, out, NAME, ray, lambda done: bar.update(task, completed=done))
    table = gains(rows)
    host_figure(table, out / "plots" / "sensitivity-host.svg")
    axes_figure(table, out / "plots" / "sensitivity.svg")
    parts = [
        "## When does PAT pay off? (predicted)",
        "One quantity is changed at a time around LLaMA3.1-8B on 8 H100 with NVLink, lengths log-normal as the "
        "paper's, "
        "responses of at most 24K tokens, KV capacity modelled. PAT chooses its first layout and up to three switches "
        "from the lengths of earlier rollouts. Gains in tokens/s, mean of 3 seeds ± half a 95% interval.",
        "\n".join(f"- {s}" for s in sentences(table)),
        "Diamonds: the two presets of the host term. *Serial* adds the scheduler's time to the GPU's, "
        "*overlapped* takes "
        "the longer of the two.",
        "![gain over the host term](plots/sensitivity-host.svg)",
        "PCIe: the H100's compute behind the all-reduces and links measured on A40 without peer-to-peer; links between "
        "the two are interpolated geometrically, not measured. Tail weight: sigma of a log-normal of unchanged mean.",
        "![gain over links, batch, tail, switch cost and model](plots/sensitivity.svg)",
        *(f"Percent over best static / over VeRL's default, by {a.label}:\n\n{axis_table(table, a)}" for a in AXES),
        f"Records: `raw/{NAME}.jsonl`, a line per (point, seed); keys: sweep, x, series, TP1_s .. TP8_s, pat_s, "
        f"pat_path. "
        f"Machine and versions: `raw/{NAME}.provenance.json`.",
    ]
    return "\n\n".join(parts)


def run(out: Path, ray: str | None = None) -> Path:
    """Write OUT/sensitivity.md: the section alone, as a page. UserError where OUT is not a folder."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is not a folder; give one, or a name that is free")
    return write_page(out, sensitivity_section(out, ray))


def write_page(out: Path, section: str) -> Path:
    return write_whole(out / "sensitivity.md", section.removeprefix("#") + "\n")
