"""Layouts: how a world of GPUs is divided into replicas (data parallel) of shards (tensor parallel)."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """``dp`` replicas of ``tp`` ranks each, over world ranks ``0 .. tp * dp - 1``.

    Inside a node of ``node`` ranks, world rank p is tp rank ``p // replicas`` of replica ``p % replicas``
    (replicas = node / tp). This stride makes shards *nest*: the slice a rank owns under a higher TP lies inside
    the slice it owns under any lower TP, so going up in TP moves no weights. It also makes rank d of a node the
    leader of replica d in every layout, and keeps every group's ranks ascending.
    """

    tp: int
    dp: int

    def __post_init__(self) -> None:
        if self.tp < 1 or self.dp < 1:
            raise ValueError(f"layout: tp and dp must be at least 1, got tp={self.tp}, dp={self.dp}")

    @property
    def world(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        return f"TP{self.tp}xDP{self.dp}"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """``"TP2xDP4"`` -> ``Layout(2, 4)``; ValueError names the expected form."""
        match = re.fullmatch(r"TP(\d+)xDP(\d+)", text)
        if not match:
            raise ValueError(f"layout {text!r} is not of the form TP2xDP4")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def of(cls, tp: int, world: int) -> Layout:
        """The layout of ``world`` GPUs with TP degree ``tp``; ValueError where tp does not divide them."""
        if tp < 1 or world % tp:
            raise ValueError(f"TP{tp} does not divide {world} GPUs")
        return cls(tp, world // tp)

    def tp_rank(self, rank: int, node: int | None = None) -> int:
        """TP rank of world rank ``rank``; ``node`` is the number of ranks a node holds (default: all)."""
        node = node or self.world
        return rank % node // (node // self.tp)

    def replica(self, rank: int, node: int | None = None) -> int:
        """Replica that world rank ``rank`` serves."""
        node = node or self.world
        per_node = node // self.tp
        return rank // node * per_node + rank % node % per_node

    def rank(self, tp_rank: int, replica: int, node: int | None = None) -> int:
        """World rank of a tp rank of a replica: the inverse of :meth:`tp_rank` and :meth:`replica`."""
        node = node or self.world
        per_node = node // self.tp
        return replica // per_node * node + tp_rank * per_node + replica % per_node

    def groups(self, node: int | None = None) -> tuple[tuple[int, ...], ...]:
        """World ranks of each replica, by tp rank: ``Layout(2, 2).groups() == ((0, 2), (1, 3))``."""
        return tuple(tuple(self.rank(i, d, node) for i in range(self.tp)) for d in range(self.dp))


def layouts(world: int, tps: tuple[int, ...] = (1, 2, 4, 8), node: int | None = None) -> tuple[Layout, ...]:
    """Every layout of ``world`` GPUs whose TP stays inside a node of ``node`` GPUs, lowest TP first."""
    node = node or world
    return tuple(Layout(tp, world // tp) for tp in sorted(tps) if tp <= node and node % tp == 0 and world % tp == 0)
