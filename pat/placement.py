"""Which replica of the new layout each running sequence goes to: one rule for the live switch and for the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from pat.layout import Layout


@dataclass(frozen=True, slots=True)
class Room:
    """What each new replica can take: KV slots and running requests. Slots are given out in pages."""

    tokens: int
    requests: int = 1 << 30
    page_tokens: int = 1

    def needed(self, tokens: int) -> int:
        """Slots of a sequence: its pages and one more, so that the next step finds room too."""
        return (-(-tokens // self.page_tokens) + 1) * self.page_tokens


def home_replica(old: Layout, new: Layout, replica: np.ndarray, node: int | None = None) -> np.ndarray:
    """[n] the new replica that shares ranks with each old replica, on which the least KV has to move.

    Going up it contains the old one; going down it is the one led by the old leader (there are ``old.tp / new.tp``).
    """
    return new.replica(old.rank(0, np.asarray(replica), node), node)


def shares_ranks(old: Layout, new: Layout, from_replica: np.ndarray, to_replica: np.ndarray, node: int | None = None):
    """[n] whether the new replica has ranks of the old one, so that part of the KV stays where it is."""
    if new.tp >= old.tp:
        return home_replica(old, new, from_replica, node) == to_replica
    return home_replica(new, old, to_replica, node) == from_replica


def place(
    old: Layout,
    new: Layout,
    from_replica: Sequence[int] | np.ndarray,
    context_tokens: Sequence[int] | np.ndarray,
    room: Room,
    node: int | None = None,
    shared: Mapping[int, tuple[int, int]] | None = None,
) -> np.ndarray:
    """[n] the new replica of each sequence, or -1 where no replica has room and it must queue.

    Every replica gets its even share; within it, sequences go where part of their KV already is (going up in TP there
    is one such replica, going down there are several: the emptiest), the longest context first.

    shared: sequence -> (base, tokens) where its first tokens lie in the same KV slots as those of another, its base (a
    common prompt): on the replica of the base they take no room again. Bases come before their sharers.
    """
    context, origin = np.asarray(context_tokens).tolist(), np.asarray(from_replica).tolist()
    shared = shared or {}
    count, load, used, target = [0] * new.dp, [0] * new.dp, [0] * new.dp, [-1] * len(context)
    near = nearby(old, new, node)
    share = -(-len(context) // new.dp)

    def give(i: int, d: int) -> bool:
        base, common = shared.get(i, (i, 0))
        own = context[i] - (common if target[base] == d else 0)
        if used[d] + room.needed(own) > room.tokens or count[d] >= room.requests:
            return False
        target[i], count[d], load[d], used[d] = d, count[d] + 1, load[d] + own, used[d] + room.needed(own)
        return True

    away = []
    for i in sorted(range(len(context)), key=lambda i: (i in shared, -context[i])):
        d = min(near[origin[i]], key=lambda d: (count[d], load[d]))
        if count[d] >= share or not give(i, d):
            away.append(i)
    emptiest = [(count[d], load[d], d) for d in range(new.dp)]
    heapify(emptiest)
    for i in away:
        d = emptiest[0][2]
        if not give(i, d):
            d = next((d for *_, d in sorted(emptiest)[1:] if give(i, d)), d)
        if d == emptiest[0][2]:
            heapreplace(emptiest, (count[d], load[d], d))
        else:
            emptiest = [(count[d], load[d], d) for d in range(new.dp)]
            heapify(emptiest)
    return np.array(target, dtype=int)


def nearby(old: Layout, new: Layout, node: int | None = None) -> list[list[int]]:
    """For each old replica the new ones that share ranks with it, ascending."""
    if new.tp >= old.tp:
        return [[int(d)] for d in home_replica(old, new, np.arange(old.dp), node)]
    near: list[list[int]] = [[] for _ in range(old.dp)]
    for d, source in enumerate(home_replica(new, old, np.arange(new.dp), node)):
        near[source].append(d)
    return near
