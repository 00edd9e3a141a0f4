"""AdaptiveEngine: SGLang's Engine, with a layout that can change while requests are in flight."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq
from safetensors.torch import save_file
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

from pat.layout import Layout
from pat.policy import Policy
from pat.reshard.kv import MODES, KvCosts
from pat.sglang import warm
from pat.sglang.controller import Controller
from pat.sglang.guard import EngineDied, Guard
from pat.sglang.launch import (
    QuitHandler,
    check_arguments,
    children,
    fail_start,
    free_port,
    memory_directory,
    not_of_sigquit,
)
from pat.sglang.order import Fault, Order, Route
from pat.sglang.record import SwitchRecord
from pat.sglang.reports import Answer, Failure, Hello, Mailbox, Steps
from pat.sglang.settings import VARIABLE, Settings
from pat.sglang.whole_update import VARIABLE as WHOLE_UPDATE

START_S = 30.0
DEFAULTS = {"load_balance_method": "round_robin", "sleep_on_idle": True}
"""``sleep_on_idle``: on a CPU, replicas with nothing to do would take the cores of those that have."""


class SwitchVetoed(RuntimeError):
    """A switch did not happen; the engine goes on in its old layout with all requests."""


class AdaptiveEngine(Engine):
    """Takes SGLang's arguments, except that ``layouts`` stands for ``tp_size`` and ``dp_size``.

    A request's ``routed_dp_rank`` counts modulo the replicas of the layout it arrives in.

    layouts   the layouts it can take; it starts in the one with the lowest TP
    policy    decides on the layout during rollouts; None: only :meth:`switch` does
    costs     rates that the choice between migration and recomputation of KV cache follows from, by the layout to go
              to or the same for all; :func:`pat.sglang.calibrate.measure_costs` measures them
    wait_s    the most that ranks wait for one another in a switch, and three times that the engine for its answer
    staging_bytes, copied_share, tail_graph_batch, seats   see :class:`pat.sglang.settings.Settings`

    Attributes: ``seats``: TP degree -> (bytes of weights shared with the first seat, bytes of its own) on rank 0; with
    one seat at a time, the bytes it has when it is in use. ``pids``: process
    of each world rank. ``records``: of the switches so far.
    """

    def __init__(
        self,
        *,
        model_path: str,
        layouts: tuple[Layout, ...],
        costs: KvCosts | Mapping[Layout, KvCosts] = KvCosts(),  # noqa: B008 (frozen)
        wait_s: float = 60.0,
        policy: Policy | None = None,
        staging_bytes: int = Settings.staging_bytes,
        copied_share: float = Settings.copied_share,
        tail_graph_batch: int = Settings.tail_graph_batch,
        seats: str = Settings.seats,
        **arguments: Any,
    ) -> None:
        check_arguments(model_path, layouts, arguments)
        self.guard, self.controller = Guard(), None
        self.costs = {a: costs if isinstance(costs, KvCosts) else costs[a] for a in layouts}
        self.records = []
        self._hellos: queue.Queue[Hello] = queue.Queue()
        self._answers: queue.Queue[Answer] = queue.Queue()
        self._turn, self._number = threading.Lock(), 0
        self._mailbox = Mailbox(self._receive)
        self._commands = zmq.Context.instance().socket(zmq.PUSH)
        self.settings = Settings(
            layouts=tuple(sorted(set(layouts))),
            port=free_port(),
            reports=self._mailbox.address,
            orders=self._mailbox.beside("orders"),
            wait_s=wait_s,
            report_steps=(policy and policy.interval_steps) or 0,
            staging_bytes=staging_bytes,
            copied_share=copied_share,
            tail_graph_batch=tail_graph_batch,
            seats=seats,
        )
        self.layout, self.epoch = self.settings.start, 0
        if policy is not None:
            self.controller = Controller(policy, self.switch, lambda: self.layout, lambda: self.epoch, self.in_flight)
        self._commands.connect(self.settings.orders)
        warm.start()
        before = children()
        try:
            self._launch(model_path, arguments)
        except BaseException:
            self.guard.watch(children() - before)
            self.shutdown()
            raise

    def _launch(self, model_path: str, arguments: dict[str, Any]) -> None:
        """SGLang's start. From its end on, a failed process raises an error here instead of killing this process."""
        switches = len(self.settings.layouts) > 1
        part, value = (VARIABLE, self.settings.to_json()) if switches else (WHOLE_UPDATE, "1")
        os.environ[part] = value
        logging.getLogger("sglang.srt.entrypoints.engine").addFilter(not_of_sigquit)
        try:
            super().__init__(
                model_path=model_path,
                tp_size=self.layout.tp,
                dp_size=self.layout.dp,
                **DEFAULTS | {"custom_sigquit_handler": fail_start} | arguments,
            )
        finally:
            os.environ.pop(part, None)
        manager = self.tokenizer_manager
        manager._subprocess_watchdog.stop()
        manager.signal_handler_class = lambda manager: QuitHandler(manager, self.guard)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, QuitHandler(manager, self.guard).running_phase_sigquit_handler)
        try:
            hellos = [self._hellos.get(timeout=START_S) for _ in range(self.layout.world if switches else 0)]
        except queue.Empty:
            raise EngineDied("no scheduler took the plugin: is the package installed, with entry point pat?") from None
        self.seats = next((hello.seats for hello in hellos if hello.rank == 0), {})
        self.pids = {hello.rank: hello.pid for hello in hellos}
        self.guard.watch([*self.get_all_child_pids(), *self.pids.values()])

    def _receive(self, report: Hello | Answer | Failure | Steps) -> None:
        """In the mailbox's thread."""
        if isinstance(report, Answer):
            self._answers.put(report)
        elif isinstance(report, Steps):
            self.controller.take(report)
        elif isinstance(report, Hello):
            self._hellos.put(report)
        else:
            self.guard.fail(f"rank {report.rank} failed: {report.reason}")

    def switch(self, layout: Layout, kv: str = "auto", fault: Fault = Fault()) -> SwitchRecord:  # noqa: B008 (frozen)
        """Go to ``layout`` at the next step boundary, with all requests. From any thread; one switch at a time.

        ``kv``: "auto", "migrate" or "recompute". ``fault`` is for tests. SwitchVetoed where the old layout goes on,
        EngineDied where a process was lost, ValueError for a layout that the engine was not started with.
        """
        if layout not in self.settings.layouts:
            known = ", ".join(map(str, self.settings.layouts))
            raise ValueError(f"switch: {layout} is not one of this engine's layouts ({known})")
        if kv not in MODES:
            raise ValueError(f"switch: kv {kv!r} is none of {', '.join(MODES)}")
        with self._turn:
            self.guard.check()
            if layout == self.layout:
                raise SwitchVetoed(f"the engine is in {layout} already")
            self._number += 1
            order = Order(self._number, time.monotonic(), layout, kv, self.costs[layout], fault)
            self._commands.send_pyobj(order)
            answer = self._answer()
            if answer.error is None:
                self.layout, self.epoch = layout, order.number
            self.tokenizer_manager.update_control_communicator_fan_out(self.layout.dp)
            self.tokenizer_manager.elastic_worker_count = self.layout.dp
            self._commands.send_pyobj(Route(self.layout.dp))
            if answer.error is not None:
                raise SwitchVetoed(f"{layout}: {answer.error}")
            now_s = time.monotonic()
            record = SwitchRecord.of(order.number, answer.facts, now_s - order.sent_s, now_s - answer.sent_s)
            self.records.append(record)
            return record

    def _answer(self) -> Answer:
        """The answer to the last order. A scheduler that fails reports it, one that is gone is seen by the guard."""
        deadline_s = time.monotonic() + 3 * self.settings.wait_s
        while time.monotonic() < deadline_s:
            self.guard.check()
            try:
                answer = self._answers.get(timeout=0.1)
            except queue.Empty:
                continue
            if answer.number == self._number:
                return answer
        self.guard.fail(f"no answer to switch {self._number} in {3 * self.settings.wait_s:.0f} s")
        self.guard.check()

    async def async_switch(self, layout: Layout, kv: str = "auto", fault: Fault = Fault()) -> SwitchRecord:  # noqa: B008
        """:meth:`switch`, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(None, self.switch, layout, kv, fault)

    async def async_generate(self, *args: Any, **kwargs: Any) -> dict | list[dict] | AsyncIterator[dict]:
        """As SGLang's. EngineDied where the engine fails meanwhile."""
        result = await self.guard.run(super().async_generate(*args, **kwargs))
        return self._guarded(result) if kwargs.get("stream") is True else result

    async def _guarded(self, chunks: AsyncIterator[dict]) -> AsyncIterator[dict]:
        while True:
            try:
                yield await self.guard.run(anext(chunks))
            except StopAsyncIteration:
                return

    def generate(self, *args: Any, **kwargs: Any) -> dict | list[dict] | Iterator[dict]:
        """As SGLang's. EngineDied where the engine fails meanwhile.

        A batch given as ``input_ids`` is a rollout, in which the policy, if there is one, decides on the layout.
        """
        if kwargs.get("stream") is True:
            return self._chunks(self.loop.run_until_complete(self.async_generate(*args, **kwargs)))
        prompts = kwargs.get("input_ids")
        whole = self.controller is not None and prompts and isinstance(prompts[0], list) and not self.in_flight()
        with self.rollout([len(prompt) for prompt in prompts]) if whole else nullcontext():
            return self.loop.run_until_complete(self.async_generate(*args, **kwargs))

    def _chunks(self, chunks: AsyncIterator[dict]) -> Iterator[dict]:
        while True:
            try:
                yield self.loop.run_until_complete(anext(chunks))
            except StopAsyncIteration:
                return

    async def async_update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace weights, by their Hugging Face names, in every seat of every rank, whatever the layout.

        Nothing must be running; cached prefixes are dropped. RuntimeError with SGLang's message where it fails. The
        tensors go through a file in memory: ranks of a higher TP need more of them than that layout's own shards.
        """
        with tempfile.TemporaryDirectory(prefix="pat-weights-", dir=memory_directory()) as directory:
            save_file({name: tensor.contiguous() for name, tensor in weights}, Path(directory) / "model.safetensors")
            await self.async_load_weights(directory)

    async def async_load_weights(self, directory: str) -> None:
        """As :meth:`async_update_weights`, from the safetensors files of a directory; all weights or a part of them."""
        request = UpdateWeightFromDiskReqInput(model_path=str(directory), load_format="safetensors")
        work = self.tokenizer_manager.update_weights_from_disk(request, None)
        success, message, _ = await self.guard.run(work)
        if not success:
            raise RuntimeError(f"update of weights: {message}")

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """:meth:`async_update_weights`, from outside of an event loop."""
        self.loop.run_until_complete(self.async_update_weights(weights))

    def in_flight(self) -> int:
        """Requests submitted and not yet answered."""
        return sum(not state.finished for state in list(self.tokenizer_manager.rid_to_state.values()))

    @contextmanager
    def rollout(self, prompt_tokens: Sequence[int]) -> Iterator[Controller]:
        """While the block runs, the policy decides on the layout: first for prompts of these lengths, then by reports.

        For an engine with a policy, with nothing in flight. Yields the controller, whose decisions can be looked at.
        """
        if self.controller is None:
            raise ValueError("AdaptiveEngine: a rollout needs an engine with a policy")
        self.controller.begin(np.asarray(prompt_tokens))
        try:
            yield self.controller
        finally:
            self.controller.end()

    def abort(self, rid: str = "", all_requests: bool = False) -> None:
        """End a request, or all of them, where it is: it returns what it has generated."""
        self.tokenizer_manager.abort_request(rid=rid, abort_all=all_requests)

    def _resolve_routed_dp_rank(self, routed_dp_rank: int | None, data_parallel_rank: int | None) -> int | None:
        rank = super()._resolve_routed_dp_rank(routed_dp_rank, data_parallel_rank)
        return rank if rank is None else rank % self.layout.dp

    def open_session(self, *args: Any, **kwargs: Any) -> str:
        raise ValueError("AdaptiveEngine: sessions are not supported; a session's KV cache cannot be moved")

    def shutdown(self) -> None:
        """End the engine and its processes. May be called again, and after a failure."""
        self.guard.closed.set()
        self._mailbox.close()
        self._commands.close(linger=0)
        if getattr(self, "tokenizer_manager", None) is not None:
            self.tokenizer_manager._subprocess_watchdog.stop()
            for task in self.tokenizer_manager.asyncio_tasks:
                task.cancel()
        if getattr(self, "send_to_rpc", None) is not None:
            self.send_to_rpc.close(linger=0)
            self.send_to_rpc = None
        self.guard.kill()
        atexit.unregister(self.shutdown)
