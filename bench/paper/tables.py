"""The tables of paper.md: pure functions from evidence to rows of text."""

from __future__ import annotations

import numpy as np

from bench.experiment import load_experiment
from bench.machine import machine_of
from bench.paper.evidence import HOSTS, Evidence
from bench.paper.memory import layers_together, peak_bytes, seat_memory
from bench.paper.setting import AS_IS, BATCH
from bench.paper.studies import KNOBS, LARGE, all_cells, paper_cell, paper_cells
from bench.profiles.host_terms import PAPER_ERA
from bench.report.tables import NONE, percent, text
from bench.stats import interval
from bench.tiny_models import PRESETS
from pat.layout import Layout
from pat.model import ModelShape

Row = dict[str, str]


def cell_rows(e: Evidence) -> list[Row]:
    """The grid: every cell under both host terms."""
    rows = []
    for (cell, host), c in e.comparisons.items():
        row = {"cell": cell + (" *" if c.extrapolated else ""), "host term": host}
        row["VeRL default"] = text(c.throughput(c.verl_default), 0)
        row["best static"] = c.best_static.removeprefix("static-") + " " + text(c.throughput(c.best_static), 0)
        for arm, label in (("pat-paper", "PAT (paper)"), ("pat-planned", "PAT (planned)"), ("oracle", "oracle")):
            row[label] = text(c.throughput(arm), 0)
        for arm, label in (("pat-paper", "PAT (paper)"), ("pat-planned", "PAT (planned)")):
            less = e.reduction(cell, host, arm)
            row[f"{label}: less time"] = f"{less:.1f}%" if less is not None else NONE
            row[f"{label} vs best static"] = percent(c.gain(arm, c.best_static))
        rows.append(row)
    return rows


def swap_rows(e: Evidence, cell: str) -> list[Row]:
    """The paper's figures, ours as it stands, and under every swap, with the share of the gap in the gain it closes."""
    paper = paper_cell(cell)
    wanted = 100 * (paper["speedup"] - 1)
    base = e.gain("swap", cell, AS_IS)
    first = {
        "swap": "*the paper*",
        "VeRL tok/s": f"{paper['baseline_tok_s']:,.1f}" if "baseline_tok_s" in paper else NONE,
        "PAT tok/s": f"{paper['pat_tok_s']:,.1f}" if "pat_tok_s" in paper else NONE,
        "gain": f"{wanted:+.1f}%",
        "off, points": "",
        "closed": "",
    }
    rows = [first]
    for change in e.changes("swap", cell):
        rates = {a: e.values("swap", cell, change, a, "tokens_per_s") for a in ("verl", "pat")}
        gain = interval(100 * (rates["pat"] / rates["verl"] - 1))
        closed = 100 * (1 - abs(gain.mean - wanted) / max(abs(base - wanted), 1e-9))
        rows.append(
            {
                "swap": change,
                "VeRL tok/s": text(interval(rates["verl"]), 0),
                "PAT tok/s": text(interval(rates["pat"]), 0),
                "gain": percent(gain),
                "off, points": f"{gain.mean - wanted:+.1f}",
                "closed": "" if change == AS_IS or closed <= 0 else f"{closed:.0f}%",
            }
        )
    return rows


def calibrated_rows(e: Evidence) -> list[Row]:
    rows = []
    for cell in paper_cells():
        paper = paper_cell(cell)
        if "baseline_tok_s" not in paper:
            continue
        for knob in KNOBS:
            if not len(rates := e.values("calibrated", cell, knob, "pat", "tokens_per_s")):
                rows.append({"cell": cell, "calibrated": f"{knob}: no value meets it"})
                continue
            verl = e.values("calibrated", cell, knob, "verl", "tokens_per_s")
            value = e.values("calibrated", cell, knob, "pat", "knob")[0]
            how = f"{value:+.2f} ms" if "base" in knob else f"x {value:.2f}"
            rows.append(
                {
                    "cell": cell,
                    "calibrated": f"{knob} {how}",
                    "VeRL tok/s (fitted)": f"{verl.mean():,.0f}",
                    "PAT tok/s, predicted": text(interval(rates), 0),
                    "PAT tok/s, paper": f"{paper['pat_tok_s']:,.1f}",
                    "off": f"{100 * (rates.mean() / paper['pat_tok_s'] - 1):+.1f}%",
                    "gain, predicted": percent(interval(100 * (rates / verl - 1))),
                    "gain, paper": f"{100 * (paper['speedup'] - 1):+.0f}%",
                }
            )
    return rows


def fit_rows(e: Evidence) -> list[Row]:
    """Every cell under every fit, 128 sequences."""
    rows = []
    for cell in all_cells():
        default = f"static-{load_experiment(cell).verl_default}"
        row = {"cell": cell}
        for name in PAPER_ERA:
            verl, pat = (e.values("fit", cell, name, arm, "tokens_per_s") for arm in (default, "pat"))
            arms = {o.arm for o in e.of_study("fit", cell, name) if o.arm.startswith("static-")}
            times = {arm: e.values("fit", cell, name, arm, "rollout_s").mean() for arm in arms}
            best = min(times, key=times.get)
            row[name] = (
                f"{verl.mean():,.0f} → {pat.mean():,.0f}: {100 * (pat / verl - 1).mean():+.1f}%; best "
                f"{best.removeprefix('static-').partition('x')[0]}"
            )
        rows.append(row)
    return rows


def iteration_rows(e: Evidence) -> list[Row]:
    rows, host = [], HOSTS[0]
    for cell in e.cells:
        verl, pat = (e.iteration(cell, host, arm) for arm in ("verl", "pat-paper"))

        def mean(name: str, phases=verl) -> str:
            return f"{np.mean([getattr(p, name) for p in phases]):,.1f}"

        rows.append(
            {
                "cell": cell,
                "generation, VeRL": mean("gen"),
                "PAT (paper)": mean("gen", pat),
                "old log-prob": mean("old_log_prob"),
                "reference": mean("ref"),
                "update": mean("update_actor"),
                "weight sync": mean("update_weights"),
                "iteration, VeRL": mean("step"),
                "share of generation": f"{100 * np.mean([p.gen_share for p in verl]):.1f}%",
                "iteration, less": f"{e.iteration_reduction(cell, host):.1f}%",
                "planned": f"{e.iteration_reduction(cell, host, 'pat-planned'):.1f}%",
                "less, sglang-0.5": f"{e.iteration_reduction(cell, HOSTS[1]):.1f}%",
            }
        )
    return rows


def memory_rows(e: Evidence) -> list[Row]:
    """Formula for the paper's models beside its figures; formula and measurement for the model measured on CPU."""
    paper, rows = e.paper["memory_gb"], []
    for cell in (c for c in paper_cells() if e.switched_tokens(c)):
        experiment = load_experiment(cell)
        shape, world = machine_of(experiment, HOSTS[0]).shape, experiment.cluster.world
        tokens, old, new = max(e.switched_tokens(cell), key=lambda move: move[0])
        node = experiment.cluster.gpus_per_node
        all_seats = tuple(Layout.of(tp, world) for tp in (2, 4, 8) if tp <= node)
        for seats in {(old, new): None, all_seats: None}:
            steady = seat_memory(shape, seats)
            rows.append(
                {
                    "what": f"{cell}, seats {', '.join(map(str, seats))}",
                    "steady, ours": f"{steady.total_bytes / 1e9:.2f} GB ({steady.copied_bytes / 1e9:.2f} copies)",
                    "steady, paper": f"{paper['steady_extra']['pat']} GB",
                    "peak, ours": f"{peak_bytes(shape, tokens, world) / 1e9:.2f} GB",
                    "peak, paper": f"{paper['peak_extra']['pat']} GB",
                    "all layers at once, ours": f"{peak_bytes(shape, tokens, world, shape.layers) / 1e9:.2f} GB",
                    "full migration, paper": f"{paper['peak_extra']['full_migration']} GB",
                    "tier": "predicted (formula)",
                }
            )
    return rows + measured_memory(e)


def measured_memory(e: Evidence) -> list[Row]:
    if not e.switch:
        return []
    shape, found = tiny_shape(e.switch["model"]), e.switch
    copied = found["seats_bytes"]["TP2"][1]
    formula = seat_memory(shape, (Layout(1, 2), Layout(2, 1))).copied_bytes
    measured, expected = [], []
    for s in (s for s in found["switches"] if s["migrated"]):
        tokens = (s["kv_wire_bytes"] + s["kv_local_bytes"]) // shape.kv_bytes_per_token()
        measured.append(s["peak_extra_bytes"] / 1e6)
        expected.append(peak_bytes(shape, tokens, 2, layers_together(shape, tokens), copies=1) / 1e6)
    ratio = np.array(measured) / np.array(expected)
    return [
        {
            "what": f"{found['model']} on CPU, seats TP1xDP2, TP2xDP1",
            "steady, ours": f"{copied / 1e6:.2f} MB copies measured, {formula / 1e6:.2f} MB by formula",
            "steady, paper": NONE,
            "peak, ours": f"{np.median(measured):.2f} MB measured, {np.median(expected):.2f} MB by formula "
            f"(ratio {ratio.min():.2f} to {ratio.max():.2f})",
            "peak, paper": NONE,
            "all layers at once, ours": NONE,
            "full migration, paper": NONE,
            "tier": f"measured, {len(measured)} switches",
        }
    ]


def tiny_shape(name: str) -> ModelShape:
    """Shape of a model of bench/tiny_models.py, fp32."""
    spec = PRESETS[name]
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[spec.architecture]
    sizes = (spec.layers, spec.hidden, spec.intermediate, spec.heads, spec.kv_heads, spec.hidden // spec.heads)
    return ModelShape(name, architecture, *sizes, spec.vocab, spec.tied, 4)


GIVES_UP = {
    "static": ("yes", "nothing"),
    "longest first, lengths known": ("yes", "needs lengths that nobody knows"),
    "longest first, by the prompt": ("yes", "nothing; needs an earlier epoch"),
    "partial rollout": ("no", "stale tokens {stale_token_share}"),
    "over-provisioned": ("changes the data", "wastes {wasted_token_share}; responses {mean_length_ratio} as long"),
}


def cure_rows(e: Evidence) -> list[Row]:
    rows = []
    for cell in paper_cells():
        for batch in (BATCH, LARGE):
            change = str(batch)
            arms = list(dict.fromkeys(o.arm for o in e.of_study("cures", cell, change)))
            if not arms:
                continue
            base = e.values("cures", cell, change, "static, default", "rollout_s")
            best = e.values("cures", cell, change, "static, best", "rollout_s")
            for arm in arms:
                cure, _, layout = arm.rpartition(", ")
                times = e.values("cures", cell, change, arm, "rollout_s")
                keys = ("stale_token_share", "wasted_token_share", "mean_length_ratio")
                shares = {k: f"{100 * e.values('cures', cell, change, arm, k).mean():.0f}%" for k in keys}
                on_policy, price = GIVES_UP[cure]
                tp = int(e.values("cures", cell, change, arm, "tp")[0])
                rows.append(
                    {
                        "cell": cell,
                        "batch": f"{batch:,}",
                        "cure": cure,
                        "layout": f"TP{tp} ({layout})",
                        "rollout, s": text(interval(times), 1),
                        "vs VeRL default": percent(interval(100 * (base / times - 1))),
                        "vs best static": percent(interval(100 * (best / times - 1))),
                        "on-policy": on_policy,
                        "gives up": price.format(**shares),
                    }
                )
            if batch == BATCH:
                rows += pat_rows(e, cell)
    return rows


def pat_rows(e: Evidence, cell: str) -> list[Row]:
    c = e.comparisons[cell, HOSTS[0]]
    return [
        {
            "cell": cell,
            "batch": f"{BATCH:,}",
            "cure": label,
            "layout": "adaptive",
            "rollout, s": text(interval(c.rollout_s[arm]), 1),
            "vs VeRL default": percent(c.gain(arm, c.verl_default)),
            "vs best static": percent(c.gain(arm, c.best_static)),
            "on-policy": "yes",
            "gives up": "nothing",
        }
        for arm, label in (("pat-paper", "PAT (paper)"), ("pat-planned", "PAT (planned)"))
    ]


def mixed_rows(e: Evidence) -> list[Row]:
    rows = []
    for cell in paper_cells():
        base, best = (e.values("cures", cell, str(BATCH), f"static, {x}", "rollout_s") for x in ("default", "best"))
        for arm in dict.fromkeys(o.arm for o in e.of_study("mixed", cell)):
            times = e.values("mixed", cell, "", arm, "rollout_s")
            mix, _, how = arm.rpartition(", ")
            rows.append(
                {
                    "cell": cell,
                    "mix": mix,
                    "longest chosen": how,
                    "in the wide half": f"{e.values('mixed', cell, '', arm, 'count').mean():.0f}",
                    "rollout, s": text(interval(times), 1),
                    "vs VeRL default": percent(interval(100 * (base / times - 1))),
                    "vs best static": percent(interval(100 * (best / times - 1))),
                }
            )
    return rows


def limit_rows(e: Evidence) -> list[Row]:
    """Every arm of the paper's cells, 128 sequences: records under both host terms, cures and mixes under the first."""
    rows = []
    for cell in paper_cells():
        for host in HOSTS:
            c = e.comparisons[cell, host]
            times = {arm.removeprefix("static-").partition("x")[0]: s / c.limit_s for arm, s in c.rollout_s.items()}
            row = {"cell": cell, "host term": host, "limit, s": text(interval(c.limit_s), 1)}
            wanted = ("TP1", "TP2", "TP4", "TP8", "pat-paper", "pat-planned", "oracle")
            row |= {name: f"{times[name].mean():.2f}" if name in times else NONE for name in wanted}
            mine = host == HOSTS[0]
            for cure in GIVES_UP:
                if cure != "static":
                    row[cure] = ratio(e, "cures", cell, str(BATCH), [f"{cure}, best"]) if mine else NONE
            for how in ("lengths known", "by the prompt"):
                mixes = list(dict.fromkeys(o.arm for o in e.of_study("mixed", cell) if o.arm.endswith(how)))
                row[f"best mix, {how}"] = ratio(e, "mixed", cell, "", mixes) if mine else NONE
            rows.append(row)
    return rows


def ratio(e: Evidence, study: str, cell: str, change: str, arms: list[str]) -> str:
    """Least mean of rollout time / limit over the arms."""
    means = [
        (e.values(study, cell, change, a, "rollout_s") / e.values(study, cell, change, a, "limit_s")).mean()
        for a in arms
    ]
    return f"{min(means):.2f}" if means else NONE
