"""Launch plans: memory in closed form, placement, refusals, recognition of GPUs."""

import pytest

from bench.gpus import GPUS, MIB, gpu, local_devices, recognise, serves
from bench.launch_plan import (
    CONTEXT_BYTES,
    LaunchError,
    gpu_memory,
    kv_capacity_tokens,
    launch_plan,
    placements,
    plan_layout,
    rank_weight_bytes,
    reserve_bytes,
)
from pat.layout import Layout
from pat.model import ModelShape

LLAMA = ModelShape("LLaMA3.1-8B", "LlamaForCausalLM", 32, 4096, 14336, 32, 8, 128, 128256)
QWEN = ModelShape("Qwen3-14B", "Qwen3ForCausalLM", 40, 5120, 17408, 40, 8, 128, 151936)
SIZES = {"gpus_per_node": 8, "sequences": 128, "longest_tokens": 25_600}


@pytest.mark.parametrize("shape", [LLAMA, QWEN])
def test_ranks_hold_the_whole_model_and_their_norms(shape: ModelShape) -> None:
    assert rank_weight_bytes(shape, 1) == shape.weight_bytes
    norms = (2 * shape.layers + 1) * shape.hidden * shape.dtype_bytes
    if shape.architecture == "Qwen3ForCausalLM":  # and those of Q and K
        norms += shape.layers * 2 * shape.head_dim * shape.dtype_bytes
    for tp in (2, 4, 8):
        assert tp * rank_weight_bytes(shape, tp) == shape.weight_bytes + (tp - 1) * norms


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    two_kv_heads = ModelShape("m", "LlamaForCausalLM", 1, 64, 128, 8, 2, 8, 64)
    kv = 2 * 64 * 8 * 2  # K and V projection of one head
    whole = two_kv_heads.weight_bytes - 3 * 64 * 2 - 2 * kv
    assert rank_weight_bytes(two_kv_heads, 4) == whole // 4 + kv + 3 * 64 * 2


def test_reserve_follows_sglang() -> None:
    assert reserve_bytes(80 << 30, 1) == (512 + 1.5 * 8192 + 128 + 2 * 256) * MIB
    assert reserve_bytes(80 << 30, 8, running=16) == (512 + 1.5 * 8192 + 1024 + 32) * MIB
    assert reserve_bytes(48 << 30, 4) == (512 + 1.5 * 4096 + 512 + 2 * 160) * MIB


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_memory_adds_up(name: str, tp: int) -> None:
    memory = gpu_memory(LLAMA, gpu(name), tp)
    parts = memory.context_bytes + memory.weight_bytes + memory.reserve_bytes + memory.kv_bytes
    assert parts == memory.total_bytes == gpu(name).memory_bytes
    token = 131_072 // tp  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    assert kv_capacity_tokens(LLAMA, gpu(name), tp) == memory.kv_tokens == memory.kv_bytes // token
    assert memory.context_bytes == CONTEXT_BYTES


def test_a_plan_of_two_nodes() -> None:
    plan = plan_layout(QWEN, "Qwen/Qwen3-14B", gpu("a40"), Layout(4, 4), **SIZES)
    assert len(plan.engines) == 2  # one engine a node, two replicas each
    for engine in plan.engines:
        assert (engine["tp_size"], engine["dp_size"], engine["device"]) == (4, 2, "cuda")
        assert engine["max_running_requests"] == 32
        assert engine["max_total_tokens"] <= plan.memory.kv_tokens
        assert 0.5 < engine["mem_fraction_static"] < 1
    assert plan.sequences_at_cap == plan.memory.kv_tokens // 25_600
    by_replica = {}
    for place in plan.placement:
        by_replica.setdefault(place.replica, []).append(place)
    assert sorted(by_replica) == [0, 1, 2, 3]
    for members in by_replica.values():
        assert len({place.node for place in members}) == 1  # TP stays inside a node
        assert [place.tp_rank for place in members] == [0, 1, 2, 3]
    assert [(p.rank, p.node, p.gpu) for p in plan.placement] == [(r, r // 8, r % 8) for r in range(16)]


def test_placement_of_one_node_nests() -> None:
    assert [(p.replica, p.tp_rank) for p in placements(Layout(2, 2), 8)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_refuses_what_cannot_fit() -> None:
    big = ModelShape("LLaMA-70B", "LlamaForCausalLM", 80, 8192, 28672, 64, 8, 128, 128256)
    with pytest.raises(LaunchError, match=r"141\.1 GB of weights.*choose a higher TP"):
        plan_layout(big, "m", gpu("h100_sxm"), Layout(1, 8), **SIZES)
    long = SIZES | {"longest_tokens": 200_000}
    with pytest.raises(LaunchError, match=r"one sequence may need 200,000.*shorten max_response_tokens"):
        plan_layout(QWEN, "m", gpu("a40"), Layout(1, 8), **long)
    with pytest.raises(LaunchError, match="TP8 does not fit nodes of 4"):
        plan_layout(LLAMA, "m", gpu("a40"), Layout(8, 2), **SIZES | {"gpus_per_node": 4})
    with pytest.raises(LaunchError, match="TP16 does not divide 40"):
        plan_layout(QWEN, "m", gpu("a40"), Layout(16, 1), **SIZES | {"gpus_per_node": 16})
    plans, refused = launch_plan(big, "m", gpu("h100_sxm"), [Layout(1, 8), Layout(8, 1)], **SIZES)
    assert [plan.layout for plan in plans] == [Layout(8, 1)]
    assert list(refused) == [Layout(1, 8)]
    with pytest.raises(LaunchError, match="no layout fits"):
        launch_plan(big, "m", gpu("a40"), [Layout(1, 8)], **SIZES)


def test_gpus_are_recognised_by_name_and_memory() -> None:
    assert recognise("NVIDIA H100 80GB HBM3", 85_029_158_912).name == "h100_sxm"
    assert recognise("NVIDIA A100-SXM4-80GB", 85_097_971_712).name == "a100_sxm"
    assert recognise("NVIDIA A100-SXM4-40GB", 42_285_268_992) is None
    assert recognise("NVIDIA A40", 47_608_692_736).name == "a40"
    assert recognise("NVIDIA L40S", 47_697_362_944).name == "l40s"
    assert recognise("NVIDIA H200", 150_000_000_000).name == "h200_sxm"
    assert recognise("NVIDIA GeForce RTX 4090", 25_000_000_000) is None
    eight = [("NVIDIA A40", 47_608_692_736)] * 8
    assert serves("a40", 8, eight)
    assert not serves("a40", 8, eight[:4])
    assert not serves("h100_sxm", 8, eight)
    assert all(memory > 0 for _, memory in local_devices())
    with pytest.raises(ValueError, match="is not known; known ones: h100_sxm"):
        gpu("h9000")
