"""Where each running sequence's KV cache goes in a switch, and how it gets there. Pure: no torch, no SGLang."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pat.layout import Layout
from pat.placement import Room, place
from pat.reshard.weights import Copy, Part, copies

How = Literal["migrate", "recompute", "queue"]
MODES = ("auto", "migrate", "recompute")


@dataclass(frozen=True, slots=True)
class Sequence:
    """A running sequence: ``tokens`` of KV cache on old replica ``replica``.

    Its first ``shared_tokens`` lie in the same slots as those of sequence ``base`` of the list (a shared prompt).
    """

    replica: int
    tokens: int
    base: int | None = None
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class KvCosts:
    """Measured rates that the choice between migration and recomputation follows from.

    exchange_s, prefill_fixed_s        of a whole migration, or of a replica's whole recomputation
    sequence_s, prefill_sequence_s     of each sequence in it, whatever its length
    bytes_per_s                        KV bytes that a rank can send, or take, in a second
    prefill_token_s, prefill_token2_s  of a sequence of n tokens: n * token + n^2 * token2
    """

    exchange_s: float = 2e-3
    sequence_s: float = 2e-4
    bytes_per_s: float = 1e9
    prefill_fixed_s: float = 5e-3
    prefill_sequence_s: float = 1e-3
    prefill_token_s: float = 1e-4
    prefill_token2_s: float = 0.0

    def migrate_s(self, bytes_: float, sequences: int = 1) -> float:
        """Seconds that moving sequences keeps their busiest rank occupied, beside the fixed time."""
        return sequences * self.sequence_s + bytes_ / self.bytes_per_s

    def recompute_s(self, tokens: int) -> float:
        """Seconds that one sequence adds to its new replica's prefill."""
        return self.prefill_sequence_s + tokens * self.prefill_token_s + tokens**2 * self.prefill_token2_s


@dataclass(frozen=True, slots=True)
class Placement:
    """What happens to one sequence. ``start``: tokens before it need no sending, for ``base`` brings them along."""

    sequence: int
    replica: int
    how: How
    start: int
    migrate_s: float
    recompute_s: float


@dataclass(frozen=True, slots=True)
class KvPlan:
    """Placements in the order of the sequences; predicted seconds of both parts, with replicas working side by side.

    migrated_most, recomputed_most   what the predictions follow from: (sequences, KV bytes) of the busiest rank, and
                                     (sequences, tokens) of the busiest replica
    """

    placements: tuple[Placement, ...]
    migrate_s: float
    recompute_s: float
    migrated_most: tuple[int, int]
    recomputed_most: tuple[int, int]

    @property
    def migrated(self) -> tuple[Placement, ...]:
        return tuple(p for p in self.placements if p.how == "migrate")

    def count(self, how: How) -> int:
        return sum(p.how == how for p in self.placements)


@cache
def head_copies(kv_heads: int, old: Layout, new: Layout, rank: int, replica: int) -> tuple[Copy, ...]:
    """KV heads that world rank ``rank`` takes from old replica ``replica``: copies along the head dimension."""
    return copies((Part(kv_heads),), old, new, rank, replica)


@cache
def busiest_heads(kv_heads: int, old: Layout, new: Layout, source: int, target: int) -> int:
    """The most KV heads that any rank sends or receives when a sequence goes from ``source`` to ``target`` replica."""
    sent: dict[int, int] = {}
    received = 0
    for rank in new.groups()[target]:
        taken = head_copies(kv_heads, old, new, rank, source)
        received = max(received, sum(c.length for c in taken))
        for copy in taken:
            sent[copy.source] = sent.get(copy.source, 0) + copy.length
    return max(received, *sent.values())


def plan_kv(
    sequences: Items[Sequence],
    old: Layout,
    new: Layout,
    kv_heads: int,
    head_bytes: int,
    room: Room,
    costs: KvCosts,
    mode: str = "auto",
) -> KvPlan:
    """Give every sequence a new replica, by :func:`pat.placement.place`, and a way there.

    head_bytes: KV bytes of one token and one KV head over all layers. ``mode``: "auto" takes the faster way for each
    sequence by ``costs``; "migrate" and "recompute" force one. A sequence that shall migrate but finds no room on any
    replica is queued, never lost: it is prefilled when room appears.
    """
    if mode not in MODES:
        raise ValueError(f"KV mode {mode!r} is none of {', '.join(MODES)}")
    shared = {i: (s.base, s.shared_tokens) for i, s in enumerate(sequences) if s.base is not None}
    where = place(old, new, [s.replica for s in sequences], [s.tokens for s in sequences], room, shared=shared)
    queued, used, count = [int(sum(where == d)) for d in range(new.dp)], [0] * new.dp, [0] * new.dp
    placed: dict[int, Placement] = {}
    for i in sorted(range(len(sequences)), key=lambda i: (i in shared, -sequences[i].tokens, i)):
        sequence, replica = sequences[i], int(where[i])
        homeless = replica < 0
        if homeless:
            replica = queued.index(min(queued))
            queued[replica] += 1
        base = placed.get(sequence.base)
        along = base is not None and base.replica == replica and base.how == "migrate"
        tokens = sequence.tokens - (sequence.shared_tokens if along else 0)
        heads = busiest_heads(kv_heads, old, new, sequence.replica, replica)
        move_s, again_s = costs.migrate_s(tokens * heads * head_bytes), costs.recompute_s(sequence.tokens)
        slots = room.needed(tokens)
        how: How = "migrate"
        if mode == "recompute" or (mode == "auto" and move_s > again_s):
            how = "recompute"
        elif homeless or used[replica] + slots > room.tokens or count[replica] >= room.requests:
            how = "queue"
        else:
            used[replica], count[replica] = used[replica] + slots, count[replica] + 1
        start = sequence.tokens - tokens if how == "migrate" else 0
        placed[i] = Placement(i, replica, how, start, move_s, again_s)
    placements = tuple(placed[i] for i in range(len(sequences)))
    moved, moved_bytes = busiest_rank(placements, sequences, old, new, kv_heads, head_bytes)
    migrate_s = costs.exchange_s + costs.migrate_s(moved_bytes, moved) if moved else 0.0
    recompute_s, recomputed = busiest_replica(placements, sequences, new, costs)
    return KvPlan(placements, migrate_s, recompute_s, (moved, moved_bytes), recomputed)


def busiest_rank(
    placements: Items[Placement], sequences: Items[Sequence], old: Layout, new: Layout, kv_heads: int, head_bytes: int
) -> tuple[int, int]:
    """The most sequences, and the most KV bytes, that any rank sends or receives in a whole migration.

    What a rank keeps counts as both.
    """
    sent, received = [0] * old.world, [0] * new.world
    outgoing, incoming = [0] * old.dp, [0] * new.dp
    for placement in placements:
        if placement.how == "migrate":
            sequence = sequences[placement.sequence]
            outgoing[sequence.replica] += 1
            incoming[placement.replica] += 1
            for rank in new.groups()[placement.replica]:
                for copy in head_copies(kv_heads, old, new, rank, sequence.replica):
                    bytes_ = (sequence.tokens - placement.start) * copy.length * head_bytes
                    sent[copy.source] += bytes_
                    received[rank] += bytes_
    return max(*outgoing, *incoming), max(*sent, *received)


def busiest_replica(
    placements: Items[Placement], sequences: Items[Sequence], new: Layout, costs: KvCosts
) -> tuple[float, tuple[int, int]]:
    """Seconds of the longest recomputation on any replica, and the (sequences, tokens) of it."""
    count, tokens, busy_s = [0] * new.dp, [0] * new.dp, [0.0] * new.dp
    for placement in placements:
        if placement.how != "migrate":
            replica = placement.replica
            count[replica] += 1
            tokens[replica] += sequences[placement.sequence].tokens
            busy_s[replica] += placement.recompute_s
    most = busy_s.index(max(busy_s))
    return busy_s[most] + (costs.prefill_fixed_s if count[most] else 0.0), (count[most], tokens[most])
