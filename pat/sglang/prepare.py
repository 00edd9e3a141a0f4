"""What all ranks agree on before a switch is committed: where each request goes, and how. Thin over the plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pat.layout import Layout
from pat.placement import Room
from pat.reshard.kv import KvPlan, Sequence, plan_kv
from pat.sglang import requests
from pat.sglang.order import Order
from pat.sglang.seats import Seat


@dataclass(frozen=True, slots=True)
class Prepared:
    """The sequences, the plan for them, and who waits; equal on all ranks.

    rids      request ids of the sequences, in the plan's order
    waiting   [(request id, old replica)] of requests without KV cache, in the order they shall be queued
    """

    old: Layout
    new: Layout
    rids: list[str]
    sequences: list[Sequence]
    waiting: list[tuple[str, int]]
    plan: KvPlan

    @property
    def targets(self) -> dict[str, int]:
        """New replica of every request: the plan's for running ones; those that wait fill up the emptiest in turn."""
        targets = {self.rids[p.sequence]: p.replica for p in self.plan.placements}
        count = [0] * self.new.dp
        for replica in targets.values():
            count[replica] += 1
        for rid, _ in self.waiting:
            targets[rid] = min(range(self.new.dp), key=lambda d: (count[d], d))
            count[targets[rid]] += 1
        return targets

    @property
    def origins(self) -> dict[str, int]:
        """Old replica of every request."""
        return {self.rids[i]: s.replica for i, s in enumerate(self.sequences)} | dict(self.waiting)

    @property
    def to_prefill(self) -> list[str]:
        """Requests that go to the queue, those that had begun first."""
        again = [self.rids[p.sequence] for p in self.plan.placements if p.how != "migrate"]
        return [*again, *(rid for rid, _ in self.waiting)]


def prepare(order: Order, old: Seat, new: Seat, replicas: list[requests.Described]) -> Prepared:
    """The plan for what the old replicas have described, in their order."""
    sequences: list[Sequence] = []
    for replica in replicas:
        offset = len(sequences)
        sequences += [
            Sequence(s.replica, s.tokens, None if s.base is None else s.base + offset, s.shared_tokens)
            for s in replica.sequences
        ]
    pool, scheduler = new.pool, new.scheduler
    plan = plan_kv(
        sequences,
        old.layout,
        new.layout,
        kv_heads=scheduler.model_config.get_total_num_kv_heads(),
        head_bytes=2 * len(pool.k_buffer) * pool.head_dim * pool.k_buffer[0].element_size(),
        room=Room(scheduler.max_total_num_tokens, scheduler.max_running_requests, scheduler.page_size),
        costs=order.costs,
        mode=order.kv,
    )
    depth = max((len(replica.waiting) for replica in replicas), default=0)
    waiting = [(r.waiting[i], d) for i in range(depth) for d, r in enumerate(replicas) if i < len(r.waiting)]
    return Prepared(old.layout, new.layout, [rid for r in replicas for rid in r.running], sequences, waiting, plan)


def pack_parcels(prepared: Prepared, rank: int, known: dict[str, Any]) -> dict[int, bytes]:
    """Parcels, by receiver, for the ranks that get requests of this rank's replica and lack them; its leader sends."""
    old, mine = prepared.old, prepared.old.replica(rank)
    if old.tp_rank(rank) != 0:
        return {}
    targets, origins, parcels = prepared.targets, prepared.origins, {}
    for replica, ranks in enumerate(prepared.new.groups()):
        leaving = [known[rid] for rid, at in origins.items() if at == mine and targets[rid] == replica]
        receivers = [receiver for receiver in ranks if old.replica(receiver) != mine]
        if leaving and receivers:
            parcels |= dict.fromkeys(receivers, requests.pack(leaving))
    return parcels
