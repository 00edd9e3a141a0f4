"""Reports from the schedulers to the engine: a ZeroMQ socket beside SGLang's own, so that no answer waits."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq


@dataclass(frozen=True, slots=True)
class Hello:
    """A scheduler is ready. ``seats``: TP degree -> (bytes shared with the first seat's weights, bytes of its own)."""

    rank: int
    pid: int
    seats: dict[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Failure:
    """A scheduler cannot go on; ``reason`` is its traceback."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of switch ``number``: ``error`` where it was vetoed, else the facts of its record."""

    number: int
    sent_s: float
    error: str | None = None
    facts: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """Running sequences of one replica after ``step`` steps, and those ended since the last report.

    ``epoch``: number of the last switch before it, 0 before any. Tokens as lists of one number a sequence:
    ``generated`` and ``context`` (prompt and response) of the running ones, ``finished`` the response lengths of those
    that ended. ``waiting``: requests that have not begun or were retracted. ``own_s``: seconds that the replica's
    leader has spent on reports since the last one. ``sent_s``: time.monotonic when made, the same clock in all
    processes of a host.
    """

    replica: int
    epoch: int
    step: int
    generated: list[int]
    context: list[int]
    finished: list[int]
    waiting: int
    own_s: float = 0.0
    sent_s: float = field(default_factory=time.monotonic)


class Reporter:
    """The sending end, in a scheduler process."""

    def __init__(self, address: str) -> None:
        self.address, self.socket = address, None

    def send(self, report: Hello | Failure | Answer | Steps) -> None:
        if self.socket is None:
            self.socket = zmq.Context.instance().socket(zmq.PUSH)
            self.socket.setsockopt(zmq.LINGER, 1000)
            self.socket.connect(self.address)
        self.socket.send_pyobj(report)


class Mailbox:
    """The receiving end: a thread that hands each report to ``receive``."""

    def __init__(self, receive: Callable[[Any], None]) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="pat-")
        self.address = self.beside("reports")
        self.socket = zmq.Context.instance().socket(zmq.PULL)
        self.socket.bind(self.address)
        self.receive, self.closed = receive, threading.Event()
        self.thread = threading.Thread(target=self._run, name="pat-reports", daemon=True)
        self.thread.start()

    def beside(self, name: str) -> str:
        """Address of another socket in the same directory."""
        return f"ipc://{Path(self.directory.name) / name}"

    def _run(self) -> None:
        while not self.closed.is_set():
            if self.socket.poll(200):
                self.receive(self.socket.recv_pyobj())
        self.socket.close(linger=0)
        self.directory.cleanup()

    def close(self) -> None:
        self.closed.set()
        if threading.current_thread() is not self.thread:
            self.thread.join(timeout=2)
