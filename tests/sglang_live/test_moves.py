"""Moves of weights and KV cache among many ranks, each a thread with a world of queues: no process, no engine."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pat.layout import Layout
from pat.placement import Room
from pat.reshard.kv import KvCosts, Sequence, plan_kv
from pat.reshard.weights import Part
from pat.sglang import kv_pool
from pat.sglang.staging import SharedStaging, head_bytes
from pat.sglang.weight_move import Shard, WeightMove
from tests.reshard.test_weights import shard

RANKS = 8
LIMIT_S = 20


class ThreadWorld:
    """As much of World as moves need; all ranks of a test share ``items`` and ``barrier``."""

    def __init__(self, rank: int, items: list, barrier: threading.Barrier) -> None:
        self.rank, self.size, self.items, self.barrier = rank, len(items), items, barrier

    def gather(self, item):
        self.items[self.rank] = item
        self.barrier.wait()
        found = list(self.items)
        self.barrier.wait()
        return found

    def swap_tensors(self, sent, outgoing, incoming):
        received = torch.cat([parts[self.rank] for parts in self.gather(sent.split(outgoing))])
        assert len(received) == sum(incoming)
        return received

    def send_tensors(self, sends, takes):
        assert all(tensor.is_contiguous() for _, tensor in sends + takes)
        posts = [[tensor for to, tensor in post if to == self.rank] for post in self.gather(sends)]
        for source, tensor in takes:
            tensor.copy_(posts[source].pop(0))
        assert not any(posts)
        self.barrier.wait()


def on_ranks(work):
    """``work(world, staging)`` of every rank side by side; the results by rank."""
    items, barrier = [None] * RANKS, threading.Barrier(RANKS, timeout=LIMIT_S)
    segments = [torch.zeros(head_bytes(RANKS) + 400_000, dtype=torch.uint8) for _ in range(RANKS)]
    worlds = [ThreadWorld(rank, items, barrier) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as pool:
        jobs = [pool.submit(work, world, SharedStaging(world, segments)) for world in worlds]
        return [job.result(timeout=LIMIT_S) for job in jobs]


QKV = (Part(16, 2), Part(4, 2), Part(4, 2))  # 4 KV heads: replicated under TP8
WHOLES = [
    ("model.embed_tokens.weight", 0, (Part(64),), (64, 6)),
    *(
        (f"model.layers.{i}.{name}", dim, parts, shape)
        for i in range(2)
        for name, dim, parts, shape in (
            ("qkv_proj.weight", 0, QKV, (48, 6)),
            ("qkv_proj.bias", 0, QKV, (48,)),
            ("o_proj.weight", 1, (Part(32),), (6, 32)),
            ("gate_up_proj.weight", 0, (Part(24), Part(24)), (48, 6)),
        )
    ),
]
PAIRS = [
    (Layout(2, 4), Layout(8, 1)),
    (Layout(8, 1), Layout(2, 4)),
    (Layout(4, 2), Layout(1, 8)),
    (Layout(1, 8), Layout(4, 2)),
]


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "sent"])
@pytest.mark.parametrize(("old", "new"), PAIRS, ids=lambda layout: str(layout))
def test_weights_reach_the_shards_of_the_new_layout(old, new, shared) -> None:
    """Each rank ends with its rows of the whole; up moves nothing, down the rows that a rank lacked; little beside."""
    wholes = [torch.randn(shape) for *_, shape in WHOLES]

    def rows(layout, rank, parts):
        return torch.from_numpy(shard(parts, layout.tp, layout.tp_rank(rank)))

    def work(world, staging):
        shards = [
            Shard(
                path,
                dim,
                parts,
                nn.Parameter(whole.index_select(dim, rows(old, world.rank, parts))),
                nn.Parameter(torch.empty(0)),
            )
            for (path, dim, parts, _), whole in zip(WHOLES, wholes, strict=True)
        ]
        return shards, WeightMove(world, old, new, staging if shared else None).run(shards)

    results = on_ranks(work)
    per_row = {
        path: whole.numel() // whole.shape[dim] * 4 for (path, dim, *_), whole in zip(WHOLES, wholes, strict=True)
    }
    layer = max(
        sum(per_row[path] * len(rows(min(old, new), 0, parts)) for path, _, parts, _ in WHOLES if name in path)
        for name in ("embed", "layers.0.")
    )
    for rank, (shards, moved) in enumerate(results):
        lacked = 0
        for one, whole in zip(shards, wholes, strict=True):
            wanted = rows(new, rank, one.parts)
            assert torch.equal(one.new, whole.index_select(one.dim, wanted))
            assert one.old.numel() == 0
            lacked += per_row[one.path] * len(set(wanted.tolist()) - set(rows(old, rank, one.parts).tolist()))
        assert moved.wire_bytes == lacked
        assert (lacked == 0) == (new.tp > old.tp)
        assert moved.wire_bytes + moved.local_bytes == sum(one.new.numel() * 4 for one in shards)
        assert 0 < moved.extra_bytes <= layer + 64  # 64: rounding in the staging


HEADS, LAYERS, WIDTH = 8, 3, 2


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "all-to-all"])
def test_the_papers_switch_moves_three_quarters(shared) -> None:
    """DP4 x TP2 to TP8 with 8 KV heads: a rank keeps one of its four heads and sends three, layer by layer."""
    old, new = Layout(2, 4), Layout(8, 1)
    sequences = [Sequence(i % 4, 5 + i) for i in range(8)]
    plan = plan_kv(sequences, old, new, HEADS, LAYERS * 2 * WIDTH * 4, Room(1000, 100), KvCosts(), "migrate")
    whole = torch.randn(LAYERS, 2, 8, 16, HEADS, WIDTH)  # layer, K or V, sequence, token, head

    def pool(layout):
        buffers = torch.full((LAYERS, 2, 200, HEADS // layout.tp, WIDTH), torch.nan)
        return SimpleNamespace(k_buffer=list(buffers[:, 0]), v_buffer=list(buffers[:, 1]))

    old_slots = {i: torch.arange(16 * i, 16 * i + s.tokens) for i, s in enumerate(sequences)}
    new_slots = {i: 199 - slots for i, slots in old_slots.items()}

    def work(world, staging):
        mine, theirs = pool(old), pool(new)
        first = old.tp_rank(world.rank) * HEADS // old.tp
        for i, s in enumerate(sequences):
            if s.replica == old.replica(world.rank):
                for layer, pair in enumerate(kv_pool.buffers(mine)):
                    for kind, buffer in enumerate(pair):
                        buffer[old_slots[i]] = whole[layer, kind, i, : s.tokens, first : first + HEADS // old.tp]
        move = kv_pool.KvMove(world, old, new, HEADS, sequences, plan.placements, old_slots, new_slots)
        return theirs, move.run(mine, theirs, 1, staging if shared else None)  # 1 byte: one layer at a time

    results = on_ranks(work)
    for rank, (theirs, _) in enumerate(results):
        for i, s in enumerate(sequences):
            for layer, pair in enumerate(kv_pool.buffers(theirs)):
                for kind, buffer in enumerate(pair):
                    assert torch.equal(buffer[new_slots[i], 0], whole[layer, kind, i, : s.tokens, rank])
    wire, local = (sum(getattr(moved, f"{way}_bytes") for _, moved in results) for way in ("wire", "local"))
    assert wire == 3 * local
    assert wire + local == sum(s.tokens for s in sequences) * HEADS * LAYERS * 2 * WIDTH * 4
    assert plan.migrated_most[0] == 8
