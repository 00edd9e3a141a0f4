"""The same GPUs behind slower wires: from their own links (share 0) to PCIe without peer-to-peer (share 1)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.profiles import a40
from bench.profiles.aiconfigurator import data_root
from bench.profiles.comm_tables import allreduce_s, logits_gather_s
from bench.profiles.links import links_of
from pat.links import Links
from pat.model import ModelShape
from pat.profile import StepProfile, TpGrid


def between(own: np.ndarray | float, pcie: np.ndarray | float, share: float):
    """Geometric mean: half way is the same factor from either end."""
    return own ** (1.0 - share) * pcie**share


def slower_links(links: Links, share: float) -> Links:
    """Links inside a node between ``links`` and those of the A40's PCIe; between nodes as before."""
    pcie = links_of("a40")
    return replace(
        links,
        intra_node_bytes_per_s=between(links.intra_node_bytes_per_s, pcie.intra_node_bytes_per_s, share),
        latency_s=between(links.latency_s, pcie.latency_s, share),
        source=f"{links.source}; {share:.0%} of the way (geometric) to {pcie.source}",
    )


def slower_profile(profile: StepProfile, shape: ModelShape, gpu: str, share: float) -> StepProfile:
    """Step times of one of aiconfigurator's GPUs with its all-reduces and its all-gather of logits between its own,
    measured with SGLang, and those measured on A40 over PCIe. Both ends are measured, what lies between is not."""
    grids = {tp: slower_grid(grid, shape, gpu, share) if tp > 1 else grid for tp, grid in profile.grids.items()}
    return replace(profile, device=f"{profile.device}, wires {share:.2f} to PCIe", grids=grids)


def slower_grid(grid: TpGrid, shape: ModelShape, gpu: str, share: float) -> TpGrid:
    """One TP degree. Without a CUDA graph the gap to a graph's all-reduce shrinks as NCCL's, which has none, takes
    over."""

    def more_s(rows: np.ndarray) -> np.ndarray:
        """What the 2 x layers + 1 all-reduces of ``rows`` [N] tokens take longer."""
        elements = rows * shape.hidden
        own = allreduce_s(data_root(), gpu, grid.tp, elements)
        pcie = a40.all_reduce_s(grid.tp, elements * shape.dtype_bytes)
        return (2 * shape.layers + 1) * (between(own, pcie, share) - own)

    logits = grid.batches * shape.vocab
    own_gather = logits_gather_s(data_root(), gpu, grid.tp, logits)
    gather_s = between(own_gather, a40.gather_s(grid.tp, logits * shape.dtype_bytes), share) - own_gather
    return replace(
        grid,
        decode_s=grid.decode_s + (more_s(grid.batches) + gather_s)[:, None],
        prefill_s=grid.prefill_s + more_s(grid.prefill_tokens),
        eager_extra_s=grid.eager_extra_s * (1.0 - share),
    )
