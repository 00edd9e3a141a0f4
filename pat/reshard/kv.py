"""Where each running sequence's KV cache goes in a switch, and how it gets there. Pure: no torch, no SGLang."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pat.layout import Layout
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
class Room:
    """What each new replica can take: KV slots and running requests. Slots are given out in pages."""

    tokens: int
    requests: int
    page_tokens: int = 1

    def slots(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens) * self.page_tokens


@dataclass(frozen=True, slots=True)
class KvCosts:
    """Measured rates that the choice between migration and recomputation follows from.

    exchange_s       time of a migration that does not depend on its bytes
    bytes_per_s      KV bytes that a rank can take in a second
    prefill_fixed_s, prefill_token_s, prefill_token2_s   prefill of n tokens: fixed + n * token + n^2 * token2
    """

    exchange_s: float = 2e-3
    bytes_per_s: float = 1e9
    prefill_fixed_s: float = 5e-3
    prefill_token_s: float = 1e-4
    prefill_token2_s: float = 0.0

    def migrate_s(self, bytes_: float) -> float:
        """Seconds that moving one sequence keeps its busiest rank occupied."""
        return bytes_ / self.bytes_per_s

    def recompute_s(self, tokens: int) -> float:
        """Seconds of one sequence's prefill on its new replica."""
        return self.prefill_fixed_s + tokens * self.prefill_token_s + tokens**2 * self.prefill_token2_s


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
    """Placements in the order of the sequences; predicted seconds of both parts, with replicas working side by side."""

    placements: tuple[Placement, ...]
    migrate_s: float
    recompute_s: float

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
    """Give every sequence a new replica and a way there.

    head_bytes: KV bytes of one token and one KV head over all layers. ``mode``: "auto" takes the faster way for each
    sequence by ``costs``; "migrate" and "recompute" force one. A sequence that shall migrate but finds no room on any
    replica is queued, never lost: it is prefilled when room appears. Long sequences are placed first, each on the
    replica with the fewest tokens; a tie goes to the replica whose ranks hold part of its KV already.
    """
    if mode not in MODES:
        raise ValueError(f"KV mode {mode!r} is none of {', '.join(MODES)}")
    load, used, count = [0] * new.dp, [0] * new.dp, [0] * new.dp
    placed: dict[int, Placement] = {}
    order = sorted(range(len(sequences)), key=lambda i: (sequences[i].base is not None, -sequences[i].tokens, i))
    for i in order:
        sequence = sequences[i]
        base = placed.get(sequence.base) if sequence.base is not None else None
        best = None
        for replica in range(new.dp):
            along = base is not None and base.replica == replica and base.how == "migrate"
            start = sequence.shared_tokens if along else 0
            heads = busiest_heads(kv_heads, old, new, sequence.replica, replica)
            move_s = costs.migrate_s((sequence.tokens - start) * heads * head_bytes)
            again_s = costs.recompute_s(sequence.tokens)
            migrate = mode == "migrate" or (mode == "auto" and move_s <= again_s)
            slots = room.slots(sequence.tokens - start)
            # one more page each, so that the next step finds room too
            fits = used[replica] + slots + room.page_tokens <= room.tokens and count[replica] < room.requests
            how: How = "recompute" if not migrate else "migrate" if fits else "queue"
            far = replica % min(old.dp, new.dp) != sequence.replica % min(old.dp, new.dp)
            key = (how == "queue", load[replica] + sequence.tokens - start, far, replica)
            if best is None or key < best[0]:
                best = key, Placement(i, replica, how, start if how == "migrate" else 0, move_s, again_s), slots
        _, placement, slots = best
        placed[i] = placement
        load[placement.replica] += sequence.tokens - placement.start
        if placement.how == "migrate":
            used[placement.replica] += slots + room.page_tokens
            count[placement.replica] += 1
    placements = tuple(placed[i] for i in range(len(sequences)))
    most_bytes = busiest_bytes(placements, sequences, old, new, kv_heads, head_bytes)
    migrate_s = costs.exchange_s + costs.migrate_s(most_bytes) if most_bytes else 0.0
    return KvPlan(placements, migrate_s, _recompute_s(placements, new))


def busiest_bytes(
    placements: Items[Placement], sequences: Items[Sequence], old: Layout, new: Layout, kv_heads: int, head_bytes: int
) -> int:
    """The most KV bytes that any rank sends, or receives, in a whole migration; what it keeps counts as both."""
    sent, received = [0] * old.world, [0] * new.world
    for placement in placements:
        if placement.how == "migrate":
            sequence = sequences[placement.sequence]
            for rank in new.groups()[placement.replica]:
                for copy in head_copies(kv_heads, old, new, rank, sequence.replica):
                    bytes_ = (sequence.tokens - placement.start) * copy.length * head_bytes
                    sent[copy.source] += bytes_
                    received[rank] += bytes_
    return max(*sent, *received)


def _recompute_s(placements: tuple[Placement, ...], new: Layout) -> float:
    busy = [0.0] * new.dp
    for placement in placements:
        if placement.how != "migrate":
            busy[placement.replica] += placement.recompute_s
    return max(busy)
