"""The points of results/sensitivity.md: what is swept, over which values, and PAT's gain at each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from bench.models import model_shape
from bench.profiles.links import links_of
from bench.profiles.wire import slower_links
from bench.stats import gain_percent
from bench.sweep import Point

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
        Point("tail", x, s, batch=b, host_term=h, lengths=f"lognormal:{round(MEAN_LOG - x * x / 2, 4):g},{x}")
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


def means(table: pd.DataFrame, column: str = "vs_best") -> np.ndarray:
    return np.array([g.mean for g in table[column] if g is not None])
