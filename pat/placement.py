"""Which replica of the new layout each running sequence goes to."""

from __future__ import annotations

import numpy as np

from pat.layout import Layout


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
    from_replica: np.ndarray,
    context_tokens: np.ndarray,
    capacity_tokens: int,
    node: int | None = None,
) -> np.ndarray:
    """[n] the new replica of each sequence, or -1 where no replica has room and it must queue.

    Every replica gets its even share; within it, sequences go where part of their KV already is (going up in TP there
    is one such replica, going down there are several: the emptiest), the longest context first.
    """
    count, load, target = [0] * new.dp, [0] * new.dp, [-1] * len(context_tokens)
    context, origin = np.asarray(context_tokens).tolist(), np.asarray(from_replica).tolist()
    order = sorted(range(len(context)), key=lambda i: -context[i])
    near = nearby(old, new, node)
    share = -(-len(context) // new.dp)

    def give(i: int, d: int) -> bool:
        if load[d] + context[i] > capacity_tokens:
            return False
        target[i], count[d], load[d] = d, count[d] + 1, load[d] + context[i]
        return True

    away = []
    for i in order:
        d = min(near[origin[i]], key=lambda d: (count[d], load[d]))
        if count[d] >= share or not give(i, d):
            away.append(i)
    for i in away:
        fewest = min(range(new.dp), key=lambda d: (count[d], load[d]))
        _ = give(i, fewest) or give(i, load.index(min(load)))
    return np.array(target, dtype=int)


def nearby(old: Layout, new: Layout, node: int | None = None) -> list[list[int]]:
    """For each old replica the new ones that share ranks with it, ascending."""
    if new.tp >= old.tp:
        return [[int(d)] for d in home_replica(old, new, np.arange(old.dp), node)]
    near: list[list[int]] = [[] for _ in range(old.dp)]
    for d, source in enumerate(home_replica(new, old, np.arange(new.dp), node)):
        near[source].append(d)
    return near
