"""The rollout's end in VeRL's training workers: hands updated weights to the server of their node, in buckets."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import save_file
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from pat.sglang.launch import memory_directory
from pat.verl.replica import server_name


class PatWeights(BaseRollout):
    """Of every training worker. All take part in gathering a tensor; the first of each replica hands it on.

    A bucket goes through a file in the host's memory, which every rank of the server maps: it is written once, and
    read as far as a rank needs it.
    """

    def __init__(self, config, model_config, device_mesh, replica_rank: int = -1, **_options: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        ranks, rank = self.config.tensor_model_parallel_size, int(os.environ["RANK"])
        self.replica_rank = rank // ranks if replica_rank == -1 else replica_rank
        self.leads = rank % ranks == 0

    async def resume(self, tags: list[str]) -> None:
        """The server keeps its memory."""

    async def release(self) -> None:
        """The server keeps its memory."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_options: Any,
    ) -> None:
        """Hand on ``weights``, by their Hugging Face names. ValueError for another wire format."""
        if wire_format != "named_tensors":
            raise ValueError(f"rollout backend pat: wire format {wire_format!r} is not supported")
        limit = int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20
        server = ray.get_actor(server_name(self.replica_rank)) if self.leads else None
        bucket: dict[str, torch.Tensor] = {}
        async for name, tensor in ensure_async_iterator(weights):
            if server is None:
                continue
            if bucket and size_bytes(bucket.values()) + tensor.nbytes > limit:
                await hand_over(server, bucket)
                bucket = {}
            bucket[name] = tensor.detach().to("cpu").contiguous()
        if server is not None:
            await hand_over(server, bucket)
            await server.end_sync.remote(global_steps)
        await asyncio.to_thread(torch.distributed.barrier)


def size_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


async def hand_over(server, bucket: dict[str, torch.Tensor]) -> None:
    """Let the server load a bucket."""
    with tempfile.TemporaryDirectory(prefix="pat-weights-", dir=memory_directory()) as directory:
        save_file(distinct(bucket), Path(directory) / "model.safetensors")
        await server.load_bucket.remote(directory, size_bytes(bucket.values()))


def distinct(bucket: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With copies of tensors that share memory (tied embeddings), which the file format refuses."""
    seen: set[int] = set()
    found = {}
    for name, tensor in bucket.items():
        found[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return found
