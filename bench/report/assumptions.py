"""What predicted numbers rest on, row by row with its source."""

from __future__ import annotations

from collections.abc import Iterable

from bench.experiment import Experiment
from bench.machine import machine_of
from bench.profiles.host_terms import host_term


def assumption_rows(experiments: Iterable[Experiment]) -> list[dict[str, str]]:
    """Host terms, links, step times and switches of the experiments, each once."""
    experiments = [e for e in experiments if e.host_terms]
    rows = [host_row(name) for name in dict.fromkeys(h for e in experiments for h in e.host_terms)]
    for experiment in {(e.cluster.gpu, e.model): e for e in experiments}.values():
        machine = machine_of(experiment, experiment.host_terms[0])
        gpu, links = experiment.cluster.gpu, machine.links
        where = machine.profile.provenance
        rows.append(row(f"step times, {experiment.model} on {gpu}", f"plus {where['added']}", where["source"]))
        inside, between = links.intra_node_bytes_per_s / 1e9, links.inter_node_bytes_per_s / 1e9
        rows.append(row(f"links, {gpu}", f"{inside:.1f} GB/s in a node, {between:.1f} between nodes", links.source))
        for name in ("paper", "restart", "seats"):
            parts = machine.parts(name)
            value = (
                f"{parts.fixed_s:.2f} s + KV cache (pause {parts.pause_s:.2f}, weights {parts.weights_s:.2f}, "
                f"graphs {parts.graphs_s:.2f})"
            )
            rows.append(row(f"switch, {name}, {gpu}", value, parts.source))
    return list({r["what"]: r for r in rows}.values())


def host_row(name: str) -> dict[str, str]:
    term = host_term(name)
    way = "overlapped with the GPU" if term.overlapped else "in series with the GPU"
    value = f"{1e3 * term.base_s:.2f} ms + {1e3 * term.per_sequence_s:.4f} ms a sequence and step, {way}"
    if term.broadcast_s:
        value += f"; {1e3 * term.broadcast_s:.2f} ms more where TP > 1"
    return row(f"host term {name}", value, term.source)


def row(what: str, value: str, source: str) -> dict[str, str]:
    return {"what": what, "value": value, "source": source}
