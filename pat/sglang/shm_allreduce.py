"""All-reduce for CPU ranks of one node through shared memory: several times faster than gloo for a decode step's sizes.

On by ``PAT_SHM_ALLREDUCE=1``, the same in every arm; gloo serves what it does not: other dtypes, groups over several
nodes, machines other than x86-64 (flags rest on its order of stores).

Each group has its own segment, an anonymous file (memfd) that peers open through /proc: nothing stays in /dev/shm.
A rank writes its tensor into its slot, raises its flag to the number of the call, waits for its peers' flags and adds
the slots in rank order, so that all ranks hold the same bits. Slots are double: a rank that has passed the wait
of call k + 1 knows that every peer is done reading call k, so call k + 2 may overwrite it: one wait a call is enough.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from functools import lru_cache

import torch

SLOT_BYTES = 1 << 20
FLAG_BYTES = 64
"""A flag has a cache line for itself."""
SPINS = 200
"""Looks at a peer's flag (some 60 ns each) before giving the core away: peers may need it."""
YIELDS = 2000
"""Times the core is given away before the wait turns into short sleeps."""
LIMIT_S = 120.0
"""A wait longer than this is an error. Start-up compiles kernels on each rank: tens of seconds on a slow machine."""


class PeerLostError(RuntimeError):
    """A peer of an all-reduce died, failed, or did not come in time."""


class ShmAllReduce:
    """In-place float32 sum over the ranks of a group that share ``memory``.

    ``memory`` holds per rank a flag (the number of its last call, int64) and a pid, then ``2 x size`` slots of
    ``slot_bytes``. Larger tensors go in pieces of a slot. Not thread-safe: one caller a rank.
    """

    def __init__(self, memory, rank: int, size: int, slot_bytes: int = SLOT_BYTES, limit_s: float = LIMIT_S) -> None:
        self.rank, self.size, self.limit_s = rank, size, limit_s
        self.slot_floats = slot_bytes // 4
        self.flags = memoryview(memory).cast("q")
        self.step = FLAG_BYTES // 8
        self.peers = [r for r in range(size) if r != rank]
        self.calls = 0
        floats = torch.frombuffer(memory, dtype=torch.float32, offset=header_bytes(size))
        self.slots = floats.view(2, size, self.slot_floats)
        self.views = lru_cache(maxsize=512)(self._views)
        self.flags[(size + rank) * self.step] = os.getpid()

    def _views(self, parity: int, floats: int) -> list[torch.Tensor]:
        return [self.slots[parity, r, :floats] for r in range(self.size)]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum ``tensor`` over the ranks, in place; PeerLostError where a peer does not come."""
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
        for start in range(0, flat.numel(), self.slot_floats):
            self._reduce(flat[start : start + self.slot_floats] if flat.numel() > self.slot_floats else flat)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view(tensor.shape))
        return tensor

    def _reduce(self, piece: torch.Tensor) -> None:
        self.calls += 1
        slots = self.views(self.calls & 1, piece.numel())
        slots[self.rank].copy_(piece)
        self.flags[self.rank * self.step] = self.calls
        for peer in self.peers:
            if self.flags[peer * self.step] < self.calls:
                self._wait(peer)
        torch.add(slots[0], slots[1], out=piece)
        for slot in slots[2:]:
            piece.add_(slot)

    def _wait(self, peer: int) -> None:
        """Spin, then yield, then sleep until ``peer`` has made this call."""
        flags, at, call = self.flags, peer * self.step, self.calls
        for _ in range(SPINS):
            if flags[at] >= call:
                return
        for _ in range(YIELDS):
            if flags[at] >= call:
                return
            os.sched_yield()
        start_s = time.monotonic()
        while flags[at] < call:
            time.sleep(50e-6)
            waited_s = time.monotonic() - start_s
            if waited_s > self.limit_s:
                raise PeerLostError(f"all-reduce: rank {peer} of {self.size} did not come within {self.limit_s:g} s")
            if waited_s > 0.5 and not alive(flags[(self.size + peer) * self.step]):
                raise PeerLostError(f"all-reduce: the process of rank {peer} of {self.size} is gone")


def header_bytes(size: int) -> int:
    """Flags and pids of ``size`` ranks."""
    return 2 * size * FLAG_BYTES


def segment_bytes(size: int, slot_bytes: int = SLOT_BYTES) -> int:
    return header_bytes(size) + 2 * size * slot_bytes


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def attach(group: torch.distributed.ProcessGroup, limit_s: float = LIMIT_S) -> ShmAllReduce | None:
    """The all-reduce of a gloo group; None, on all ranks alike, where its ranks cannot share memory.

    Collective: the first rank makes the segment, the others open it through /proc while it waits.
    """
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    length, first = segment_bytes(size), torch.distributed.get_global_rank(group, 0)
    fd = os.memfd_create("pat-allreduce") if rank == 0 else -1
    if rank == 0:
        os.ftruncate(fd, length)
    offer = [(boot_id(), os.getpid(), fd)]
    torch.distributed.broadcast_object_list(offer, src=first, group=group)
    machine, pid, remote_fd = offer[0]
    if rank > 0 and machine == boot_id():
        try:
            fd = os.open(f"/proc/{pid}/fd/{remote_fd}", os.O_RDWR)
        except OSError:
            fd = -1
    memory = mmap.mmap(fd, length) if fd >= 0 else None
    reduce = ShmAllReduce(memory, rank, size, limit_s=limit_s) if memory is not None else None
    shared = torch.tensor([reduce is not None], dtype=torch.int32)
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MIN, group=group)  # and: all have mapped it
    if fd >= 0:
        os.close(fd)
    return reduce if shared.item() else None


def boot_id() -> str:
    """The same for processes of one running kernel only."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def register() -> None:
    """Serve float32 CPU tensors of every GroupCoordinator; its segment is made at the group's first all-reduce."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def all_reduce(original, group, tensor):
        if group.world_size == 1 or not tensor.is_cpu or tensor.dtype != torch.float32:
            return original(group, tensor)
        try:
            reduce = group.pat_shm
        except AttributeError:
            reduce = group.pat_shm = attach(group.cpu_group)
        return original(group, tensor) if reduce is None else reduce(tensor)

    if platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create"):
        HookRegistry.register(
            "sglang.srt.distributed.parallel_state.GroupCoordinator.all_reduce", all_reduce, HookType.AROUND
        )
