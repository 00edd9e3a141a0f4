"""Knots of the profiles' grids, so that linear interpolation between them costs little (tests hold it below 1%)."""

from __future__ import annotations

from pat.model import ModelShape

TPS = (1, 2, 4, 8)
LARGEST_BATCH = 4096
TILE_EDGES = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 384, *range(512, 32769, 256))
"""Rows of a GEMM above which its measured time jumps: one more tile. The tables hold each edge and the row after."""


def octaves(first: int, end: int, parts: int) -> tuple[int, ...]:
    """``parts`` evenly spaced integers in each octave from 2**first up to, without, 2**end."""
    return tuple((parts + k) * 2**i // parts for i in range(first, end) for k in range(parts))


CONTEXTS_TOKENS = (*octaves(0, 6, 1), *octaves(6, 10, 2), *octaves(10, 12, 4), *octaves(12, 15, 8), 32768)
"""Mean contexts of decode steps. Kernels were measured at powers of two, each batch up to a context of its own; the
package's answers bend where that ends, which takes eight knots an octave above 4096."""


def tps_of(shape: ModelShape) -> tuple[int, ...]:
    """Degrees of TPS that divide the model's heads."""
    return tuple(tp for tp in TPS if shape.heads % tp == 0 and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0))


def graph_buckets(largest: int) -> tuple[int, ...]:
    """Batches that SGLang 0.5.23 captures CUDA graphs for, up to ``largest``."""
    buckets = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, largest + 1, 32))
    return tuple(b for b in buckets if b <= largest)


def with_edges(knots: tuple[int, ...], smallest: int, largest: int) -> tuple[int, ...]:
    """``knots`` and both sides of every tile edge from ``smallest`` to ``largest``, ascending."""
    edges = {side for edge in TILE_EDGES for side in (edge, edge + 1) if smallest <= side <= largest}
    return tuple(sorted({*knots, *edges}))


def grid_batches(largest_graph: int) -> tuple[int, ...]:
    """Rows of a decode grid: every graph bucket, then the tile edges up to LARGEST_BATCH."""
    return with_edges(graph_buckets(largest_graph), largest_graph + 1, LARGEST_BATCH)


PREFILL_TOKENS = with_edges((1, 2, 4, 8, 12), TILE_EDGES[0], TILE_EDGES[-1])
