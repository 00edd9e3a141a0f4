"""A function of many items: here, over cores, or over a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

from bench.errors import UserError

CHUNKS_PER_CORE = 16
"""Enough that cores end together, few enough that sending them costs nothing."""
FEW = 2
"""Rollouts whose simulation takes no longer than starting processes for them."""


def parallel(
    function: Callable, items: Iterable, processes: int | None = None, ray: str | None = None, alone: bool = False
) -> Iterator[tuple[int, object]]:
    """(index, result) of every item, as they come: in this process (``processes`` 1, or one item), over cores, or over
    the Ray cluster at the address ``ray``. UserError where no cluster answers.

    ``alone``: each item comes as soon as it is done, for long ones, and up to :data:`FEW` in this process; else several
    together."""
    items = list(items)
    workers = min(processes or os.cpu_count() or 1, len(items))
    if ray:
        yield from over_ray(function, items, ray)
    elif workers <= 1 or (alone and len(items) <= FEW):
        yield from enumerate(map(function, items))
    else:
        yield from over_cores(function, items, workers, len(items) if alone else workers * CHUNKS_PER_CORE)


def over_cores(function: Callable, items: list, workers: int, chunks: int) -> Iterator[tuple[int, object]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=leave_interrupts) as pool:
        futures = [pool.submit(apply, function, chunk) for chunk in chunked(items, chunks)]
        try:
            for future in as_completed(futures):
                yield from future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def over_ray(function: Callable, items: list, address: str) -> Iterator[tuple[int, object]]:
    """Tasks of a Ray cluster, whose nodes have this project installed. ``local``: a cluster of this machine alone."""
    try:
        import ray
    except ImportError:
        raise UserError("--ray: Ray is not installed; pip install ray, or leave the option out") from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"--ray {address}: no cluster answers there ({reason}); start one with `ray start`") from None
    try:
        task = ray.remote(apply)
        cores = int(ray.cluster_resources().get("CPU", 1))
        pending = [task.remote(function, chunk) for chunk in chunked(items, cores * CHUNKS_PER_CORE)]
        while pending:
            done, pending = ray.wait(pending)
            yield from ray.get(done[0])
    finally:
        ray.shutdown()


def apply(function: Callable, chunk: list[tuple[int, object]]) -> list[tuple[int, object]]:
    return [(index, function(item)) for index, item in chunk]


def chunked(items: list, count: int) -> list[list[tuple[int, object]]]:
    """Numbered items dealt out to at most ``count`` chunks, none empty: neighbours, alike in cost, go apart."""
    numbered, count = list(enumerate(items)), min(count, len(items))
    return [numbered[k::count] for k in range(count)]


def leave_interrupts() -> None:
    """Ctrl-C is the parent's to handle: workers end what they run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
