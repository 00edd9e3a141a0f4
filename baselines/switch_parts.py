"""Fixed parts of a switch in the predicted tier: the paper's, a naive restart's, and this project's seats."""

from __future__ import annotations

from collections.abc import Mapping

from pat.links import Links
from pat.switch_cost import SwitchParts


def paper_parts(overhead_s: Mapping, links: Links, paper_links: Links) -> SwitchParts:
    """The paper's light switch. ``overhead_s``: its table, measured on A40 (bench/data/paper.yaml).

    Weights are all-gathered layer by layer, so their time scales with the links; graphs and the unattributed rest do
    not. The KV part is left to the switch model.
    """
    named = ("process_restart", "kv_cache", "weights", "cuda_graph_recapture")
    rest = overhead_s["total"]["pat"] - sum(overhead_s[part]["pat"] for part in named)
    scale = paper_links.intra_node_bytes_per_s / links.intra_node_bytes_per_s
    return SwitchParts(
        "paper",
        pause_s=rest,
        groups_s=0.0,
        weights_s=overhead_s["weights"]["pat"] * scale,
        graphs_s=overhead_s["cuda_graph_recapture"]["pat"],
        resume_s=0.0,
        source="the paper's overhead table (second-hand), weights scaled by link speed",
    )


def restart_parts(overhead_s: Mapping) -> SwitchParts:
    """Stopping the engine and starting it in the new layout, by the paper's table. KV is then recomputed."""
    named = ("process_restart", "kv_cache", "weights", "cuda_graph_recapture")
    rest = overhead_s["total"]["naive"] - sum(overhead_s[part]["naive"] for part in named)
    return SwitchParts(
        "restart",
        pause_s=overhead_s["process_restart"]["naive"],
        groups_s=rest,
        weights_s=overhead_s["weights"]["naive"],
        graphs_s=overhead_s["cuda_graph_recapture"]["naive"],
        resume_s=0.0,
        source="the paper's overhead table (second-hand)",
    )


SEAT_PARTS = SwitchParts(
    "seats",
    pause_s=0.03,
    groups_s=0.0,
    weights_s=0.0,
    graphs_s=0.0,
    resume_s=0.02,
    source="assumed for GPUs: the prepared seats of this project switch in 0.02 - 0.11 s on a CPU, KV included; "
    "weights are views of shared storage and graphs stay captured, so nothing else remains",
)
