"""The answer of ``bench whatif`` as markdown and as JSON."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from bench.profiles.host_terms import host_term
from bench.provenance import provenance
from bench.report.assumptions import host_row
from bench.report.tables import NONE, markdown, percent
from bench.stats import Interval, interval
from bench.whatif import MINIMUM_GAIN_PERCENT, Answer, Hop

GB = 1e9


def as_markdown(answer: Answer) -> str:
    """Verdict first, then what it rests on."""
    parts = [
        f"# What if: {answer.shape.name} on {answer.question.gpus:,} x {answer.question.gpu}",
        verdict(answer),
        *(f"Note: {note}." for note in answer.notes),
        "## Rollout time (predicted)",
        markdown(time_rows(answer)),
        f"Mean of {len(answer.pat_s)} rollouts of {answer.question.batch:,} sequences "
        f"(mean {answer.tokens.mean() / answer.question.batch:,.0f} tokens), ± half a 95% interval. "
        f"The longest sequence alone, in the fastest layout: {interval(answer.limit_s).text(1)} s."
        + whole_or_part(answer),
        "## Best schedule of switches",
        schedule_text(answer),
        markdown(hop_rows(answer)) if answer.schedule.hops else "No switch is expected to pay.",
        "In the simulated rollouts, where PAT also learns from what has ended so far: " + paths(answer) + ".",
        "## Memory",
        markdown(memory_rows(answer)),
        "## What this rests on",
        "\n".join(f"- {line}" for line in basis(answer)),
    ]
    return "\n\n".join(parts)


def verdict(answer: Answer) -> str:
    """One paragraph: does it pay, against what, what to do."""
    best, verl = answer.best_static, answer.experiment.verl_default
    against_best, against_verl = answer.gain(best), answer.gain(verl)
    gains = f"{percent(against_best)} tokens/s over the best static layout, {best}"
    if verl != best:
        gains += f", and {percent(against_verl)} over {verl}"
        gains += " (VeRL's default)" if verl.tp == 2 else " (the lowest TP that fits)"
    elif verl.tp == 2:
        gains += " (VeRL's default)"
    if answer.pays:
        return f"**Adaptive TP pays off:** {gains}. Without it, use {best}."
    return (
        f"**Adaptive TP does not pay off here; use {best}.** PAT: {gains}; less than "
        f"{MINIMUM_GAIN_PERCENT:.0f}%, or no "
        "more than chance."
    )


def whole_or_part(answer: Answer) -> str:
    nodes = answer.experiment.cluster.nodes
    if answer.simulated_nodes == nodes:
        return ""
    return f" Simulated on the {answer.simulated_nodes} of {nodes} nodes that end last; sequences wait for KV memory."


def time_rows(answer: Answer) -> list[dict[str, str]]:
    best, speed = answer.best_static, answer.tokens_per_s
    rows = []
    for layout, seconds in answer.rollout_s.items():
        marks = ["best static"] * (layout == best) + ["VeRL's default"] * (layout.tp == 2)
        rows.append(
            {
                "arm": f"static {layout}" + (f" ({', '.join(marks)})" if marks else ""),
                "rollout, s": interval(seconds).text(1),
                "tokens/s": speed[layout].text(0),
                "PAT against it": percent(answer.gain(layout)),
            }
        )
    pat = {"arm": "PAT", "rollout, s": interval(answer.pat_s).text(1), "tokens/s": speed["pat"].text(0)}
    return [*rows, pat | {"PAT against it": NONE}]


def schedule_text(answer: Answer) -> str:
    plan = answer.schedule
    return (
        f"From the lengths of earlier rollouts alone: begin in {plan.first}; expected to end after "
        f"{plan.expected_s:,.1f} s."
    )


def hop_rows(answer: Answer) -> list[dict[str, str]]:
    return [
        {
            "at, s": f"{hop.at_s:,.1f}",
            "decode steps": f"{hop.decode_steps:,.0f}",
            "sequences running": f"{hop.alive:,.0f}",
            "switch to": str(hop.layout),
            "cost, s": f"{hop.cost_s:.2f}",
        }
        for hop in answer.schedule.hops
    ]


def paths(answer: Answer) -> str:
    """The layouts that the simulated rollouts went through, most frequent first."""
    found, counts = np.unique([" → ".join(path) for path in answer.pat_layouts], return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return "; ".join(f"{found[k]} ({counts[k]} of {counts.sum()})" for k in order)


def memory_rows(answer: Answer) -> list[dict[str, str]]:
    return [
        {
            "layout": str(fit.layout),
            "weights a GPU, GB": f"{fit.weight_bytes / GB:.1f}",
            "KV cache a GPU, GB": f"{fit.kv_bytes / GB:.1f}",
            "KV tokens a replica": f"{fit.kv_tokens:,}",
            "sequences a replica": f"{fit.sequences:,}",
            "of greatest length at once": f"{fit.at_cap:,}",
            "fits": f"no: {fit.why_not}"
            if fit.why_not
            else "yes"
            if fit.at_cap >= fit.sequences
            else "yes, some may wait",
        }
        for fit in answer.fits
    ]


def basis(answer: Answer) -> list[str]:
    source, host = answer.provenance, host_row(answer.question.host_term)
    lines = [
        f"step times: {source['source']}, plus {source['added']}",
        f"{host['what']}: {host['value']}",
        f"response lengths: {answer.question.lengths}, at most {answer.question.max_response_tokens:,} tokens; "
        f"prompts of "
        "about 134 tokens",
        f"switches between prepared seats: {answer.switch_source}",
    ]
    if answer.extrapolated:
        lines.append("some steps lie beyond the measured batch or context and are extrapolated")
    made = provenance()
    lines.append(f"`{made['command']}`, commit {made['commit']}")
    return lines


def as_json(answer: Answer) -> dict:
    """The same numbers, for programs. Seconds, tokens, bytes; gains in percent of tokens/s."""
    best, verl, speed = answer.best_static, answer.experiment.verl_default, answer.tokens_per_s
    term = host_term(answer.question.host_term)
    return {
        "question": asdict(answer.question),
        "nodes": answer.experiment.cluster.nodes,
        "simulated_nodes": answer.simulated_nodes,
        "model": asdict(answer.shape) | {"params": answer.shape.params, "weight_bytes": answer.shape.weight_bytes},
        "host_term": {"base_s": term.base_s, "per_sequence_s": term.per_sequence_s, "overlapped": term.overlapped},
        "tier": "predicted",
        "pays_off": answer.pays,
        "verdict": verdict(answer).replace("**", ""),
        "best_static": str(best),
        "static": {
            str(a): {"rollout_s": numbers(interval(s)), "tokens_per_s": numbers(speed[a])}
            for a, s in answer.rollout_s.items()
        },
        "pat": {
            "rollout_s": numbers(interval(answer.pat_s)),
            "tokens_per_s": numbers(speed["pat"]),
            "layouts": [list(path) for path in answer.pat_layouts],
        },
        "gain_percent": {"best_static": numbers(answer.gain(best)), "verl_default": numbers(answer.gain(verl))},
        "verl_default": str(verl),
        "schedule": {
            "first": str(answer.schedule.first),
            "expected_s": answer.schedule.expected_s,
            "switches": [hop_numbers(hop) for hop in answer.schedule.hops],
        },
        "physical_limit_s": numbers(interval(answer.limit_s)),
        "memory": [asdict(fit) | {"layout": str(fit.layout)} for fit in answer.fits],
        "extrapolated": answer.extrapolated,
        "notes": list(answer.notes),
        "provenance": provenance() | {"step_times": answer.provenance},
    }


def numbers(value: Interval) -> dict:
    """JSON knows no NaN: without an interval, null."""
    return {"mean": value.mean, "half_95": None if np.isnan(value.half) else value.half, "n": value.n}


def hop_numbers(hop: Hop) -> dict:
    return asdict(hop) | {"layout": str(hop.layout)}
