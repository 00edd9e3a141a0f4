"""The world of all ranks: communicators of every layout, built once at start, and the meetings of a switch."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pat.layout import Layout
from pat.reshard.groups import group_sets
from pat.sglang.settings import Settings


class World:
    """Of one scheduler process, world rank ``rank``. A switch creates no communicator: ``created`` stays as it is."""

    def __init__(self, settings: Settings, rank: int) -> None:
        self.settings, self.rank, self.size = settings, rank, settings.start.world
        self.groups: dict[int, Any] = {}
        self.created = 0

    def build(self, backend: str, gpu_id: int, timeout_s: int | None) -> None:
        """Join the world and build the communicators of all layouts; every rank at once."""
        from sglang.srt.distributed import parallel_state

        parallel_state.init_distributed_environment(
            backend=backend,
            world_size=self.size,
            rank=self.rank,
            local_rank=gpu_id,
            timeout=timeout_s,
            distributed_init_method=f"tcp://127.0.0.1:{self.settings.port}",
        )
        self.all = parallel_state._WORLD
        for tp, ranks in group_sets(self.settings.layouts).items():
            self.groups[tp] = parallel_state.init_model_parallel_group(
                [list(group) for group in ranks],
                gpu_id,
                backend,
                use_custom_allreduce=None if tp > 1 else False,
                group_name=f"pat_tp{tp}",
            )
        wait = timedelta(seconds=self.settings.wait_s)
        self.control = dist.new_group(list(range(self.size)), backend="gloo", timeout=wait)
        self.created = len(self.groups) + 1

    def enter(self, layout: Layout) -> None:
        """Point SGLang's process-wide handles at the communicators of ``layout``."""
        from sglang.srt.distributed import parallel_state as state

        tp, alone = self.groups[layout.tp], self.groups[1]
        state._TP = state._ATTN_TP = state._MOE_TP = tp
        state._PP = state._SELF_PP = state._ATTN_CP = state._MOE_EP = state._MOE_DP = alone

    def publish(self, layout: Layout) -> None:
        """Write the communicators of ``layout`` into SGLang's current runtime context; once for each context."""
        from sglang.srt.runtime_context import get_parallel

        self.enter(layout)
        tp, alone = self.groups[layout.tp], self.groups[1]
        get_parallel().override_permanently(
            world_group=tp,
            tp_group=tp,
            attn_tp_group=tp,
            moe_tp_group=tp,
            pp_group=alone,
            attn_cp_group=alone,
            moe_ep_group=alone,
            moe_dp_group=alone,
        )

    def gather(self, item: Any) -> list[Any]:
        """Everyone's ``item``, by rank. RuntimeError where a rank is gone or does not come within the time limit."""
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.control)
        return items

    def swap_parcels(self, parcels: dict[int, bytes], sizes: list[dict[int, int]]) -> dict[int, Any]:
        """Send ``parcels`` (by receiver); the unpickled ones received, by sender. ``sizes``: everyone's, by sender."""
        incoming = [sizes[sender].get(self.rank, 0) for sender in range(self.size)]
        outgoing = [len(parcels.get(receiver, b"")) for receiver in range(self.size)]
        if not any(any(row.values()) for row in sizes):
            return {}
        content = bytearray(b"".join(parcels.get(receiver, b"") for receiver in range(self.size)))
        sent = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, incoming, outgoing, group=self.control)
        pieces = received.split(incoming)
        return {rank: pickle.loads(piece.numpy().tobytes()) for rank, piece in enumerate(pieces) if len(piece)}

    def send_tensors(self, sends: list[tuple[int, torch.Tensor]], takes: list[tuple[int, torch.Tensor]]) -> None:
        """Send to and receive from other ranks, (rank, contiguous tensor) each; between two ranks in one order."""
        group = self.all.device_group
        work = [dist.P2POp(dist.isend, tensor, rank, group) for rank, tensor in sends]
        work += [dist.P2POp(dist.irecv, tensor, rank, group) for rank, tensor in takes]
        for pending in dist.batch_isend_irecv(work) if work else ():
            pending.wait()

    def swap_tensors(self, sent: torch.Tensor, outgoing: list[int], incoming: list[int]) -> torch.Tensor:
        """All-to-all of a flat tensor in the ranks' order; sizes in elements, this rank's own part included."""
        received = sent.new_empty(sum(incoming))
        dist.all_to_all_single(received, sent, incoming, outgoing, group=self.all.device_group)
        return received
