"""Sections of predictor.md: step times that the fit has not seen, and the host term of the engine."""

from __future__ import annotations

import pandas as pd

from bench.machine import paper_numbers
from bench.profiles.samples import Samples
from bench.report.tables import error_summary, markdown, share
from pat.layout import Layout

STEP = "## Step time: points that the fit has not seen"
HOST = "## Host term of this engine"


def step_section(profiles: list[Samples], grids: pd.DataFrame | None) -> list[str]:
    parts, given = [STEP], paper_numbers()["predictor_mean_error"]
    if profiles:
        parts += [
            "Measured here. A point is all steps of one batch after prompts of one length, outliers left out. p50, p90 "
            "and mean: each point predicted by a fit without it. *Batch unseen*: by a fit without any point of its "
            "batch. *Fit*: by the fit to all points, which never falls with the context, and with the batch only where "
            "the points prove it beyond their scatter. *Repeats*: how far one measurement of a point is from the "
            "others; other load on the machine shows there, and no model can undercut it by much. "
            f"The paper gives {given['tp2dp4']['value']:.2%} (TP2xDP4) and {given['tp8dp1']['value']:.2%} (TP8xDP1) "
            "on its GPUs, second-hand.",
            markdown(hold_out_rows(profiles)),
            "Records: `raw/profile-<model>.parquet`, one row a scheduler step; keys: layout, variant greedy, batch, "
            "context_tokens, latency_s.",
        ]
    else:
        parts.append("No profile has been measured on this machine yet; `python -m bench profile` does it.")
    if grids is None:
        return [*parts, "There is no record of held-out points of the GPU grids yet; `python -m bench gen` makes it."]
    rows = []
    for (model, gpu, tp), group in grids.groupby(["model", "gpu", "tp"]):
        errors = (group.predicted_s / group.exact_s - 1).abs()
        fine = {"mean": f"{100 * errors.mean():.2f}%", "greatest": f"{100 * errors.max():.2f}%"}
        rows.append({"model": model, "gpu": gpu, "layout": f"TP{tp}"} | error_summary(errors) | fine)
    return [
        *parts,
        "Grids of aiconfigurator, predicted tier: random batches and contexts between the knots, beside the package's "
        "own answer there.",
        markdown(rows),
        "Records: `raw/hold-out.parquet`; keys: exact_s, predicted_s.",
    ]


def hold_out_rows(profiles: list[Samples]) -> list[dict[str, str]]:
    """One row a model and layout: hold-out error, beside what the monotone fit costs and what repeats differ by."""
    rows = []
    for samples in profiles:
        profile, points, repeats = samples.profile(), samples.hold_out(), samples.repeat_errors()
        for layout in samples.layouts:
            name = str(layout)
            mine, again = points[points.layout == name], error_summary(repeats[repeats.layout == name].error)
            rows.append(
                {"model": samples.model, "layout": name}
                | error_summary(mine.error)
                | {
                    "batch unseen, mean": error_summary(mine.batch_error)["mean"],
                    "fit, mean": error_summary(mine.fit_error)["mean"],
                    "± (90%)": share(profile.grids[layout.tp].half_interval),
                    "steps": str(int(mine.samples.sum())),
                    "outliers": str(int(mine.outliers.sum())),
                    "repeats, p50": again["p50"],
                    "repeats, mean": again["mean"],
                }
            )
    return rows


def host_section(profiles: list[Samples]) -> list[str]:
    rows = []
    for samples in profiles:
        for (layout, variant), term in sorted(samples.host_terms().items()):
            dp, sequences = Layout.parse(layout).dp, samples.sequences
            rows.append(
                {
                    "model": samples.model,
                    "layout": layout,
                    "tokens are": variant,
                    "base, ms": f"{1e3 * term.base_s:.2f}",
                    "a sequence, µs": f"{1e6 * term.per_sequence_s:.1f}",
                    f"at its share of {sequences} sequences, ms"
                    if len({s.sequences for s in profiles}) == 1
                    else "at a full replica, ms": f"{1e3 * float(term.step_s(1, sequences / dp)):.2f}",
                }
            )
    if not rows:
        return [HOST, "No profile has been measured on this machine yet."]
    return [
        HOST,
        "Time of a decode step outside the model's forward pass, by sequences of a replica: scheduling, sampling, "
        "results, and at TP2 the broadcast of requests between ranks. Lines by Theil and Sen. *sampled* draws tokens "
        "at temperature 1; *streamed* sends each token as it comes. The step times above contain it. The preset "
        "`sglang-0.5` of the predicted tier is 0.55 ms + 5.5 µs a sequence, + 0.5 ms above TP1, overlapped with the "
        "GPU.",
        markdown(rows),
        "Records: `raw/profile-<model>.parquet`; keys: latency_s less forward_s, by layout, variant and batch.",
    ]
