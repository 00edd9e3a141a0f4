"""Seats: all that SGLang builds for one layout in a scheduler process, prepared at start for every layout.

A seat is a Scheduler with its model, KV pool, backends and runtime context. The seats of a process share one world of
ranks, one memory for weights and one for KV cache: a layout beyond the first costs its fused copies and its graphs.
Under the setting ``seats="one"`` only the seat in use holds weights and graphs, and a switch hands them over.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from pat.layout import Layout
from pat.sglang import kv_pool
from pat.sglang.one_seat import OneSeat
from pat.sglang.reports import Hello, Reporter
from pat.sglang.settings import Settings
from pat.sglang.staging import SharedStaging
from pat.sglang.weights import SeatWeights, copied_share, of_first, share, unallocated
from pat.sglang.whole_update import answer_of_all
from pat.sglang.world import World


@dataclass(frozen=True, slots=True)
class Seat:
    """One layout's place to run in: SGLang's Scheduler and the runtime context it was built in."""

    layout: Layout
    context: Any
    scheduler: Any
    weights: SeatWeights

    @property
    def runner(self) -> Any:
        return self.scheduler.tp_worker.model_runner

    @property
    def pool(self) -> Any:
        return self.runner.token_to_kv_pool


class Seats:
    """The seats of one scheduler process. Methods that take ``original`` are hooks around SGLang's own of that name."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.reporter = Reporter(settings.reports)
        self.by_layout: dict[Layout, Seat] = {}
        self.world: World
        self.staging: SharedStaging | None = None
        self.building: Layout | None = None
        self._channels: tuple | None = None
        self._weights: SeatWeights | None = None
        self.one: OneSeat | None = None
        self.active: Seat

    @property
    def first(self) -> Seat:
        return self.by_layout[self.settings.start]

    def scheduler_init(self, original, scheduler, server_args, port_args) -> None:
        """Around Scheduler.__init__: after the first scheduler of the process, build the seats of the other layouts."""
        from sglang.srt.runtime_context import get_context, use_context

        original(scheduler, server_args, port_args)
        if self.building is not None:
            return
        start = self.settings.start
        model = scheduler.tp_worker.model_runner.model
        self.active = self.by_layout[start] = Seat(start, get_context(), scheduler, of_first(model))
        kv_pool.check_pool(self.active.pool)
        if self.settings.seats == "one":
            self.one = OneSeat(self.world, self.staging, start, model)
            self.one.drop_graphs(self.first.runner)
        for layout in self.settings.layouts[1:]:
            self.by_layout[layout] = self._build(layout, port_args)
        self.world.enter(start)
        if self.one is not None:
            self.one.hand_weights(start, model)
            with use_context(self.active.context):
                self.one.capture_graphs(self.first.runner)
        sizes = {s.layout.tp: (s.weights.shared_bytes, s.weights.copied_bytes) for s in self.by_layout.values()}
        self.reporter.send(Hello(self.world.rank, os.getpid(), sizes))

    def _build(self, layout: Layout, port_args) -> Seat:
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import SpawnRanks, create_context, use_context

        rank = self.world.rank
        gpu_id = self.first.context.config_bag("device").gpu_id
        arguments = self._server_args(layout)
        ranks = SpawnRanks(world_rank=layout.tp_rank(rank), dp_rank=layout.replica(rank), gpu_id=gpu_id)
        context = create_context(arguments, role="scheduler", ranks=ranks)
        self.building = layout
        try:
            with use_context(context):
                scheduler = Scheduler(arguments, port_args)
                warm_up(scheduler.tp_worker.model_runner.model)
                if self.one is not None:
                    self.one.drop_graphs(scheduler.tp_worker.model_runner)
        finally:
            self.building = None
        return Seat(layout, context, scheduler, self._weights)

    def _server_args(self, layout: Layout):
        """The first seat's arguments, for a layout whose replicas have more ranks, KV slots and requests."""
        import msgspec

        first, start = self.first.scheduler, self.settings.start
        kv_heads = first.model_config.get_total_num_kv_heads()
        per_rank = max(1, kv_heads // layout.tp)
        changes = {
            "tp_size": layout.tp,
            "dp_size": layout.dp,
            "max_total_tokens": kv_pool.slots_in(self.first.pool, per_rank),
            "max_running_requests": first.max_running_requests * layout.tp // start.tp,
        }
        if first.device == "cuda":
            changes["cuda_graph_max_bs_decode"] = self.settings.tail_graph_batch
        return type(first.server_args)(**msgspec.structs.asdict(first.server_args) | changes)

    def init_parallel_runtime(self, original, *, server_args, device, dist_port) -> None:
        """Around bootstrap.init_parallel_runtime: a further seat takes the world's communicators as they are."""
        if self.building is None:
            return original(server_args=server_args, device=device, dist_port=dist_port)
        from sglang.srt.layers.dp_attention import initialize_dp_attention

        self.world.publish(self.building)
        initialize_dp_attention(server_args=server_args)

    def init_parallel_groups(self, *, backend, dist_init_method, server_args, gpu_id) -> None:
        """In place of bootstrap._init_parallel_groups: one world of all replicas' ranks, not one a replica."""
        from sglang.srt.distributed import bootstrap
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.runtime_context import get_parallel

        parallel, start = get_parallel(), self.settings.start
        self.world = World(self.settings, start.rank(parallel.tp_rank, parallel.dp_rank or 0))
        self.world.build(backend, gpu_id, parallel.dist_timeout)
        self.world.publish(start)
        if backend == "gloo":
            self.staging = SharedStaging.build(self.world, self.settings.staging_bytes)
        bootstrap._tag_groups_for_flashinfer_allreduce_only()
        initialize_dp_attention(server_args=server_args)

    def init_ipc_channels(self, original, scheduler, port_args) -> None:
        """Around Scheduler.init_ipc_channels: a further seat speaks through the first one's sockets, where it leads.

        World rank d leads replica d in every layout, so that a replica's leader always has sockets of its own.
        """
        from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
        from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper

        if self.building is None:
            original(scheduler, port_args)
            self._channels = (scheduler.ipc_channels, scheduler.recv_from_tokenizer, scheduler.load_snapshot_writer)
            return
        mute = SchedulerIpcChannels(
            recv_from_tokenizer=None,
            recv_from_rpc=None,
            send_to_tokenizer=SenderWrapper(None),
            send_to_detokenizer=SenderWrapper(None),
            send_metrics_from_scheduler=None,
        )
        leads = self.building.tp_rank(self.world.rank) == 0
        channels = self._channels if leads else (mute, None, None)
        scheduler.ipc_channels, scheduler.recv_from_tokenizer, scheduler.load_snapshot_writer = channels

    def load_model(self, original, loader, *, model_config, device_config):
        """Around the loaders' load_model: a further seat's weights come from the first one's memory, not from disk."""
        if self.building is None:
            return original(loader, model_config=model_config, device_config=device_config)
        from sglang.srt.model_loader import loader as loading

        dtype = loading.set_default_torch_dtype(model_config.dtype)
        with unallocated(), dtype, torch.device(device_config.device):
            model = loading._initialize_model(model_config, loader.load_config)
        if self.one is not None:
            self.one.hand_weights(self.building, model)
            self._weights = of_first(model)
        else:
            first, start, others = self.first.runner.model, self.settings.start, self.settings.layouts[1:]
            copy_merged = copied_share(first, start, others) <= self.settings.copied_share
            self._weights = share(first, model, start, self.building, self.world.rank, copy_merged)
        loader.counter_after_loading_weights = time.perf_counter()
        return model.eval()

    def create_buffers(self, original, pool) -> None:
        """Around MHATokenToKVPool._create_buffers_normal: a further seat's KV cache lies in the first one's memory."""
        if self.building is None:
            original(pool)
        else:
            kv_pool.borrow_buffers(pool, self.first.pool)

    def available_bytes(self, original, configurator, *arguments) -> int:
        """Around KVCacheConfigurator._profile_available_bytes: a further seat's KV cache is there already."""
        return original(configurator, *arguments) if self.building is None else 1 << 60

    def broadcast_seed(self, original, data, rank, group=None, src=0, **options):
        """Around tp_worker's broadcast of the random seed, which takes a rank of the replica for one of the world."""
        return original(data, self.world.rank, group, src=src, **options)

    def update_weights(self, original, updater, request):
        """Around the weight updates of the active seat: load into the first seat, whose storage covers all others'.

        Where one seat has the weights, that is the active one. The answer comes when every rank of the world is done:
        SGLang's own would be the leader's, while others still read.
        """
        output = original(updater, request) if self.one is not None else self._update_first(original, request)
        answer_of_all(output, self.world.gather((output.success, output.message)))
        if (
            output.success
            and self.active is not self.first
            and request.flush_cache
            and not self.active.scheduler.flush_cache(False)
        ):
            output.success, output.message = False, "weights were updated, but requests of the old ones are running"
        return output

    def _update_first(self, original, request):
        from sglang.srt.runtime_context import use_context

        self.world.enter(self.first.layout)
        try:
            with use_context(self.first.context):
                output = original(self.first.scheduler.weight_updater, request)
        finally:
            self.world.enter(self.active.layout)
        for seat in self.by_layout.values():
            seat.weights.refresh()
        return output


def warm_up(model) -> None:
    """First calls build connections of the communicator, and compile the masked embedding: not in a rollout."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from sglang.srt.utils import DynamicGradMode

    embedding = next(module for module in model.modules() if type(module) is VocabParallelEmbedding)

    @DynamicGradMode()
    def call() -> None:
        for tokens in (1, 2, 5, 64):
            embedding(torch.ones(tokens, dtype=torch.int64, device=embedding.weight.device))

    call()
