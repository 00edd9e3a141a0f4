"""Knots of the profiles' grids."""

from __future__ import annotations

TPS = (1, 2, 4, 8)
LARGEST_BATCH = 4096
CONTEXTS_TOKENS = tuple(sorted({1, *(2**i for i in range(4, 16)), *(3 * 2**i for i in range(5, 14))}))
"""Mean contexts of decode steps: powers of two, where kernels were measured, and half way between them."""
PREFILL_TOKENS = CONTEXTS_TOKENS[1:]


def graph_buckets(largest: int) -> tuple[int, ...]:
    """Batches that SGLang 0.5.23 captures CUDA graphs for, up to ``largest``."""
    buckets = (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, largest + 1, 32))
    return tuple(b for b in buckets if b <= largest)


def grid_batches(largest: int) -> tuple[int, ...]:
    """Rows of a decode grid: every graph bucket, then steps of a sixteenth to an eighth up to LARGEST_BATCH."""
    rows = [*graph_buckets(largest)]
    while rows[-1] < LARGEST_BATCH:
        step = max(8, 1 << (rows[-1].bit_length() - 4))
        rows.append(min(LARGEST_BATCH, (rows[-1] // step + 1) * step))
    return tuple(rows)
