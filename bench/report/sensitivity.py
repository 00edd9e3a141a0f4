"""When does PAT pay off? Its gain over machines and workloads, as figures, tables and sentences made from the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.ticker import NullFormatter, ScalarFormatter

from bench.errors import UserError
from bench.files import write_whole
from bench.models import model_shape
from bench.profiles.host_terms import host_term
from bench.profiles.links import links_of
from bench.profiles.wire import slower_links
from bench.progress import progress_bar
from bench.report.plots import save
from bench.report.tables import NONE, markdown
from bench.stats import Interval, gain_percent
from bench.sweep import Point, run_sweep

NAME = "sensitivity"
WORTH_PERCENT = 1.0
"""A gain from which PAT counts as paying off."""
HOSTS = ("paper-era", "sglang-0.5")
BATCHES = (128, 1024)
BASE_MS = (0.0, 1.0, 3.0)
EACH_MS = (0.0, 0.05, 0.15)
WIRES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SWEPT_BATCHES = (8, 32, 128, 256, 512, 1024, 2048, 4096)
MEAN_LOG = 7.25 + 1.41**2 / 2
"""Logarithm of the mean length, before the cap, of the paper's LLaMA workload: tails change, the mean does not."""
SIGMAS = (0.2, 0.6, 1.0, 1.41, 2.0)
SWITCH_S = (0.05, 1.0, 3.0, 10.0, 30.0)
MODELS = (
    "Qwen/Qwen3-1.7B",
    "LLaMA3.1-8B",
    "Qwen3-14B",
    "Qwen/Qwen3-32B",
    "meta-llama/Meta-Llama-3.1-70B",
)
COLOURS = {"paper-era": "#e45756", "sglang-0.5": "#4c78a8"}


@dataclass(frozen=True, eq=False)
class Axis:
    """One swept quantity: the sweep's name, what sentences and figures call it, how a value reads in a sentence."""

    sweep: str
    title: str
    label: str
    says: Callable[[float], str]
    log: bool = False


def points() -> list[Point]:
    """Every point of the report. One quantity is swept at a time around LLaMA3.1-8B on 8 H100, responses of at most
    24K tokens; the host term's two numbers together."""
    host = [
        Point("host", base, f"{way}, {batch}", batch=batch, host_term=f"{way}:{base},{each}")
        for batch in BATCHES
        for way in ("serial", "overlapped")
        for base in BASE_MS
        for each in EACH_MS
    ]
    both = [(h, b, f"{h}, {b:,} sequences") for h in HOSTS for b in BATCHES]
    wire = [Point("wire", x, s, batch=b, host_term=h, wire=x) for h, b, s in both for x in WIRES]
    batch = [
        Point("batch", x, f"{h}, {wires}", batch=x, host_term=h, wire=w)
        for h in HOSTS
        for w, wires in ((0.0, "NVLink"), (1.0, "PCIe"))
        for x in SWEPT_BATCHES
    ]
    tail = [
        Point("tail", x, s, batch=b, host_term=h, lengths=f"lognormal:{MEAN_LOG - x * x / 2:.4f},{x}")
        for h, b, s in both
        for x in SIGMAS
    ]
    cost = [Point("switch", x, s, batch=b, host_term=h, switch_s=x) for h, b, s in both for x in SWITCH_S]
    model = [
        Point("model", model_shape(m).params / 1e9, s, batch=b, host_term=h, model=m)
        for h, b, s in both
        for m in MODELS
    ]
    return [*host, *wire, *batch, *tail, *cost, *model]


def gigabytes_per_s(wire: float) -> float:
    return slower_links(links_of("h100_sxm"), wire).intra_node_bytes_per_s / 1e9


AXES = (
    Axis("wire", "Links", "links between GPUs, GB/s", lambda x: f"{x:,.0f} GB/s", log=True),
    Axis("batch", "Batch", "sequences of the rollout", lambda x: f"{x:,.0f} sequences", log=True),
    Axis("tail", "Tail weight", "tail weight: sigma of log-normal lengths, equal mean", lambda x: f"sigma {x:g}"),
    Axis("switch", "Switch cost", "fixed cost of a switch, s", lambda x: f"{x:g} s", log=True),
    Axis("model", "Model size", "parameters, billions", lambda x: f"{x:.0f} B parameters", log=True),
)


def gains(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a point: sweep, series, x, and PAT's gain (Interval) over best static and over VeRL's default; the
    latter None where TP2 does not fit."""
    statics = [f"TP{tp}_s" for tp in (1, 2, 4, 8)]
    lines = []
    for _, group in rows.groupby("fingerprint", sort=False):
        first, times = group.iloc[0], group.reindex(columns=statics).dropna(axis=1)
        best = times.mean().idxmin()
        verl = gain_percent(times["TP2_s"], group.pat_s) if "TP2_s" in times else None
        lines.append(
            {
                "sweep": first.sweep,
                "series": first.series,
                "x": gigabytes_per_s(first.x) if first.sweep == "wire" else first.x,
                "batch": first.batch,
                "host_term": first.host_term,
                "best": best.removesuffix("_s"),
                "vs_best": gain_percent(times[best], group.pat_s),
                "vs_verl": verl,
                "path": first.pat_path,
            }
        )
    return pd.DataFrame(lines)


# --- sentences


def sentences(table: pd.DataFrame) -> list[str]:
    """The finding, in words that follow from the table alone."""
    return [
        overall(table),
        *host_sentences(table),
        *(s for axis in AXES for s in axis_sentences(table, axis)),
        worst(table),
    ]


def means(table: pd.DataFrame, column: str = "vs_best") -> np.ndarray:
    return np.array([g.mean for g in table[column] if g is not None])


def overall(table: pd.DataFrame) -> str:
    best, verl = means(table), means(table, "vs_verl")
    pays = best >= WORTH_PERCENT
    sure = sum(gain.mean > gain.half for gain in table.vs_best[pays])
    return (
        f"Over {len(table)} points PAT beats the best static layout by at least {WORTH_PERCENT:.0f}% in {pays.sum()} "
        f"(median of all {np.median(best):+.1f}%, most {best.max():+.1f}%; in {sure} of the {pays.sum()} by more than "
        f"its interval), and VeRL's default layout (TP2) by at least {WORTH_PERCENT:.0f}% in "
        f"{(verl >= WORTH_PERCENT).sum()} of the {len(verl)} where TP2 fits (median {np.median(verl):+.1f}%, most "
        f"{verl.max():+.1f}%)."
    )


def host_sentences(table: pd.DataFrame) -> list[str]:
    said = []
    for series, rows in table[table.sweep == "host"].groupby("series", sort=False):
        way, batch = series.split(", ")
        gain, each_ms = means(rows), np.array([float(h.rpartition(",")[2]) for h in rows.host_term])
        text = f"Host term {way}, {int(batch):,} sequences: {gain.min():+.1f}% to {gain.max():+.1f}% over best static"
        pays = [ms for ms in EACH_MS if (gain[each_ms >= ms] >= WORTH_PERCENT).all()]
        if pays:
            text += f", at least {WORTH_PERCENT:.0f}% whatever the base from {pays[0]:g} ms a sequence on"
        said.append(text + ".")
    return said


def axis_sentences(table: pd.DataFrame, axis: Axis) -> list[str]:
    said = []
    for series, rows in table[table.sweep == axis.sweep].groupby("series", sort=False):
        rows = rows.sort_values("x")
        said.append(f"{axis.title}; {series}: {span(rows.x.to_numpy(), means(rows), axis)}.")
    return said


def span(x: np.ndarray, gain: np.ndarray, axis: Axis) -> str:
    """Where along an axis PAT beats best static by enough."""
    pays = gain >= WORTH_PERCENT
    least = f"at least {WORTH_PERCENT:.0f}% over best static"
    most = f"most {gain.max():+.1f}% at {axis.says(x[gain.argmax()])}"
    if not pays.any():
        return f"never {least} ({most})"
    if pays.all():
        return f"{least} everywhere ({most})"
    edges = np.flatnonzero(np.diff(pays.astype(int)))
    if len(edges) == 1:
        where = f"from {axis.says(x[edges[0] + 1])} on" if pays[-1] else f"up to {axis.says(x[edges[0]])}"
    else:
        where = f"at {pays.sum()} of {len(x)} values, " + ", ".join(axis.says(value) for value in x[pays])
    return f"{least} {where} ({most})"


def worst(table: pd.DataFrame) -> str:
    gain = means(table)
    row = table.iloc[int(gain.argmin())]
    slower = (gain < -WORTH_PERCENT).sum()
    return (
        f"PAT's worst point against best static: {gain.min():+.1f}% ({row.sweep} sweep, {row.series}, x = "
        f"{row.x:g}); it "
        f"is more than {WORTH_PERCENT:.0f}% slower in {slower} of {len(table)} points."
    )


# --- figures and tables


def host_figure(table: pd.DataFrame, path: Path) -> None:
    """Gain over the host term's two numbers: a column a series, best static above, VeRL's default below."""
    rows = table[table.sweep == "host"]
    series = list(dict.fromkeys(rows.series))
    figure, axes = plt.subplots(2, len(series), figsize=(3.3 * len(series), 5.8), layout="constrained", sharey=True)
    for axis_pair, column, title in zip(axes, ("vs_best", "vs_verl"), ("best static", "VeRL default"), strict=True):
        limit = max(5.0, float(np.abs(means(rows, column)).max()))
        for axis, name in zip(axis_pair, series, strict=True):
            grid = means(rows[rows.series == name], column).reshape(len(BASE_MS), len(EACH_MS))
            image = axis.imshow(grid, origin="lower", cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
            for (i, j), value in np.ndenumerate(grid):
                axis.text(j, i, f"{value:+.0f}", ha="center", va="center", fontsize=7)
            axis.set_xticks(range(len(EACH_MS)), [f"{ms:g}" for ms in EACH_MS], fontsize=7)
            axis.set_yticks(range(len(BASE_MS)), [f"{ms:g}" for ms in BASE_MS], fontsize=7)
            axis.set_title(f"{name} sequences, vs {title}", fontsize=9)
            axis.set_xlabel("ms a sequence and step", fontsize=8)
            for preset in map(host_term, HOSTS):
                if preset.overlapped == name.startswith("overlapped"):
                    at = (
                        np.interp(1e3 * preset.per_sequence_s, EACH_MS, range(len(EACH_MS))),
                        np.interp(1e3 * preset.base_s, BASE_MS, range(len(BASE_MS))),
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
