"""VeRL's replica of rollout backend ``pat``: one server for all ranks of a node."""

from __future__ import annotations

import asyncio
import os

import ray
from verl.plugin.platform import get_platform
from verl.workers.rollout.replica import RolloutReplica

from pat.verl.server import PatServer
from pat.verl.settings import PatSettings


def server_name(replica_rank: int) -> str:
    """Name of a replica's server among Ray's actors."""
    return f"pat_server_{replica_rank}"


class PatReplica(RolloutReplica):
    """ValueError where the replica is not all ranks of one node, as the layouts say."""

    async def launch_servers(self) -> None:
        world = PatSettings.of(self.config.custom).home.world
        if self.nnodes != 1 or self.world_size != world:
            raise ValueError(
                f"rollout backend pat: its layouts are of {world} ranks, the replica has {self.world_size} on "
                f"{self.nnodes} nodes; set actor_rollout_ref.rollout.tensor_model_parallel_size={world} and layouts "
                "of all ranks of one node"
            )
        devices = get_platform().visible_devices_envvar()
        places = await asyncio.gather(
            *(
                worker.__ray_call__.remote(
                    lambda _, name=devices: (ray.get_runtime_context().get_node_id(), os.environ.get(name, ""))
                )
                for worker in self.workers
            )
        )
        if len({node for node, _ in places}) != 1:
            raise ValueError("rollout backend pat: the replica's ranks are on several nodes; use all ranks of a node")
        names = dict.fromkeys(get_platform().ray_noset_envvars(), "1") | get_platform().rollout_env_vars()
        device = get_platform().device_name
        if device == "cuda":  # the engine's own: Ray counts them as the workers'
            names[devices] = ",".join(sorted({gpu for _, gpus in places for gpu in gpus.split(",") if gpu}, key=int))
        server = ray.remote(PatServer).options(
            name=server_name(self.replica_rank),
            num_cpus=1,
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(places[0][0], soft=False),
            runtime_env={"env_vars": names},
            max_concurrency=self.max_concurrency,
        )
        handle = server.remote(self.config, self.model_config, device, self.replica_rank)
        await handle.ready.remote()
        self.servers, self._server_handle = [handle], handle
        self._server_address = server_name(self.replica_rank)
