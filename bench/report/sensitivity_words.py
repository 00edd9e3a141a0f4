"""When does PAT pay off? The finding of results/sensitivity.md, in sentences made from the table of gains."""

from __future__ import annotations

import numpy as np
import pandas as pd

from bench.report import sensitivity_points as swept
from bench.report.sensitivity_points import AXES, WORTH_PERCENT, Axis, means


def sentences(table: pd.DataFrame) -> list[str]:
    """The finding, in words that follow from the table alone."""
    return [
        overall(table),
        *host_sentences(table),
        *(s for axis in AXES for s in axis_sentences(table, axis)),
        worst(table),
    ]


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
        pays = [ms for ms in swept.EACH_MS if (gain[each_ms >= ms] >= WORTH_PERCENT).all()]
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
