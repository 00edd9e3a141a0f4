"""All-reduce through shared memory, in real processes over a gloo group."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from pat.sglang.shm_allreduce import PeerLostError, attach

SIZES = [1, 7, 1024, 64 * 1024, (1 << 18) + 3, 3 * (1 << 18)]


def join(rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)


def inputs(size: int, numel: int, salt: int) -> list[torch.Tensor]:
    return [torch.randn(numel, generator=torch.Generator().manual_seed(1000 * salt + r)) for r in range(size)]


def check_sums(rank: int, size: int, store: str) -> None:
    join(rank, size, store)
    halves = [dist.new_group(list(range(i, i + size // 2))) for i in range(0, size, size // 2)] if size > 2 else []
    reduce = attach(dist.group.WORLD)
    half = attach(halves[rank // (size // 2)]) if halves else None
    for salt, numel in enumerate(SIZES * 3):
        tensors = inputs(size, numel, salt)
        want = tensors[0] + tensors[1]
        for other in tensors[2:]:
            want += other
        got = tensors[rank].clone()
        assert reduce(got) is got
        assert torch.equal(got, want)  # to the bit, so also the same on all ranks
        if half:  # a second group lives beside the first
            base = rank // (size // 2) * (size // 2)
            mine = tensors[rank].clone()
            half(mine)
            assert torch.equal(mine, sum(tensors[base + 1 : base + size // 2], tensors[base]))
    strided = inputs(size, 60, 99)[rank].view(6, 10).t()
    want = sum(t.view(6, 10).t() for t in inputs(size, 60, 99))
    assert torch.allclose(reduce(strided), want)
    assert reduce(torch.empty(0)).numel() == 0
    assert not [name for name in os.listdir("/dev/shm") if "pat" in name]
    dist.destroy_process_group()


def check_lost_peer(rank: int, size: int, store: str) -> None:
    join(rank, size, store)
    reduce = attach(dist.group.WORLD, limit_s=20.0)
    reduce(torch.ones(4))
    if rank == 1:
        os._exit(0)
    start_s = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 1 of 2 is gone"):
        reduce(torch.ones(4))
    assert time.monotonic() - start_s < 10
    os._exit(0)


def check_late_peer(rank: int, size: int, store: str) -> None:
    join(rank, size, store)
    reduce = attach(dist.group.WORLD, limit_s=0.3)
    if rank == 0:
        with pytest.raises(PeerLostError, match=r"within 0\.3 s"):
            reduce(torch.ones(4))
    dist.barrier()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_sums_are_exact_and_the_same_on_all_ranks(size: int, tmp_path: Path) -> None:
    mp.spawn(check_sums, (size, str(tmp_path / "store")), nprocs=size)


@pytest.mark.parametrize("check", [check_lost_peer, check_late_peer])
def test_a_wait_has_an_end(check, tmp_path: Path) -> None:
    mp.spawn(check, (2, str(tmp_path / "store")), nprocs=2)
