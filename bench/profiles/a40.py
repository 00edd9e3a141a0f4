"""Step profile of the A40: roofline of its GEMMs and attention, with the measured all-reduce of a PCIe node."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from bench.gpus import gpu
from bench.launch_plan import graph_batch
from bench.profiles.grid import CONTEXTS_TOKENS, PREFILL_TOKENS, graph_buckets, grid_batches, tps_of
from bench.profiles.sampling import sampling_s
from pat.model import ModelShape
from pat.profile import StepProfile, TpGrid

ALL_REDUCE = Path(__file__).parents[1] / "data" / "vidur-a40" / "all_reduce.csv"
BYTES_PER_S = 555e9
"""What decode kernels reach of the A40's 696 GB/s (80%; measured in decode GEMMs)."""
GEMM_FLOPS = 0.65 * 149.7e12
"""Dense bf16 peak, derated to what large GEMMs reach under the board's 300 W (assumed)."""
ATTENTION_FLOPS = 0.5 * 149.7e12
"""The same for attention of a prefill (assumed)."""
KERNEL_S = 3e-6
"""Least time of a kernel (aiconfigurator's ``mem_empirical_constant_latency``)."""


def profile(shape: ModelShape) -> StepProfile:
    """Profile without host term, for every TP degree of a node that divides the model. Cheap: computed, not cached."""
    provenance = {
        "tier": "predicted",
        "source": "roofline + measured all-reduce",
        "added": "sampling step (memory-bound passes, all-gather of logits)",
    }
    return StepProfile(shape.name, "a40", {tp: grid(shape, tp) for tp in tps_of(shape)}, provenance=provenance)


def grid(shape: ModelShape, tp: int) -> TpGrid:
    """Grid of one TP degree. NCCL's all-reduce costs the same in a CUDA graph, so there is no eager extra.

    Nothing but the all-reduce is measured: every point counts as extrapolated.
    """
    largest = graph_batch(gpu("a40").memory_bytes, tp)
    batch, contexts, tokens = (np.array(k) for k in (grid_batches(largest), CONTEXTS_TOKENS, PREFILL_TOKENS))
    vocabulary = gemm_s(batch, shape.hidden, -(-shape.vocab // tp), shape.dtype_bytes)
    sampler_s = sampling_s(batch, shape.vocab, BYTES_PER_S) + gather_s(tp, batch * shape.vocab * shape.dtype_bytes)
    fixed_s = layers_s(shape, tp, batch) + vocabulary + sampler_s
    kv_s = np.outer(batch, contexts) * shape.kv_bytes_per_token(tp) / BYTES_PER_S + shape.layers * KERNEL_S
    last_s = gemm_s(np.ones(1), shape.hidden, -(-shape.vocab // tp), shape.dtype_bytes) + sampler_s[0]
    prefill_s = layers_s(shape, tp, tokens) + prefill_attention_s(shape, tp, tokens) + last_s
    return TpGrid(
        tp,
        batch,
        contexts,
        fixed_s[:, None] + kv_s,
        tokens,
        prefill_s,
        graph_batches=graph_buckets(largest),
        measured_batch=0,
        measured_context_tokens=0,
        measured_tokens=0,
    )


def gemm_s(rows: np.ndarray, k: int, n: int, dtype_bytes: int) -> np.ndarray:
    """Seconds of [rows, k] x [k, n]: the longer of moving weights and activations, and computing 2 x rows x k x n."""
    moved = (k * n + rows * (k + n)) * dtype_bytes
    return np.maximum(moved / BYTES_PER_S, 2.0 * rows * k * n / GEMM_FLOPS) + KERNEL_S


def layers_s(shape: ModelShape, tp: int, rows: np.ndarray) -> np.ndarray:
    """All layers without attention, for ``rows`` [N] tokens: four GEMMs, the kernels between them (two norms, rope,
    activation; each moves a row about twice), two all-reduces; and the embedding with its all-reduce."""
    hidden, size = shape.hidden, shape.dtype_bytes
    heads, kv_heads = shape.heads // tp, shape.kv_heads_per_rank(tp)
    sizes = (
        (hidden, (heads + 2 * kv_heads) * shape.head_dim),
        (heads * shape.head_dim, hidden),
        (hidden, 2 * shape.intermediate // tp),
        (shape.intermediate // tp, hidden),
    )
    gemms = sum(gemm_s(rows, k, n, size) for k, n in sizes)
    between = 4 * KERNEL_S + rows * (8 * hidden + 3 * shape.intermediate // tp) * size / BYTES_PER_S
    return shape.layers * (gemms + between) + (2 * shape.layers + 1) * all_reduce_s(tp, rows * hidden * size)


def prefill_attention_s(shape: ModelShape, tp: int, tokens: np.ndarray) -> np.ndarray:
    """Causal attention of one prompt of ``tokens`` [N]: 2 products x 2 flops x tokens^2 / 2 x heads x head_dim."""
    flops = 2.0 * np.asarray(tokens, dtype=float) ** 2 * (shape.heads // tp) * shape.head_dim
    return shape.layers * (flops / ATTENTION_FLOPS + KERNEL_S)


def all_reduce_s(tp: int, message_bytes: np.ndarray) -> np.ndarray:
    """Seconds of an all-reduce inside a node, linear between the measured sizes; beyond, in proportion to the size."""
    if tp == 1:
        return np.zeros(np.shape(message_bytes))
    with ALL_REDUCE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["num_workers"]) == tp]
    size = np.array([float(row["bytes"]) for row in rows])
    seconds = np.array([float(row["median_ms"]) for row in rows]) * 1e-3
    return np.interp(message_bytes, size, seconds) * np.maximum(1.0, np.asarray(message_bytes) / size[-1])


def gather_s(tp: int, message_bytes: np.ndarray) -> np.ndarray:
    """Seconds of an all-gather to ``message_bytes``: half an all-reduce (a reduce-scatter, then an all-gather)."""
    return all_reduce_s(tp, message_bytes) / 2
