"""Weights where memory allows one seat only: handed from the shards of the old layout to those of the new one.

Layer by layer: the new shards are made, filled from what the rank holds and, where that is not all, from the ranks of
its old replica, and the old ones freed. So at most one layer takes memory twice. Shards nest: on the way up every rank
slices what it has, on the way down the ranks that share a new shard all-gather it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from pat.layout import Layout
from pat.reshard.weights import Copy, Part, copies, held
from pat.sglang.staging import SharedStaging
from pat.sglang.weights import pairs, size_bytes
from pat.sglang.world import World

LAYER = re.compile(r"\.layers\.\d+\.")


@dataclass(frozen=True, slots=True)
class Shard:
    """A parameter of the old and of the new seat that holds a rank's share of fused ``parts`` along ``dim``."""

    path: str
    dim: int
    parts: tuple[Part, ...]
    old: nn.Parameter
    new: nn.Parameter

    @property
    def layer(self) -> str:
        """The layer it belongs to; embedding and head are layers of their own."""
        found = LAYER.search(self.path)
        return found[0] if found else self.path


@dataclass(frozen=True, slots=True)
class WeightsMoved:
    """Bytes that a rank took from others and copied on its own, and the most that the move took beside the weights:
    beyond the larger of what the rank holds before and after it."""

    wire_bytes: int = 0
    local_bytes: int = 0
    extra_bytes: int = 0


def shards_of(old: nn.Module, new: nn.Module) -> list[Shard]:
    """The sharded parameters of two seats' models, in one order on all ranks; the others become shared by both.

    ValueError names a parameter that the seats shard differently.
    """
    shards = []
    for path, _, _, kind, source, target in pairs(old, new):
        if kind is None:
            target.data = source.data
        else:
            shards.append(Shard(path, *kind, source, target))
    return shards


class WeightMove:
    """The way of weights from ``old`` to ``new``, as one rank goes it; all ranks at once."""

    def __init__(self, world: World, old: Layout, new: Layout, staging: SharedStaging | None = None) -> None:
        self.world, self.old, self.new, self.staging = world, old, new, staging

    def copies(self, shard: Shard, receiver: int) -> tuple[Copy, ...]:
        return copies(shard.parts, self.old, self.new, receiver)

    @torch.no_grad()
    def run(self, shards: Sequence[Shard]) -> WeightsMoved:
        """Fill the new parameters and empty the old ones."""
        before = live = peak = sum(size_bytes(shard.old) for shard in shards)
        wire = local = 0
        for _, members in groupby(shards, key=lambda shard: shard.layer):
            layer = list(members)
            for shard in layer:
                pieces = held(shard.parts, self.new.tp, self.new.tp_rank(self.world.rank))
                shape = list(shard.old.shape)
                shape[shard.dim] = sum(piece.length for piece in pieces)
                shard.new.data = shard.old.data.new_empty(shape)
            live += sum(size_bytes(shard.new) for shard in layer)
            local += self._slice(layer)
            came, beside = self._gather(layer)
            wire, peak = wire + came, max(peak, live + beside)
            live -= sum(size_bytes(shard.old) for shard in layer)
            for shard in layer:
                shard.old.data = shard.old.data.new_empty(0)
        return WeightsMoved(wire, local, peak - max(before, live))

    def _slice(self, layer: list[Shard]) -> int:
        """Copy what the rank has itself; the bytes."""
        count = 0
        for shard in layer:
            for copy in self.copies(shard, self.world.rank):
                if copy.source == self.world.rank:
                    part = shard.old.narrow(shard.dim, copy.start, copy.length)
                    shard.new.narrow(shard.dim, copy.to, copy.length).copy_(part)
                    count += size_bytes(part)
        return count

    def _gather(self, layer: list[Shard]) -> tuple[int, int]:
        """Take from others what the rank lacks; the bytes that came, and those that it took to do so.

        Through shared memory where the layer fits it, else from rank to rank. Nobody does, where nobody lacks any.
        """
        if not any(copy.source != receiver for _, receiver, copy in self._all(layer)):
            return 0, 0
        olds = [shard.old for shard in layer]
        if self.staging is not None and self.staging.fits(olds):
            return self._gather_shared(layer, olds)
        return self._gather_sent(layer)

    def _all(self, layer: list[Shard]) -> Iterator[tuple[Shard, int, Copy]]:
        """(shard, receiver, copy) of every rank, in one order for all."""
        for shard in layer:
            for receiver in range(self.world.size):
                for copy in self.copies(shard, receiver):
                    yield shard, receiver, copy

    def _gather_shared(self, layer: list[Shard], olds: list[torch.Tensor]) -> tuple[int, int]:
        came, posted = 0, self.staging.post(olds)
        self.world.gather(None)
        for source in range(self.world.size):
            theirs = self.staging.posted(source, olds) if source != self.world.rank else []
            for shard, old in zip(layer, theirs, strict=bool(theirs)):
                for copy in self.copies(shard, self.world.rank):
                    if copy.source == source:
                        part = old.narrow(shard.dim, copy.start, copy.length)
                        shard.new.narrow(shard.dim, copy.to, copy.length).copy_(part)
                        came += size_bytes(part)
        self.world.gather(None)
        return came, posted

    def _gather_sent(self, layer: list[Shard]) -> tuple[int, int]:
        sends, takes, late, beside = [], [], [], 0
        for shard, receiver, copy in self._all(layer):
            if copy.source == receiver or self.world.rank not in (copy.source, receiver):
                continue
            if copy.source == self.world.rank:
                part = shard.old.narrow(shard.dim, copy.start, copy.length)
                whole = part.contiguous()
                sends.append((receiver, whole))
            else:
                part = shard.new.narrow(shard.dim, copy.to, copy.length)
                whole = part if part.is_contiguous() else torch.empty_like(part)
                takes.append((copy.source, whole))
                late += [] if whole is part else [(part, whole)]
            beside += 0 if part.is_contiguous() else size_bytes(whole)
        self.world.send_tensors(sends, takes)
        for part, whole in late:
            part.copy_(whole)
        return sum(size_bytes(whole) for _, whole in takes), beside
