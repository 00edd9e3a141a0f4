"""Launch plan (dry run): what a measured run of a cell would start on each node, and whether it fits the GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bench.backends.engine_arguments import engine_arguments
from bench.gpus import MIB, Gpu
from pat.layout import Layout
from pat.model import ModelShape

CONTEXT_BYTES = 512 * MIB
"""CUDA context and NCCL buffers of a process, outside SGLang's accounting (typical; 0.4 to 0.6 GiB on these GPUs)."""


class LaunchError(ValueError):
    """A layout cannot run on these GPUs; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a world rank lives and what it serves. ``gpu`` counts inside its node."""

    rank: int
    node: int
    gpu: int
    replica: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one GPU. ``kv_tokens``: what the replica's ranks hold together, each its share of the heads."""

    total_bytes: int
    context_bytes: int
    weight_bytes: int
    reserve_bytes: int
    kv_bytes: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """One layout of a cell. ``engines``: arguments of ``sgl.Engine`` for each node, which has an engine of its own
    (TP stays inside a node; sequences are dealt out to the nodes by the harness)."""

    layout: Layout
    engines: tuple[dict, ...]
    placement: tuple[Placement, ...]
    memory: Memory
    longest_tokens: int

    @property
    def sequences_at_cap(self) -> int:
        """Sequences of the greatest length that a replica's KV cache holds at once; more are retracted and wait."""
        return self.memory.kv_tokens // self.longest_tokens


def rank_weight_bytes(shape: ModelShape, tp: int) -> int:
    """Weights of one rank: projections, MLP and vocabulary divided by tp, KV heads replicated where tp exceeds them,
    norms and biases whole. At tp=1 it is ``shape.weight_bytes``."""
    vocabulary = -(-shape.vocab // tp) * shape.hidden * (1 if shape.tied_embeddings else 2)
    query_output = 2 * shape.hidden * shape.heads * shape.head_dim // tp
    key_value = 2 * shape.hidden * shape.kv_heads_per_rank(tp) * shape.head_dim
    small = shape.attention_params - 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    layer = query_output + key_value + small + shape.mlp_params // tp + 2 * shape.hidden
    return (vocabulary + shape.layers * layer + shape.hidden) * shape.dtype_bytes


def chunked_prefill_tokens(memory_bytes: int) -> int:
    """SGLang's default prefill chunk by GPU memory (0.5.23, arg_groups/memory_hook.py)."""
    return 2048 if memory_bytes < 20 << 30 else 4096 if memory_bytes < 60 << 30 else 8192


def graph_batch(memory_bytes: int, tp: int, running: int | None = None) -> int:
    """Largest batch with a CUDA graph: SGLang's default by GPU memory and tp, at most the running sequences."""
    small, large = (8, 8) if memory_bytes < 20 << 30 else (48, 160) if memory_bytes < 35 << 30 else (32, 160)
    if memory_bytes >= 60 << 30:
        small, large = 256, 512
    default = small if tp < 4 else large
    return default if running is None else min(default, running)


def reserve_bytes(memory_bytes: int, tp: int, running: int | None = None) -> int:
    """Activations and CUDA graphs that SGLang keeps free of weights and KV cache (0.5.23, arg_groups/memory_hook.py):
    512 MiB + 1.5 MiB a token of a prefill chunk + 128 MiB x tp + 2 MiB x largest graph, and at least 10 GiB on GPUs of
    more than 60 GiB. Graphs of prefill and post-capture sizing, newer than the paper, are left out."""
    mib = 512 + 1.5 * chunked_prefill_tokens(memory_bytes) + 128 * tp + 2 * graph_batch(memory_bytes, tp, running)
    return int(max(mib, 10 * 1024 if memory_bytes > 60 << 30 else 0) * MIB)


def gpu_memory(shape: ModelShape, gpu: Gpu, tp: int, running: int | None = None) -> Memory:
    """Memory of one GPU under TP degree ``tp``; ``kv_bytes`` is below 0 where the weights do not fit.

    kv_tokens = (memory - context - weights - reserve) / bytes of one token's KV on one rank.
    """
    weights, reserve = rank_weight_bytes(shape, tp), reserve_bytes(gpu.memory_bytes, tp, running)
    room = gpu.memory_bytes - CONTEXT_BYTES - weights - reserve
    return Memory(gpu.memory_bytes, CONTEXT_BYTES, weights, reserve, room, max(0, room // shape.kv_bytes_per_token(tp)))


def kv_capacity_tokens(shape: ModelShape, gpu: Gpu, tp: int) -> int:
    """Tokens that the KV cache of one replica holds; 0 where the weights leave no room."""
    return gpu_memory(shape, gpu, tp).kv_tokens


def placements(layout: Layout, gpus_per_node: int) -> tuple[Placement, ...]:
    """Every world rank of a layout, by the nested map of :class:`pat.layout.Layout`."""
    node = min(gpus_per_node, layout.world)
    return tuple(
        Placement(rank, rank // node, rank % node, layout.replica(rank, node), layout.tp_rank(rank, node))
        for rank in range(layout.world)
    )


def plan_layout(
    shape: ModelShape,
    model_path: str,
    gpu: Gpu,
    layout: Layout,
    *,
    gpus_per_node: int,
    sequences: int,
    longest_tokens: int,
    seed: int = 0,
) -> LayoutPlan:
    """Plan of one layout; ``sequences`` of the whole rollout, ``longest_tokens`` a prompt and its response at most.

    LaunchError where TP leaves the node or does not divide the heads, the weights exceed the GPU, or its KV cache
    cannot hold one sequence of the greatest length.
    """
    node = min(gpus_per_node, layout.world)
    if layout.tp > node or node % layout.tp or layout.world % node:
        raise LaunchError(f"{layout}: TP{layout.tp} does not fit nodes of {gpus_per_node} GPUs; choose a divisor")
    try:
        shape.check_tp(layout.tp)
    except ValueError as error:
        raise LaunchError(f"{error}; choose a TP that divides the heads") from None
    memory = gpu_memory(shape, gpu, layout.tp, -(-sequences // layout.dp))
    gb, where = 1e-9, f"{shape.name} in {layout} on {gpu.title}"
    if memory.kv_bytes <= 0:
        other_bytes = memory.context_bytes + memory.reserve_bytes
        raise LaunchError(
            f"{where}: {memory.weight_bytes * gb:.1f} GB of weights a GPU and "
            f"{other_bytes * gb:.1f} GB for activations and graphs exceed {memory.total_bytes * gb:.1f} GB; "
            "choose a higher TP or a larger GPU"
        )
    if memory.kv_tokens < longest_tokens:
        raise LaunchError(
            f"{where}: the KV cache holds {memory.kv_tokens:,} tokens, one sequence may need {longest_tokens:,}; "
            "choose a higher TP or shorten max_response_tokens"
        )
    nodes = layout.world // node
    local = Layout(layout.tp, layout.dp // nodes)
    kv_tokens_per_rank = memory.kv_tokens // layout.tp
    arguments = engine_arguments(
        model_path,
        local,
        "cuda",
        sequences=-(-sequences // nodes),
        kv_tokens_per_rank=kv_tokens_per_rank,
        mem_fraction=static_fraction(memory),
        seed=seed,
    )
    return LayoutPlan(
        layout,
        tuple(dict(arguments) for _ in range(nodes)),
        placements(layout, gpus_per_node),
        memory,
        longest_tokens,
    )


def static_fraction(memory: Memory) -> float:
    """SGLang's ``mem_fraction_static``: weights and KV cache, of the memory free when an engine starts."""
    return round((memory.weight_bytes + memory.kv_bytes) / (memory.total_bytes - memory.context_bytes), 3)


def launch_plan(
    shape: ModelShape, model_path: str, gpu: Gpu, layouts: Iterable[Layout], **sizes
) -> tuple[tuple[LayoutPlan, ...], dict[Layout, str]]:
    """Plans of the layouts that fit, and why each of the others does not; ``sizes`` as in :func:`plan_layout`.

    LaunchError where none fits.
    """
    plans, refused = [], {}
    for layout in layouts:
        try:
            plans.append(plan_layout(shape, model_path, gpu, layout, **sizes))
        except LaunchError as error:
            refused[layout] = str(error)
    if not plans:
        raise LaunchError("no layout fits: " + "; ".join(refused.values()))
    return tuple(plans), refused
