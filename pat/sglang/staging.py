"""Exchange among ranks of one host through memory that all of them map: for CPU ranks, where gloo copies too often."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch

from pat.sglang.world import World

ALIGN_BYTES = 16


class SharedStaging:
    """A segment of ``size_bytes`` on each rank, mapped by all. Anonymous files: nothing stays behind.

    A rank writes what it sends into its own segment, all meet, and each takes its part from the others' segments. The
    head of a segment holds where the part for each rank begins, in bytes. Pages cost memory when first written to.
    """

    def __init__(self, world: World, segments: list[torch.Tensor]) -> None:
        self.world, self.segments = world, segments
        self.head_bytes = head_bytes(world.size)
        self.size_bytes = len(segments[0]) - self.head_bytes

    @classmethod
    def build(cls, world: World, size_bytes: int) -> SharedStaging | None:
        """Of all ranks at once; None where the host does not let one of them map the others' segments."""
        total = size_bytes + head_bytes(world.size)
        file = os.memfd_create("pat-staging") if hasattr(os, "memfd_create") else -1
        if file >= 0:
            os.ftruncate(file, total)
        addresses = world.gather((os.getpid(), file))
        segments = []
        try:
            for pid, number in addresses:
                with open(f"/proc/{pid}/fd/{number}", "r+b") as peer:
                    segments.append(torch.frombuffer(mmap.mmap(peer.fileno(), total), dtype=torch.uint8))
        except OSError:
            segments = []
        complete = all(world.gather(len(segments) == world.size))
        if file >= 0:
            os.close(file)
        return cls(world, segments) if complete else None

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether :meth:`post` has room for them."""
        return sum(padded_bytes(tensor) for tensor in tensors) <= self.size_bytes

    def post(self, tensors: Sequence[torch.Tensor]) -> int:
        """Write tensors for everyone to read; the bytes. Shapes and types must be the same on all ranks."""
        for place, tensor in zip(self.posted(self.world.rank, tensors), tensors, strict=True):
            place.copy_(tensor)
        return sum(padded_bytes(tensor) for tensor in tensors)

    def posted(self, rank: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What a rank has posted, in the shapes of ``like``; good from one meeting after its post to the next."""
        at, found = self.head_bytes, []
        for tensor in like:
            size = tensor.numel() * tensor.element_size()
            found.append(self.segments[rank][at : at + size].view(tensor.dtype).view(tensor.shape))
            at += padded_bytes(tensor)
        return found

    def outbox(self, sizes: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Where to write the part for each rank: flat tensors of ``sizes`` elements in this rank's segment."""
        mine = self.segments[self.world.rank]
        edges = [0]
        for size in sizes:
            edges.append(edges[-1] + size * dtype.itemsize)
        mine[: 8 * len(edges)].view(torch.int64).copy_(torch.tensor(edges))
        body = mine[self.head_bytes : self.head_bytes + edges[-1]].view(dtype)
        return list(body.split(sizes))

    def inbox(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The part that each rank has written for this one; good until the next :meth:`outbox` after a meeting."""
        parts = []
        for segment in self.segments:
            first, last = segment[: self.head_bytes].view(torch.int64)[self.world.rank :][:2].tolist()
            parts.append(segment[self.head_bytes + first : self.head_bytes + last].view(dtype))
        return parts


def padded_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, rounded up so that one of any type can follow it."""
    return -(-tensor.numel() * tensor.element_size() // ALIGN_BYTES) * ALIGN_BYTES


def head_bytes(ranks: int) -> int:
    """Of the head of a segment: where the part for each rank begins, and the end of the last."""
    return -(-8 * (ranks + 1) // ALIGN_BYTES) * ALIGN_BYTES
