"""What an engine leaves behind: child processes and sockets. Find them, see whether they live, end them."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from multiprocessing import resource_tracker

import psutil
import zmq


def child_processes() -> list:
    return psutil.Process().children(recursive=True)


def lives(process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def end_processes(processes: list) -> None:
    """Kill them and wait until they are gone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=20)


def socket_contexts() -> list[zmq.Context]:
    """ZeroMQ contexts of this process."""
    return [found for found in gc.get_objects() if issubclass(type(found), zmq.Context) and not found.closed]


def close_contexts(contexts: list[zmq.Context]) -> None:
    """Close them and their sockets, dropping what was not sent: left to the garbage collector, a context waits for ever
    for its messages to processes that are gone."""
    for context in contexts:
        context.destroy(linger=0)


def quiet_resource_tracker() -> None:
    """Start Python's resource tracker without its stderr: at exit it reports SGLang's segments, which are in order."""
    if getattr(resource_tracker._resource_tracker, "_pid", None) is not None:
        return
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        resource_tracker.ensure_running()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
