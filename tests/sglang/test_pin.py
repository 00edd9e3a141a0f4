"""Pinning to a core, in a process of its own."""

import multiprocessing
import os
import threading

import pytest

from pat.sglang.pin import core_of, pin_process


def pinned_cores(queue) -> None:
    stop = threading.Event()
    threading.Thread(target=stop.wait, daemon=True).start()
    pin_process(min(os.sched_getaffinity(0)))
    queue.put([os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")])
    stop.set()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_every_thread_is_pinned() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=pinned_cores, args=(queue,))
    process.start()
    masks = queue.get(timeout=60)
    process.join()
    assert len(masks) >= 2
    assert all(mask == {min(os.sched_getaffinity(0))} for mask in masks)


def test_ranks_go_round_the_cores() -> None:
    assert [core_of(rank, [2, 5]) for rank in range(4)] == [2, 5, 2, 5]
