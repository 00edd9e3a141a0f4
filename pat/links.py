"""Link speeds between GPUs, for moving KV cache and weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes per second that one GPU reaches in one direction while its peers transfer too."""

    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    latency_s: float
    local_copy_bytes_per_s: float
    source: str = ""
