"""Who holds which part of a sharded dimension, and the copies that lead from one layout to another. Pure: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from pat.layout import Layout


@dataclass(frozen=True, slots=True)
class Part:
    """One of the tensors fused in a dimension: ``units`` pieces of ``width`` rows that no rank may split.

    Units are divided evenly; where there are fewer than ranks, each is replicated on neighbouring ranks, one a rank
    (KV heads under a higher TP).
    """

    units: int
    width: int = 1


@dataclass(frozen=True, slots=True)
class Interval:
    """``length`` rows that start at ``local`` in a rank's shard and at ``full`` in the whole dimension."""

    local: int
    full: int
    length: int


@dataclass(frozen=True, slots=True)
class Copy:
    """``length`` rows from ``start`` of world rank ``source``'s old shard to ``to`` of the new one."""

    source: int
    start: int
    to: int
    length: int


@cache
def held(parts: tuple[Part, ...], tp: int, tp_rank: int) -> tuple[Interval, ...]:
    """What a tp rank holds of a dimension of fused ``parts``. ValueError where ``tp`` divides units unevenly."""
    intervals, local, full = [], 0, 0
    for part in parts:
        if part.units % tp and tp % part.units:
            raise ValueError(f"TP{tp} neither divides nor is a multiple of {part.units} units of width {part.width}")
        length = max(1, part.units // tp) * part.width
        first = tp_rank * part.units // tp * part.width
        intervals.append(Interval(local, full + first, length))
        local += length
        full += part.units * part.width
    return tuple(intervals)


@cache
def copies(
    parts: tuple[Part, ...], old: Layout, new: Layout, rank: int, replica: int | None = None
) -> tuple[Copy, ...]:
    """The copies that fill world rank ``rank``'s shard under ``new`` from shards under ``old``.

    ``replica``: the only old replica that holds the data (KV cache); None: every replica does (weights). The rank
    itself is preferred as source. Shards nest, so on the way up, weights come from the rank itself alone.
    """
    home = old.replica(rank) if replica is None else replica
    own = [rank] if home == old.replica(rank) else []
    sources = own + [old.rank(i, home) for i in range(old.tp)]
    found = []
    for wanted in held(parts, new.tp, new.tp_rank(rank)):
        at, end = wanted.full, wanted.full + wanted.length
        while at < end:
            source, piece = _holder(parts, old, sources, at)
            length = min(end, piece.full + piece.length) - at
            found.append(Copy(source, piece.local + at - piece.full, wanted.local + at - wanted.full, length))
            at += length
    return tuple(found)


def _holder(parts: tuple[Part, ...], old: Layout, sources: list[int], at: int) -> tuple[int, Interval]:
    """The first source that holds row ``at``, and its interval around it."""
    for source in sources:
        for piece in held(parts, old.tp, old.tp_rank(source)):
            if piece.full <= at < piece.full + piece.length:
                return source, piece
    raise ValueError(f"nobody holds row {at} of {parts} under {old}")


def slices(parts: tuple[Part, ...], low: Layout, high: Layout, rank: int) -> tuple[Copy, ...]:
    """A rank's shard under ``high`` as pieces of its own shard under ``low``; one piece means that it can be a view.

    ValueError where shards do not nest, as only happens going down.
    """
    pieces = copies(parts, low, high, rank)
    if any(piece.source != rank for piece in pieces):
        raise ValueError(f"the shard of rank {rank} under {high} does not lie inside its shard under {low}")
    merged = [pieces[0]]
    for piece in pieces[1:]:
        last = merged[-1]
        if last.start + last.length == piece.start and last.to + last.length == piece.to:
            merged[-1] = Copy(rank, last.start, last.to, last.length + piece.length)
        else:
            merged.append(piece)
    return tuple(merged)
