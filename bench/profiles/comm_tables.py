"""Communication times measured on real GPUs, read from aiconfigurator-core's tables.

``message_size`` counts elements, not bytes; latencies are milliseconds.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd


def newest(folder: Path, file: str) -> Path:
    """``file`` of the newest version below ``folder`` that has it."""
    found = list(folder.glob(f"*/{file}"))
    if not found:
        raise ValueError(f"no {file} below {folder.name}")
    return max(found, key=lambda path: [int(n) for n in re.findall(r"\d+", path.parent.name)])


def lookup_s(rows: pd.DataFrame, elements: np.ndarray | float) -> np.ndarray:
    """Seconds at ``elements``, linear between the rows' message sizes; beyond the last in proportion to the size."""
    rows = rows.groupby("message_size").latency.median()
    size, seconds = rows.index.to_numpy(dtype=float), rows.to_numpy() * 1e-3
    inside = np.interp(elements, size, seconds)
    return np.where(np.asarray(elements) > size[-1], seconds[-1] * np.asarray(elements) / size[-1], inside)


def logits_gather_s(root: Path, gpu: str, tp: int, elements: np.ndarray) -> np.ndarray:
    """All-gather of bf16 logits, ``elements`` [N] = batch x vocab, over TP ranks (NCCL); 0 at TP1."""
    if tp == 1:
        return np.zeros(np.shape(elements))
    table = pd.read_parquet(newest(root / gpu / "comm" / "nccl", "nccl_perf.parquet"))
    mine = (table.op_name == "all_gather") & (table.nccl_dtype == "half") & (table.num_gpus == tp)
    return lookup_s(table[mine], elements)


def allreduce_s(root: Path, gpu: str, tp: int, elements: np.ndarray | float, mode: str = "graph") -> np.ndarray:
    """One of SGLang's custom all-reduces of bf16 ``elements`` [N] over ``tp`` > 1 ranks; ``mode``: graph or eager."""
    table = pd.read_parquet(newest(root / gpu / "comm" / "sglang", "custom_allreduce_perf.parquet"))
    mine = (table.num_gpus == tp) & (table.kernel_source == f"SGLang_CustomAllReduce_{mode}")
    return lookup_s(table[mine], elements)


def allreduce_gap_s(root: Path, gpu: str, tp: int, elements: int) -> float:
    """What one of SGLang's custom all-reduces of bf16 ``elements`` takes longer without a CUDA graph; 0 at TP1."""
    if tp == 1:
        return 0.0
    eager, graph = (allreduce_s(root, gpu, tp, elements, mode) for mode in ("eager", "graph"))
    return float(max(0.0, eager - graph))
