"""KV cache of the seats: one memory, divided by each layout into slots of its own number of heads; moved in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pat.layout import Layout
from pat.reshard import kv
from pat.reshard.kv import Placement, head_copies
from pat.sglang.staging import SharedStaging
from pat.sglang.world import World


def buffers(pool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(K, V) of each layer of an SGLang MHATokenToKVPool, each [slots, KV heads of the rank, head size]."""
    return list(zip(pool.k_buffer, pool.v_buffer, strict=True))


def check_pool(pool) -> None:
    """ValueError unless the pool is of the plain kind that can be divided anew for another layout."""
    whole = not pool.is_quantized_kv_cache and not pool.post_capture_active
    plain = pool.kv_cache_layout == "nhd" and whole and pool.head_dim == pool.v_head_dim
    if type(pool).__name__ != "MHATokenToKVPool" or not plain:
        raise ValueError(f"switch: KV pool {type(pool).__name__} ({pool.kv_cache_layout}) cannot be switched")


def slots_in(pool, heads: int) -> int:
    """Slots that the pool's memory has with ``heads`` KV heads a slot instead of its own."""
    return pool.size * pool.head_num // heads


def borrow_buffers(pool, first) -> None:
    """Let ``pool`` lie in the memory of ``first``, in place of memory of its own."""
    rows = pool.size + pool.page_size
    padded = -(-rows // pool.page_size) * pool.page_size
    shape = (2, padded, pool.head_num, pool.head_dim)
    layers = []
    for key, _ in buffers(first):
        whole = key.new_empty(0).set_(key.untyped_storage())
        count = 2 * padded * pool.head_num * pool.head_dim
        if count > whole.numel():
            raise ValueError(f"KV pool of {pool.size} slots x {pool.head_num} heads exceeds the memory it shall share")
        layers.append(whole[:count].view(shape))
    pool.k_buffer = [layer[0, :rows] for layer in layers]
    pool.v_buffer = [layer[1, :rows] for layer in layers]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Part of a move: ``heads`` KV heads from ``head`` on, of all tokens in ``slots``."""

    slots: torch.Tensor
    head: int
    heads: int

    def count(self, width: int) -> int:
        """Elements of K and V in one layer, ``width`` a head."""
        return 2 * self.slots.numel() * self.heads * width


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that left this rank, that stayed on it, and that the exchange took beside the pools at its peak."""

    wire_bytes: int = 0
    local_bytes: int = 0
    staging_bytes: int = 0


class KvMove:
    """The moves of one switch as one rank sees them: what it sends to and takes from each rank, in one agreed order.

    old_slots, new_slots: sequence -> slots of its tokens from ``start`` on, for sequences of the rank's replicas.
    """

    def __init__(
        self,
        world: World,
        old: Layout,
        new: Layout,
        kv_heads: int,
        sequences: list[kv.Sequence],
        placements: tuple[Placement, ...],
        old_slots: dict[int, torch.Tensor],
        new_slots: dict[int, torch.Tensor],
    ) -> None:
        self.world = world
        self.sends: list[list[Transfer]] = [[] for _ in range(world.size)]
        self.takes: list[list[Transfer]] = [[] for _ in range(world.size)]
        for receiver in range(world.size):
            target = new.replica(receiver)
            for source in range(old.dp):
                ids = [
                    p.sequence
                    for p in placements
                    if p.how == "migrate" and p.replica == target and sequences[p.sequence].replica == source
                ]
                if not ids:
                    continue
                for copy in head_copies(kv_heads, old, new, receiver, source):
                    if copy.source == world.rank:
                        slots = torch.cat([old_slots[i] for i in ids])
                        self.sends[receiver].append(Transfer(slots, copy.start, copy.length))
                    if receiver == world.rank:
                        slots = torch.cat([new_slots[i] for i in ids])
                        self.takes[copy.source].append(Transfer(slots, copy.to, copy.length))
        moved = [p for p in placements if p.how == "migrate"]
        self.most_heads = sum(sequences[p.sequence].tokens - p.start for p in moved) * kv_heads

    def run(self, old_pool, new_pool, staging_bytes: int, shared: SharedStaging | None = None) -> Moved:
        """Move layer by layer, as many layers at once as ``staging_bytes`` allow; the pools share their memory.

        Through ``shared`` memory where it is there and large enough, else by an all-to-all.
        """
        if not self.most_heads:
            return Moved()
        old_layers, new_layers = buffers(old_pool), buffers(new_pool)
        like = new_layers[0][0]
        width, item = like.shape[-1], like.element_size()
        outgoing = [sum(t.count(width) for t in transfers) for transfers in self.sends]
        incoming = [sum(t.count(width) for t in transfers) for transfers in self.takes]
        # by a bound that all ranks know, so that all do the same
        layer_bytes = 2 * self.most_heads * width * item
        together = max(1, staging_bytes // (2 * layer_bytes))
        total, peak = 0, 0
        for first in range(0, len(old_layers), together):
            group = slice(first, first + together)
            layers = len(old_layers[group])
            sizes = [n * layers for n in outgoing], [n * layers for n in incoming]
            if shared is not None and layers * layer_bytes <= shared.size_bytes:
                self._collect(old_layers[group], shared.outbox(sizes[0], like.dtype))
                self.world.gather(None)
                self._deliver(shared.inbox(like.dtype), new_layers[group])
                self.world.gather(None)
                peak = max(peak, sum(sizes[0]) * item)
            else:
                sent = like.new_empty(sum(sizes[0]))
                self._collect(old_layers[group], list(sent.split(sizes[0])))
                received = self.world.swap_tensors(sent, *sizes)
                self._deliver(received.split(sizes[1]), new_layers[group])
                peak = max(peak, (sum(sizes[0]) + sum(sizes[1])) * item)
            total += sum(sizes[0]) * item
        own = outgoing[self.world.rank] * len(old_layers) * item
        return Moved(total - own, own, peak)

    def _collect(self, layers: list[tuple[torch.Tensor, torch.Tensor]], parts: Sequence[torch.Tensor]) -> None:
        """Copy what goes to each rank out of the pool, into its flat part."""
        for part, transfers in zip(parts, self.sends, strict=True):
            for buffer, t, flat in pieces(layers, transfers, part):
                torch.index_select(buffer[:, t.head : t.head + t.heads], 0, t.slots, out=flat)

    def _deliver(self, parts: Sequence[torch.Tensor], layers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy what came from each rank into the pool."""
        for part, transfers in zip(parts, self.takes, strict=True):
            for buffer, t, flat in pieces(layers, transfers, part):
                buffer[t.slots, t.head : t.head + t.heads] = flat


def pieces(
    layers: list[tuple[torch.Tensor, torch.Tensor]], transfers: list[Transfer], part: torch.Tensor
) -> Iterator[tuple[torch.Tensor, Transfer, torch.Tensor]]:
    """(pool buffer, transfer, its place in the flat ``part`` as [slots, heads, head size]) in the order agreed on."""
    at = 0
    for buffer in (buffer for pair in layers for buffer in pair):
        for t in transfers:
            shape = (t.slots.numel(), t.heads, buffer.shape[-1])
            count = shape[0] * shape[1] * shape[2]
            yield buffer, t, part[at : at + count].view(shape)
            at += count
