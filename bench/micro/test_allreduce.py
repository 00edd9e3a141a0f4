"""All-reduce of two CPU ranks: shared memory beside gloo in one run. The other rank is a process of its own."""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pat.sglang.pin import core_of, pin_process
from pat.sglang.shm_allreduce import attach

SIZES_KIB = (4, 32, 128, 512)
STOP = -1.0
GLOO_CALLS = 300


def join(rank: int, store: str, cores: list[int]) -> tuple[Callable, Callable]:
    torch.set_num_threads(1)
    pin_process(core_of(rank, cores))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    return attach(dist.group.WORLD), dist.all_reduce


def partner(store: str, cores: list[int]) -> None:
    """Rank 1: joins every all-reduce of each size, through shared memory, then gloo, until rank 0 sends STOP."""
    reduces = join(1, store, cores)
    for size_kib in SIZES_KIB:
        for reduce in reduces:
            tensor = torch.zeros(size_kib * 256)
            while tensor[0] != STOP:
                tensor.zero_()
                reduce(tensor)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reduces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Callable, Callable]]:
    cores = sorted(os.sched_getaffinity(0))
    store: Path = tmp_path_factory.mktemp("gloo") / "store"
    other = multiprocessing.get_context("spawn").Process(target=partner, args=(str(store), cores), daemon=True)
    other.start()
    threads = torch.get_num_threads()
    yield join(0, str(store), cores)
    dist.destroy_process_group()
    other.join(30)
    torch.set_num_threads(threads)
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


@pytest.mark.parametrize("size_kib", SIZES_KIB)
def test_all_reduce(benchmark, reduces: tuple[Callable, Callable], size_kib: int) -> None:
    shared, gloo = reduces
    tensor, stop = torch.zeros(size_kib * 256), torch.full((size_kib * 256,), STOP)
    benchmark.pedantic(shared, (tensor,), rounds=300, iterations=5, warmup_rounds=20)
    shared(stop.clone())
    times_s = []
    for _ in range(GLOO_CALLS):
        start_s = time.perf_counter()
        gloo(tensor)
        times_s.append(time.perf_counter() - start_s)
    gloo(stop.clone())
    gloo_s = statistics.median(times_s[20:])
    benchmark.extra_info["gloo_median_us"] = round(gloo_s * 1e6, 1)
    benchmark.extra_info["times_faster"] = round(gloo_s / benchmark.stats.stats.median, 1)
    assert benchmark.stats.stats.median < gloo_s
