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

    Every replica gets its even share; within it, sequences go where their KV already is, the longest context first.
    """
    count, load = np.zeros(new.dp, dtype=int), np.zeros(new.dp)
    target = np.full(len(context_tokens), -1)
    order = np.argsort(-np.asarray(context_tokens), kind="stable")
    home = home_replica(old, new, from_replica, node)
    share = -(-len(context_tokens) // new.dp)
    away = []
    for i in order:
        d = home[i]
        if old.tp <= new.tp and count[d] < share and load[d] + context_tokens[i] <= capacity_tokens:
            target[i], count[d], load[d] = d, count[d] + 1, load[d] + context_tokens[i]
        else:
            away.append(i)
    for i in away:
        d = np.lexsort((load, count))[0]
        if load[d] + context_tokens[i] > capacity_tokens:
            d = int(np.argmin(load))
        if load[d] + context_tokens[i] <= capacity_tokens:
            target[i], count[d], load[d] = d, count[d] + 1, load[d] + context_tokens[i]
    return target
