"""Which communicators a world of ranks needs to be able to take any of several layouts. Pure: no torch."""

from __future__ import annotations

from collections.abc import Iterable

from pat.layout import Layout

Groups = tuple[tuple[int, ...], ...]


def group_sets(layouts: Iterable[Layout]) -> dict[int, Groups]:
    """TP degree -> the groups of world ranks it needs, lowest TP first; TP1 stands for the groups of one rank.

    Every rank lies in exactly one group of each set, so all ranks can create the sets in this order without meeting.
    """
    found = {layout.tp: layout.groups() for layout in sorted(layouts)}
    world = {layout.world for layout in layouts}
    if len(world) != 1:
        raise ValueError(f"layouts of one world are needed, not of {sorted(world)} ranks")
    found.setdefault(1, tuple((rank,) for rank in range(world.pop())))
    return dict(sorted(found.items()))


def leaders(layout: Layout) -> tuple[int, ...]:
    """World ranks that speak for each replica: rank d leads replica d in every layout of one node."""
    return tuple(layout.rank(0, replica) for replica in range(layout.dp))
