"""What a replica's leader tells the engine every few steps: its running sequences, and the lengths of ended ones."""

from __future__ import annotations

import time
from collections import OrderedDict

from pat.sglang.reports import Steps
from pat.sglang.seats import Seats

REMEMBERED = 4096
"""Request ids whose end is known to be counted; under overlap scheduling an ended request shows up in two batches."""


class StepReports:
    """Of one scheduler process; reports only while it leads a replica. A hook after each step's result."""

    def __init__(self, seats: Seats) -> None:
        self.seats = seats
        self.steps, self.epoch, self.finished = 0, 0, []
        self.counted: OrderedDict[str, None] = OrderedDict()
        self.silent, self.own_s = True, 0.0

    def after_step(self, _result, scheduler, batch, *_arguments, **_options) -> None:
        """After Scheduler.process_batch_result."""
        begin_s = time.perf_counter()
        self._count(scheduler, batch)
        self.own_s += time.perf_counter() - begin_s

    def _count(self, scheduler, batch) -> None:
        seat = self.seats.active
        if seat.scheduler is not scheduler or seat.layout.tp_rank(self.seats.world.rank) != 0:
            return
        self.steps += 1
        for request in batch.reqs:
            if request.finished() and request.rid not in self.counted:
                self.counted[request.rid] = None
                self.finished.append(len(request.output_ids))
        while len(self.counted) > REMEMBERED:
            self.counted.popitem(last=False)
        due = self.silent or self.steps % self.seats.settings.report_steps == 0
        if due or all(request.finished() for request in batch.reqs):
            self.send(scheduler, batch)

    def send(self, scheduler, batch) -> None:
        """Report now. After the last sequence's end the next step is reported at once."""
        running = {r.rid: r for b in (scheduler.running_batch, batch) if b is not None for r in b.reqs}
        alive = [r for r in running.values() if not r.finished() and r.output_ids]
        waiting = len(scheduler.waiting_queue) + len(running) - len(alive) - sum(r.finished() for r in running.values())
        generated = [len(r.output_ids) for r in alive]
        context = [len(r.origin_input_ids) + len(r.output_ids) for r in alive]
        replica = self.seats.active.layout.replica(self.seats.world.rank)
        told = generated, context, self.finished, waiting, self.own_s
        self.seats.reporter.send(Steps(replica, self.epoch, self.steps, *told))
        self.finished, self.silent, self.own_s = [], not alive, 0.0

    def after_switch(self, number: int) -> None:
        """The first step in another layout is reported at once."""
        self.epoch, self.silent = number, True
