"""Link speeds of the GPUs that cells name, for moving KV cache and weights."""

from __future__ import annotations

from pat.links import Links

NETWORK_EFFICIENCY = 0.8
"""Share of a network adapter's line rate that NCCL reaches for large messages; assumed, no table measures it here."""
COPY_EFFICIENCY = 0.8
"""Share of the memory bandwidth that copies reach (aiconfigurator's ``mem_bw_empirical_scaling_factor``)."""


def measured(alltoall_gb_s: float, adapter_gb_s: float, memory_gb_s: float, latency_us: float, version: str) -> Links:
    """Links from aiconfigurator-core 0.12.0.

    alltoall_gb_s   NCCL all-to-all of 8 GPUs, largest message: what one GPU sends to the 7 others / time =
                    message_size x 2 bytes (the column counts elements of ``half``) x 7/8 / latency
    adapter_gb_s    network adapter a GPU, one direction (``inter_node_bw``), reduced by NETWORK_EFFICIENCY
    memory_gb_s     ``mem_bw``; a copy reads and writes each byte, so it takes two of them
    latency_us      NCCL all-to-all of 8 GPUs, smallest message
    """
    return Links(
        intra_node_bytes_per_s=alltoall_gb_s * 1e9,
        inter_node_bytes_per_s=min(adapter_gb_s * NETWORK_EFFICIENCY, alltoall_gb_s) * 1e9,
        latency_s=latency_us * 1e-6,
        local_copy_bytes_per_s=memory_gb_s * COPY_EFFICIENCY / 2 * 1e9,
        source=f"aiconfigurator-core 0.12.0: NCCL {version} all-to-all of 8 GPUs; "
        f"between nodes {NETWORK_EFFICIENCY:.0%} of a {8 * adapter_gb_s:.0f} Gb/s adapter",
    )


LINKS = {
    "h100_sxm": measured(317.3, 50, 3350, 7.9, "2.27.3"),
    "h200_sxm": measured(311.1, 50, 4800, 11.6, "2.29.2"),
    "a100_sxm": measured(203.1, 25, 2039, 15.8, "2.27.3"),
    "l40s": measured(1.97, 50, 864, 12.0, "2.27.3"),
    "a40": Links(
        intra_node_bytes_per_s=4.1e9,
        inter_node_bytes_per_s=2.5e9,
        latency_s=21e-6,
        local_copy_bytes_per_s=696e9 * COPY_EFFICIENCY / 2,
        source="vidur's send_recv on A40 (PCIe 4.0 without peer-to-peer), largest messages",
    ),
}


def links_of(gpu: str) -> Links:
    """By the GPU's name in experiments; ValueError lists the known ones."""
    if gpu not in LINKS:
        raise ValueError(f"no link speeds of gpu {gpu!r}; known ones: {', '.join(LINKS)}")
    return LINKS[gpu]
