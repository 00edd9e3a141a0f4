"""What the measured attention tables cover, for marking extrapolation."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from bench.profiles.comm_tables import newest
from bench.profiles.grid import CONTEXTS_TOKENS
from pat.model import ModelShape


def attention_coverage(root: Path, gpu: str, shape: ModelShape, tp: int) -> dict[str, int]:
    """``measured_batch``, ``measured_context_tokens``, ``measured_tokens`` (batch x context) of decode attention with a
    rank's heads: the greatest context at any batch (at most the grid's last: beyond it the grid extrapolates), the
    greatest product, and the greatest batch that reaches half of this product. All 0 where no such heads were measured:
    then every point is extrapolated."""
    table = pd.read_parquet(newest(root / gpu / "attention" / "sglang", "generation_attention_perf.parquet"))
    mine = (
        (table.num_heads == shape.heads // tp)
        & (table.num_key_value_heads == shape.kv_heads_per_rank(tp))
        & (table.head_dim == shape.head_dim)
        & (table.kv_cache_dtype == "bfloat16")
    )
    if "window_size" in table:
        mine &= table.window_size == 0
    rows = table[mine]
    if rows.empty:
        return {"measured_batch": 0, "measured_context_tokens": 0, "measured_tokens": 0}
    contexts = (rows.step + rows.isl).groupby(rows.batch_size).max()
    tokens = contexts * contexts.index
    return {
        "measured_batch": int(tokens.index[2 * tokens >= tokens.max()].max()),
        "measured_context_tokens": min(int(contexts.max()), CONTEXTS_TOKENS[-1]),
        "measured_tokens": int(tokens.max()),
    }
