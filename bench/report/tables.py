"""The tables of gen.md: pure functions from comparisons and records to rows of text."""

from __future__ import annotations

import numpy as np
import pandas as pd
from tabulate import tabulate

from bench.report.comparison import Comparison, arm_order
from bench.stats import Interval, interval

NONE = "–"


def markdown(rows: list[dict[str, str]]) -> str:
    """A markdown table; the keys of the first row are its head."""
    return tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True)


def text(value: Interval | None, digits: int = 1, unit: str = "", sign: bool = False) -> str:
    return value.text(digits, unit, sign) if value else NONE


def percent(value: Interval | None) -> str:
    return text(value, 1, "%", sign=True)


def paper_cell_of(paper: dict, comparison: Comparison) -> dict | None:
    """The paper's generation figures for this experiment, if it gives any."""
    experiment = comparison.experiment
    for cell in paper["generation"]:
        if (cell.get("model"), cell.get("testbed"), cell.get("max_response")) == (
            experiment.model,
            experiment.testbed,
            experiment.max_response_tokens,
        ):
            return cell
    return None


def name_of(comparison: Comparison) -> str:
    return comparison.experiment.name + (" *" if comparison.extrapolated else "")


def paper_rows(comparisons: list[Comparison], paper: dict) -> list[dict[str, str]]:
    """The paper's own cells at its batch, its figures beside ours."""
    rows = []
    for c in comparisons:
        cell = paper_cell_of(paper, c)
        if cell is None or c.batch != paper["setup"]["rollout_batch_sequences"]["value"]:
            continue
        paper_gain = 100 * (cell["speedup"] - 1)
        gain = c.gain("pat-paper", c.verl_default)
        rows.append(
            {
                "cell": name_of(c),
                "host term": c.host_term,
                "VeRL tok/s, paper": f"{cell['baseline_tok_s']:,.1f}" if "baseline_tok_s" in cell else NONE,
                "VeRL tok/s, ours": text(c.throughput(c.verl_default), 0),
                "PAT tok/s, paper": f"{cell['pat_tok_s']:,.1f}" if "pat_tok_s" in cell else NONE,
                "PAT (paper) tok/s, ours": text(c.throughput("pat-paper"), 0),
                "gain vs VeRL, paper": f"{paper_gain:+.0f}%",
                "gain vs VeRL, ours": percent(gain),
                "difference, points": f"{gain.mean - paper_gain:+.1f}" if gain else NONE,
                "confidence": cell["confidence"],
            }
        )
    return rows


def gain_rows(comparisons: list[Comparison]) -> list[dict[str, str]]:
    """What each PAT gains, against VeRL's default, the best static layout and the oracle."""
    rows = []
    for c in comparisons:
        best = c.best_static
        row = {
            "cell": name_of(c),
            "batch": str(c.batch),
            "host term": c.host_term,
            "best static": best.removeprefix("static-") if best else NONE,
            "best static vs VeRL": percent(c.gain(best, c.verl_default)),
        }
        for arm, label in (("pat-paper", "PAT (paper)"), ("pat-planned", "PAT (planned)")):
            row[f"{label} vs VeRL"] = percent(c.gain(arm, c.verl_default))
            row[f"{label} vs best static"] = percent(c.gain(arm, best))
        share = c.share_of_oracle("pat-planned")
        row["oracle vs best static"] = percent(c.gain("oracle", best))
        row["PAT (planned) of oracle's gain"] = f"{100 * share:.0f}%" if share is not None else NONE
        rows.append(row)
    return rows


def throughput_rows(comparisons: list[Comparison]) -> list[dict[str, str]]:
    """Tokens/s of every arm, and of the physical limit."""
    arms = sorted({arm for c in comparisons for arm in c.rollout_s}, key=arm_order)
    rows = []
    for c in comparisons:
        row = {"cell": name_of(c), "batch": str(c.batch), "host term": c.host_term}
        statics = {f"TP{tp}": f"static-TP{tp}xDP{c.experiment.cluster.world // tp}" for tp in (1, 2, 4, 8)}
        row |= {label: text(c.throughput(arm), 0) for label, arm in statics.items()}
        row |= {arm: text(c.throughput(arm), 0) for arm in arms if not arm.startswith("static")}
        if c.limit_s is not None:
            tokens = next(iter(c.tokens_per_s.values())) * next(iter(c.rollout_s.values()))
            row["physical limit"] = text(interval(tokens / c.limit_s), 0)
        rows.append(row)
    return rows


def measured_rows(frame: pd.DataFrame) -> list[dict[str, str]]:
    """Rollouts of real SGLang on this machine, by arm: means over seeds with intervals."""
    rows = []
    for (experiment, batch), group in frame.groupby(["experiment", "batch"], sort=False):
        means = group.groupby("arm", sort=False).rollout_s.mean()
        statics = [arm for arm in means.index if arm.startswith("static-")]
        best = means[statics].idxmin() if statics else None
        for arm, runs in sorted(group.groupby("arm"), key=lambda pair: arm_order(pair[0])):
            base = group[group.arm == best].set_index("seed").rollout_s if best else None
            paired = runs.set_index("seed").rollout_s
            gains = 100 * (base / paired - 1).dropna() if best and arm != best else []
            rows.append(
                {
                    "experiment": experiment,
                    "batch": str(batch),
                    "arm": arm + (" (best static)" if arm == best else ""),
                    "rollouts": str(len(runs)),
                    "rollout, s": text(interval(runs.rollout_s), 2),
                    "tokens/s": text(interval(runs.tokens_per_s), 1),
                    "vs best static": percent(interval(gains) if len(gains) else None),
                    "decode step p50, ms": text(interval(runs.decode_p50_ms), 1),
                    "p90, ms": text(interval(runs.decode_p90_ms), 1),
                    "p99, ms": text(interval(runs.decode_p99_ms), 1),
                    "switches": f"{runs.switches.map(len).mean():.1f}",
                    "layouts, by seed": "; ".join(courses(runs)),
                }
            )
    return rows


def courses(runs: pd.DataFrame) -> list[str]:
    """The distinct courses of the layouts, in the order of the seeds: ``TP1xDP2 → TP2xDP1 (seeds 0, 1)``."""
    seeds: dict[str, list[str]] = {}
    for run in runs.sort_values("seed").itertuples():
        seeds.setdefault(" → ".join(layout for _, layout in run.layouts), []).append(str(run.seed))
    named = ((course, "seeds" if len(its) > 1 else "seed", its) for course, its in seeds.items())
    return [course if len(seeds) == 1 else f"{course} ({noun} {', '.join(its)})" for course, noun, its in named]


def trace_rows(traces: list[dict]) -> list[dict[str, str]]:
    """The length traces that the arms ran: one row a trace."""
    return [
        {
            "experiment": trace["experiment"],
            "batch": str(trace["batch"]),
            "seed": str(trace["seed"]),
            "sha256": trace["sha256"][:12],
            "mean": f"{trace['mean']:,.0f}",
            "median": f"{trace['median']:,.0f}",
            "p90": f"{trace['p90']:,.0f}",
            "p99": f"{trace['p99']:,.0f}",
            "share over 8K": f"{100 * trace['share_over_8192']:.1f}%",
            "share at the cap": f"{100 * trace['share_at_cap']:.1f}%",
        }
        for trace in traces
    ]


def error_summary(errors) -> dict[str, str]:
    """p50, p90 and mean of absolute errors, in percent."""
    known = np.abs(np.asarray(errors, dtype=float))
    known = known[~np.isnan(known)]
    if not known.size:
        return {"points": "0"} | dict.fromkeys(("p50", "p90", "mean"), NONE)
    p50, p90 = np.quantile(known, (0.5, 0.9))
    return {"points": str(known.size), "p50": share(p50), "p90": share(p90), "mean": share(known.mean())}


def share(value: float, sign: bool = False) -> str:
    return NONE if np.isnan(value) else f"{100 * value:{'+' if sign else ''}.1f}%"
