"""Memory that switching takes on a GPU beyond a static engine's: by formula, for any model and set of seats."""

from __future__ import annotations

from dataclasses import dataclass

from bench.gpus import MIB
from pat.layout import Layout
from pat.model import ModelShape
from pat.sglang.settings import Settings


def fused_bytes(shape: ModelShape, tp: int, merged: bool) -> int:
    """Bytes on one rank of the tensors that SGLang fuses: Q, K and V, and with ``merged`` gate and up."""
    qkv = shape.hidden * shape.head_dim * (shape.heads // tp + 2 * shape.kv_heads_per_rank(tp))
    gate_up = 2 * shape.hidden * shape.intermediate // tp if merged else 0
    return shape.layers * (qkv + gate_up) * shape.dtype_bytes


@dataclass(frozen=True, slots=True)
class SeatMemory:
    """Steady extra bytes of the seats beyond the first, on one rank.

    copied_bytes      fused tensors whose slices do not adjoin (pat/sglang/weights.py); all else is views
    workspace_bytes   CUDA graphs and communicators of each such seat, by SGLang's reserve: 128 MiB x tp + 2 MiB x
                      largest graph
    """

    copied_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.copied_bytes + self.workspace_bytes


def seat_memory(
    shape: ModelShape,
    seats: tuple[Layout, ...],
    merged: bool | None = None,
    graph_batch: int = Settings.tail_graph_batch,
) -> SeatMemory:
    """Of ``seats``, the first of which is the static engine. ``merged``: gate and up are copied too; None: where all
    copies then stay within the live switch's share of the first seat's weights (Settings.copied_share)."""
    first, others = seats[0], seats[1:]
    all_fused = sum(fused_bytes(shape, a.tp, True) for a in others)
    if merged is None:
        merged = all_fused <= Settings.copied_share * shape.weight_bytes / first.tp
    copied = sum(fused_bytes(shape, a.tp, merged) for a in others)
    return SeatMemory(copied, int(sum(128 * a.tp + 2 * graph_batch for a in others) * MIB))


def layers_together(shape: ModelShape, kv_tokens: int, staging_bytes: int = Settings.staging_bytes) -> int:
    """Layers of KV cache that one exchange takes (pat/sglang/kv_pool.py, KvMove.run)."""
    layer_bytes = kv_tokens * shape.kv_bytes_per_token() // shape.layers
    return min(shape.layers, max(1, staging_bytes // (2 * max(1, layer_bytes))))


def peak_bytes(shape: ModelShape, kv_tokens: int, world: int, layers: int | None = None, copies: int = 2) -> int:
    """What the exchange of ``kv_tokens`` of KV cache takes on a rank beside the pools, evenly spread: one group of
    ``layers`` going out and (``copies`` 2, an all-to-all) as much coming in; through shared memory 1."""
    layers = layers or layers_together(shape, kv_tokens)
    return copies * kv_tokens * shape.kv_bytes_per_token() // shape.layers * layers // world
