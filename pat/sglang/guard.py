"""The end of an engine whose processes have failed: everything that waits gets one clear error, all processes go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import psutil

T = TypeVar("T")
INTERVAL_S = 0.25
KILL_S = 10.0


class EngineDied(RuntimeError):
    """The engine's processes have failed and are gone; start a new engine."""


class Guard:
    """Watches processes, and lets coroutines wait for an engine without waiting for ever."""

    def __init__(self) -> None:
        self.failure: EngineDied | None = None
        self.closed, self._failed, self._failing = threading.Event(), threading.Event(), False
        self._tasks: dict[asyncio.Task, asyncio.AbstractEventLoop] = {}
        self._lock = threading.Lock()
        self._processes: list[psutil.Process] = []

    def watch(self, pids: Iterable[int]) -> None:
        """Fail as soon as one of these processes ends."""
        for pid in sorted(set(pids)):
            try:
                self._processes.append(psutil.Process(pid))
            except psutil.NoSuchProcess:
                self.fail(f"process {pid} of the engine is gone")
        threading.Thread(target=self._watch, name="pat-guard", daemon=True).start()

    def _watch(self) -> None:
        while not self.closed.wait(INTERVAL_S):
            for process in self._processes:
                if not alive(process):
                    self.fail(f"process {process.pid} of the engine is gone")
                    return

    def fail(self, reason: str) -> None:
        """Kill the engine's processes, then end everything that waits, with ``reason``. The first call counts."""
        with self._lock:
            if self._failing or self.closed.is_set():
                return
            self._failing = True
        self.closed.set()
        self.kill()
        self.failure = EngineDied(reason)
        self._failed.set()
        for task, loop in list(self._tasks.items()):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(task.cancel)

    def kill(self) -> None:
        """Kill the watched processes with all their descendants, and wait until they are gone."""
        kill(self._processes)

    def check(self) -> None:
        """Raise EngineDied where the engine has failed, once its processes are gone."""
        if self._failing:
            self._failed.wait(2 * KILL_S)
            raise EngineDied(str(self.failure))

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await ``work``; EngineDied if the engine fails meanwhile."""
        if self._failing:
            work.close()
            self.check()
        task = asyncio.ensure_future(work)
        self._tasks[task] = asyncio.get_running_loop()
        try:
            return await task
        except asyncio.CancelledError:
            if not asyncio.current_task().cancelling():
                self.check()
            task.cancel()
            raise
        finally:
            del self._tasks[task]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(processes: list[psutil.Process], wait_s: float = KILL_S) -> None:
    """Kill processes with all their descendants, and wait until they are gone."""
    doomed = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            doomed |= {p.pid: p for p in [process, *process.children(recursive=True)] if p.pid != os.getpid()}
    for process in doomed.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(doomed.values()), timeout=wait_s)
