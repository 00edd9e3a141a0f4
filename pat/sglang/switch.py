"""The switch inside the scheduler processes.

Order -> meet -> settle -> describe, digest, veto -> plan, pack, veto -> commit: communicators, KV cache, requests,
random numbers -> meet -> answer. Until the commit nothing is given up: any rank may veto, and all go on as they were.
An error after it ends the engine with a report. Every meeting has a time limit.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from pat.layout import Layout
from pat.reshard.kv import KvPlan, Room, Sequence, plan_kv
from pat.sglang import kv_pool, requests
from pat.sglang.order import Order, fields_of
from pat.sglang.reports import Answer, Failure
from pat.sglang.seats import Seat, Seats
from pat.sglang.settings import Settings


class Ordered(Exception):
    """Raised out of a seat's event loop: a switch is ordered."""

    def __init__(self, order: Order) -> None:
        self.order = order


class Vetoed(Exception):
    """The switch is off; every rank raises this at the same point."""


@dataclass
class Clock:
    """Seconds of the parts of a switch on this rank."""

    last_s: float = field(default_factory=time.monotonic)
    parts: dict[str, float] = field(default_factory=dict)

    def lap(self, part: str) -> None:
        now_s = time.monotonic()
        self.parts[part] = self.parts.get(part, 0.0) + now_s - self.last_s
        self.last_s = now_s


@dataclass(frozen=True, slots=True)
class Prepared:
    """What all ranks know before the commit: the sequences and who waits, as ids, and the plan.

    rids        of the sequences, in the plan's order
    waiting     [(request id, old replica)] of requests without KV cache, in the order they shall be queued
    """

    rids: list[str]
    sequences: list[Sequence]
    waiting: list[tuple[str, int]]
    plan: KvPlan


class Switcher:
    """Of one scheduler process: runs the event loop of the active seat, and changes seats between two."""

    def __init__(self, seats: Seats) -> None:
        self.seats = seats

    @property
    def rank(self) -> int:
        return self.seats.world.rank

    def run_event_loop(self, original, scheduler) -> None:
        """Around Scheduler.run_event_loop."""
        from sglang.srt.runtime_context import use_context

        try:
            while True:
                seat = self.seats.active
                try:
                    with use_context(seat.context):
                        original(seat.scheduler)
                except Ordered as ordered:
                    self._obey(ordered.order)
                else:
                    scheduler.gracefully_exit = True
                    return
        except Exception:
            self.seats.reporter.send(Failure(self.rank, traceback.format_exc()))
            raise

    def process_input_requests(self, original, scheduler, messages: list) -> None:
        """Around Scheduler.process_input_requests. Nothing follows an order: the router holds it until the answer."""
        order = next((fields for m in messages if (fields := fields_of(m))), None)
        original(scheduler, [m for m in messages if not fields_of(m)])
        if order is not None:
            raise Ordered(Order.decode(order))

    def _obey(self, order: Order) -> None:
        from sglang.srt.utils import DynamicGradMode

        clock = Clock()
        clock.parts["drain"] = clock.last_s - order.sent_s
        error, facts = None, {}
        try:
            with DynamicGradMode():
                facts = self._switch(order, clock)
        except Vetoed as veto:
            error = str(veto)
        if self.rank == 0:
            self.seats.reporter.send(Answer(order.number, time.monotonic(), error, facts))

    def _switch(self, order: Order, clock: Clock) -> dict[str, Any]:
        seats, world, old = self.seats, self.seats.world, self.seats.active
        if order.layout not in seats.by_layout:
            raise Vetoed(f"layout {order.layout} has no seat; this engine has {', '.join(map(str, seats.by_layout))}")
        new = seats.by_layout[order.layout]
        clock.lap("meet")
        with in_seat(old):
            running, waiting, prepared, parcels, sizes = self._prepare(order, old, new, clock)
        self._stage(order, "commit")
        known = {r.rid: r for r in [*running, *waiting]}
        old_rows = old.scheduler.req_to_token_pool.req_to_token
        rows = {r.rid: old_rows[r.kv.req_pool_idx, : r.kv.kv_committed_len].long() for r in running}
        arrived = world.swap_parcels(parcels, sizes)
        clock.lap("requests")
        with in_seat(new):
            world.enter(new.layout)
            seats.active = new
            for seat in (old, new):
                requests.clear(seat.scheduler)
            clock.lap("groups")
            for packed in arrived.values():
                known |= {blob["rid"]: requests.unpack(blob, new.scheduler) for blob in packed}
            moved = self._move(old, new, prepared, known, rows, clock)
            self._stage(order, "after")
            self._queue(new, prepared, known)
            # the ranks of a merged replica must draw the same random numbers
            torch.manual_seed(new.scheduler.random_seed + 7919 * order.number + new.layout.replica(self.rank))
            clock.lap("requests")
        everyone = world.gather(moved)
        clock.lap("meet")
        return self._facts(order, old.layout, new.layout, prepared, everyone, clock)

    def _prepare(self, order: Order, old: Seat, new: Seat, clock: Clock):
        """All that can fail: each rank tells its error, and one error is everyone's veto."""
        world, scheduler = self.seats.world, old.scheduler
        described, error = None, None
        running = waiting = ()
        try:
            running = requests.settle(scheduler)
            waiting = list(scheduler.waiting_queue)
            requests.check_portable(scheduler, [*running, *waiting])
            described = requests.describe(scheduler, running, waiting, old.layout.replica(self.rank))
            self._stage(order, "prepare")
        except Exception:
            error = traceback.format_exc()
        clock.lap("settle")
        told = world.gather((described, error))
        clock.lap("meet")
        veto([error for _, error in told])
        for group in old.layout.groups():
            if len({told[rank][0].digest for rank in group}) > 1:
                raise Vetoed(f"ranks {group} of one replica disagree on its requests")
        error, parcels, prepared = None, {}, None
        try:
            prepared = self._plan(order, old, new, [told[d][0] for d in range(old.layout.dp)])
            parcels = self._pack(old.layout, new.layout, prepared, {r.rid: r for r in [*running, *waiting]})
        except Exception:
            error = traceback.format_exc()
        clock.lap("plan")
        packed = world.gather((error, {receiver: len(parcel) for receiver, parcel in parcels.items()}))
        clock.lap("meet")
        veto([error for error, _ in packed])
        return running, waiting, prepared, parcels, [sizes for _, sizes in packed]

    def _plan(self, order: Order, old: Seat, new: Seat, replicas: list[requests.Described]) -> Prepared:
        rids = [rid for replica in replicas for rid in replica.running]
        sequences: list[Sequence] = []
        for replica in replicas:
            offset = len(sequences)
            sequences += [
                Sequence(s.replica, s.tokens, None if s.base is None else s.base + offset, s.shared_tokens)
                for s in replica.sequences
            ]
        pool, scheduler = new.pool, new.scheduler
        head_bytes = 2 * len(pool.k_buffer) * pool.head_dim * pool.k_buffer[0].element_size()
        plan = plan_kv(
            sequences,
            old.layout,
            new.layout,
            scheduler.model_config.get_total_num_kv_heads(),
            head_bytes,
            Room(scheduler.max_total_num_tokens, scheduler.max_running_requests, scheduler.page_size),
            order.costs,
            order.kv,
        )
        depth = max((len(replica.waiting) for replica in replicas), default=0)
        waiting = [
            (replica.waiting[i], d)
            for i in range(depth)
            for d, replica in enumerate(replicas)
            if i < len(replica.waiting)
        ]
        return Prepared(rids, sequences, waiting, plan)

    def _targets(self, new: Layout, prepared: Prepared) -> dict[str, int]:
        """New replica of every request: the plan's for running ones; those that wait fill up the emptiest in turn."""
        targets = {prepared.rids[p.sequence]: p.replica for p in prepared.plan.placements}
        count = [0] * new.dp
        for replica in targets.values():
            count[replica] += 1
        for rid, _ in prepared.waiting:
            targets[rid] = min(range(new.dp), key=lambda d: (count[d], d))
            count[targets[rid]] += 1
        return targets

    def _pack(self, old: Layout, new: Layout, prepared: Prepared, known: dict[str, Any]) -> dict[int, bytes]:
        """Parcels for the ranks that get requests of this rank's replica without having them; its leader sends them."""
        mine = old.replica(self.rank)
        if old.tp_rank(self.rank) != 0:
            return {}
        targets = self._targets(new, prepared)
        origin = {prepared.rids[i]: s.replica for i, s in enumerate(prepared.sequences)} | dict(prepared.waiting)
        parcels = {}
        for replica, ranks in enumerate(new.groups()):
            leaving = [known[rid] for rid, at in origin.items() if at == mine and targets[rid] == replica]
            if leaving:
                content = requests.pack(leaving)
                parcels |= {rank: content for rank in ranks if old.replica(rank) != mine}
        return parcels

    def _move(self, old: Seat, new: Seat, prepared: Prepared, known, rows, clock: Clock) -> kv_pool.Moved:
        """KV cache of the sequences that migrate, into slots of the new seat; then they are its running batch."""
        scheduler, here = new.scheduler, new.layout.replica(self.rank)
        stays = [p for p in prepared.plan.migrated if p.replica == here]
        stays.sort(key=lambda p: (prepared.sequences[p.sequence].base is not None, p.sequence))
        page = scheduler.page_size
        lengths = {p.sequence: prepared.sequences[p.sequence].tokens for p in stays}
        new_slots = {}
        for p in stays:
            wanted = lengths[p.sequence] - p.start
            slots = scheduler.token_to_kv_pool_allocator.alloc(-(-wanted // page) * page)
            new_slots[p.sequence] = slots[:wanted]
        resumed = [p for p in stays if known[prepared.rids[p.sequence]] is not None]
        old_slots = {
            p.sequence: rows[prepared.rids[p.sequence]][p.start :]
            for p in prepared.plan.migrated
            if prepared.sequences[p.sequence].replica == old.layout.replica(self.rank)
        }
        heads = scheduler.model_config.get_total_num_kv_heads()
        plan = prepared.plan.placements
        move = kv_pool.KvMove(
            self.seats.world, old.layout, new.layout, heads, prepared.sequences, plan, old_slots, new_slots
        )
        moved = move.run(old.pool, new.pool, self.seats.settings.staging_bytes)
        clock.lap("kv")
        position = {p.sequence: i for i, p in enumerate(resumed)}
        requests.resume(
            scheduler,
            [known[prepared.rids[p.sequence]] for p in resumed],
            [lengths[p.sequence] for p in resumed],
            [new_slots[p.sequence] for p in resumed],
            [position[prepared.sequences[p.sequence].base] if p.start else None for p in resumed],
        )
        clock.lap("resume")
        return moved

    def _queue(self, new: Seat, prepared: Prepared, known: dict[str, Any]) -> None:
        """Requests that are to be prefilled: those that had begun first."""
        here, targets = new.layout.replica(self.rank), self._targets(new.layout, prepared)
        again = [prepared.rids[p.sequence] for p in prepared.plan.placements if p.how != "migrate"]
        for rid in [*again, *(rid for rid, _ in prepared.waiting)]:
            if targets[rid] == here:
                requests.enqueue(new.scheduler, known[rid])

    def _facts(self, order, old: Layout, new: Layout, prepared: Prepared, everyone, clock: Clock) -> dict[str, Any]:
        plan = prepared.plan
        return {
            "old": old,
            "new": new,
            "parts": clock.parts,
            "kv_wire_bytes": sum(m.wire_bytes for m in everyone),
            "kv_local_bytes": sum(m.local_bytes for m in everyone),
            "peak_extra_bytes": max(m.staging_bytes for m in everyone),
            "migrated": plan.count("migrate"),
            "recomputed": plan.count("recompute"),
            "queued": plan.count("queue"),
            "waiting": len(prepared.waiting),
            "predicted_migrate_s": plan.migrate_s,
            "predicted_recompute_s": plan.recompute_s,
            "placements": plan.placements,
            "groups_created": self.seats.world.created,
        }

    def _stage(self, order: Order, stage: str) -> None:
        """Fail here if a test has ordered it."""
        if order.fault.stage == stage and order.fault.rank == self.rank:
            if order.fault.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError(f"fault staged on rank {self.rank} in {stage}")


def veto(errors: list[str | None]) -> None:
    """Vetoed with the first error's last line, if there is one."""
    first = next((error for error in errors if error), None)
    if first:
        raise Vetoed(first.strip().splitlines()[-1])


@contextmanager
def in_seat(seat: Seat):
    """SGLang's process-wide configuration is the seat's."""
    from sglang.srt.runtime_context import use_context

    with use_context(seat.context):
        yield


def uncompiled(original, *arguments, **options):
    """Around a compiled function: on the CPU, compiling it takes every rank of every seat seconds at start."""
    return original._torchdynamo_orig_callable(*arguments, **options)


def register() -> None:
    """Hook the processes of an engine whose settings are in the environment."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from pat.sglang.router import Router

    settings = Settings.from_environment()
    seats = Seats(settings)
    switcher, router = Switcher(seats), Router(settings)

    def around(target: str, hook, kind=HookType.AROUND) -> None:
        HookRegistry.register(f"sglang.srt.{target}", hook, kind)

    scheduler = "managers.scheduler.Scheduler"
    around(f"{scheduler}.__init__", seats.scheduler_init)
    around(f"{scheduler}.init_ipc_channels", seats.init_ipc_channels)
    around(f"{scheduler}.run_event_loop", switcher.run_event_loop)
    around(f"{scheduler}.process_input_requests", switcher.process_input_requests)
    around("distributed.bootstrap.init_parallel_runtime", seats.init_parallel_runtime)
    around("distributed.bootstrap._init_parallel_groups", seats.init_parallel_groups, HookType.REPLACE)
    around("model_loader.loader.DefaultModelLoader.load_model", seats.load_model)
    around("model_loader.loader.DummyModelLoader.load_model", seats.load_model)
    around("mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal", seats.create_buffers)
    updater = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    for how in ("disk", "tensor", "distributed"):
        around(f"{updater}.update_weights_from_{how}", seats.update_weights)
    around("managers.data_parallel_controller.DataParallelController.event_loop", router.event_loop)
    if not torch.cuda.is_available():
        around("layers.vocab_parallel_embedding.get_masked_input_and_mask", uncompiled)
    # CPU only: it pads heads and sizes for each TP, so that shards of two layouts would not be of the same whole
    around("model_executor.model_runner.adjust_config_with_unaligned_cpu_tp", lambda original, config, *_, **__: config)
    # SGLang takes a local rank for a global one here
    around("managers.tp_worker.broadcast_pyobj", seats.broadcast_seed)
