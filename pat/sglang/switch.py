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
from dataclasses import dataclass, field
from typing import Any

import torch

from pat.sglang import kv_pool, requests
from pat.sglang.order import Order, fields_of
from pat.sglang.prepare import Prepared, pack_parcels, prepare
from pat.sglang.reports import Answer, Failure
from pat.sglang.seats import Seat, Seats
from pat.sglang.step_reports import StepReports
from pat.sglang.weight_move import WeightsMoved


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
class Cargo:
    """What this rank holds at the commit: its replica's requests by id, the KV slots of the running ones, parcels."""

    known: dict[str, Any]
    slots: dict[str, torch.Tensor]
    parcels: dict[int, bytes]
    sizes: list[dict[int, int]]


class Switcher:
    """Of one scheduler process: runs the event loop of the active seat, and changes seats between two."""

    def __init__(self, seats: Seats, step_reports: StepReports) -> None:
        self.seats, self.step_reports = seats, step_reports

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
        from sglang.srt.runtime_context import use_context

        old, new = self.seats.active, self.seats.by_layout[order.layout]
        with use_context(old.context):
            prepared, cargo = self._prepare(order, old, new, clock)
        self._stage(order, "commit")
        with use_context(new.context):
            moved = self._commit(order, old, new, prepared, cargo, clock)
            if self.seats.one is not None:
                self.seats.one.capture_graphs(new.runner)
            clock.lap("graphs")
        everyone = self.seats.world.gather(moved)
        clock.lap("meet")
        return facts(prepared, everyone, clock.parts, self.seats.world.created)

    def _prepare(self, order: Order, old: Seat, new: Seat, clock: Clock) -> tuple[Prepared, Cargo]:
        """All that can fail: each rank tells its error, and one error is everyone's veto."""
        world, scheduler = self.seats.world, old.scheduler
        described, known, running, error = None, {}, [], None
        try:
            running = requests.settle(scheduler)
            known = {request.rid: request for request in [*running, *scheduler.waiting_queue]}
            requests.check_portable(scheduler, list(known.values()))
            described = requests.describe(scheduler, running, scheduler.waiting_queue, old.layout.replica(self.rank))
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
        prepared, parcels, error = None, {}, None
        try:
            prepared = prepare(order, old, new, [told[d][0] for d in range(old.layout.dp)])
            parcels = pack_parcels(prepared, self.rank, known)
        except Exception:
            error = traceback.format_exc()
        clock.lap("plan")
        packed = world.gather((error, {receiver: len(parcel) for receiver, parcel in parcels.items()}))
        clock.lap("meet")
        veto([error for error, _ in packed])
        rows = scheduler.req_to_token_pool.req_to_token
        slots = {r.rid: rows[r.kv.req_pool_idx, : r.kv.kv_committed_len].long() for r in running}
        return prepared, Cargo(known, slots, parcels, [sizes for _, sizes in packed])

    def _commit(
        self, order: Order, old: Seat, new: Seat, prepared: Prepared, cargo: Cargo, clock: Clock
    ) -> tuple[kv_pool.Moved, WeightsMoved]:
        """Leave the old seat for the new one; there is no way back from here."""
        world, scheduler = self.seats.world, new.scheduler
        arrived = world.swap_parcels(cargo.parcels, cargo.sizes)
        known = dict(cargo.known)
        for packed in arrived.values():
            known |= {attributes["rid"]: requests.unpack(attributes, scheduler) for attributes in packed}
        clock.lap("requests")
        world.enter(new.layout)
        self.seats.active = new
        for seat in (old, new):
            requests.clear(seat.scheduler)
        clock.lap("groups")
        weights = WeightsMoved()
        if self.seats.one is not None:
            self.seats.one.drop_graphs(old.runner)
            weights = self.seats.one.hand_weights(new.layout, new.runner.model)
        clock.lap("weights")
        moved = self._move(old, new, prepared, known, cargo.slots, clock)
        self._stage(order, "after")
        here, targets = new.layout.replica(self.rank), prepared.targets
        for rid in prepared.to_prefill:
            if targets[rid] == here:
                requests.enqueue(scheduler, known[rid])
        # the ranks of a merged replica must draw the same random numbers
        torch.manual_seed(scheduler.random_seed + 7919 * order.number + here)
        self.step_reports.after_switch(order.number)
        clock.lap("requests")
        return moved, weights

    def _move(self, old: Seat, new: Seat, prepared: Prepared, known: dict, slots: dict, clock: Clock) -> kv_pool.Moved:
        """KV cache of the sequences that migrate, into slots of the new seat; then they are its running batch."""
        scheduler, sequences, rids = new.scheduler, prepared.sequences, prepared.rids
        device = torch.get_device_module(scheduler.device)
        device.synchronize()  # the last forward pass wrote KV cache on a stream of its own
        mine, here = old.layout.replica(self.rank), new.layout.replica(self.rank)
        arriving = [p for p in prepared.plan.migrated if p.replica == here]
        arriving.sort(key=lambda p: (sequences[p.sequence].base is not None, p.sequence))
        page, new_slots = scheduler.page_size, {}
        for p in arriving:
            wanted = sequences[p.sequence].tokens - p.start
            new_slots[p.sequence] = scheduler.token_to_kv_pool_allocator.alloc(-(-wanted // page) * page)[:wanted]
        old_slots = {
            p.sequence: slots[rids[p.sequence]][p.start :]
            for p in prepared.plan.migrated
            if sequences[p.sequence].replica == mine
        }
        heads = scheduler.model_config.get_total_num_kv_heads()
        move = kv_pool.KvMove(
            self.seats.world, old.layout, new.layout, heads, sequences, prepared.plan.migrated, old_slots, new_slots
        )
        moved = move.run(old.pool, new.pool, self.seats.settings.staging_bytes, self.seats.staging)
        device.synchronize()
        clock.lap("kv")
        position = {p.sequence: i for i, p in enumerate(arriving)}
        requests.resume(
            scheduler,
            [known[rids[p.sequence]] for p in arriving],
            [sequences[p.sequence].tokens for p in arriving],
            [new_slots[p.sequence] for p in arriving],
            [position[sequences[p.sequence].base] if p.start else None for p in arriving],
        )
        clock.lap("resume")
        return moved

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


def facts(
    prepared: Prepared, everyone: list[tuple[kv_pool.Moved, WeightsMoved]], parts: dict[str, float], created: int
) -> dict[str, Any]:
    """The fields of the switch's record that the engine's process cannot know."""
    plan, cache, weights = prepared.plan, [kv for kv, _ in everyone], [moved for _, moved in everyone]
    return {
        "old": prepared.old,
        "new": prepared.new,
        "parts": parts,
        "kv_wire_bytes": sum(moved.wire_bytes for moved in cache),
        "kv_local_bytes": sum(moved.local_bytes for moved in cache),
        "weight_wire_bytes": sum(moved.wire_bytes for moved in weights),
        "weight_local_bytes": sum(moved.local_bytes for moved in weights),
        "weight_extra_bytes": max(moved.extra_bytes for moved in weights),
        "peak_extra_bytes": max(moved.staging_bytes for moved in cache),
        "migrated": plan.count("migrate"),
        "recomputed": plan.count("recompute"),
        "queued": plan.count("queue"),
        "waiting": len(prepared.waiting),
        "predicted_migrate_s": plan.migrate_s,
        "predicted_recompute_s": plan.recompute_s,
        "migrated_most": plan.migrated_most,
        "recomputed_most": plan.recomputed_most,
        "placements": plan.placements,
        "groups_created": created,
    }
