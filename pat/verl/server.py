"""The rollout server of a node: an actor of Ray's with an AdaptiveEngine that owns all of the node's ranks."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from pat.sglang.engine import AdaptiveEngine
from pat.verl.arguments import capacities, engine_arguments, engine_environment, sampling
from pat.verl.policies import PolicyChoice
from pat.verl.records import RecordFiles, SyncRecord
from pat.verl.rollout import Rollouts
from pat.verl.settings import PatSettings


class PatServer:
    """VeRL's interface of a rollout server: ``generate`` and the control methods, all of them coroutines.

    Errors of the configuration are ValueErrors; where the engine has failed, all that waits and comes gets EngineDied.
    Replicas beyond the first write their records to a directory of their own in that of the settings.
    """

    def __init__(
        self, config: DictConfig | RolloutConfig, model_config: DictConfig, device: str, replica_rank: int = 0
    ) -> None:
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        self.model_config: HFModelConfig = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        self.settings = PatSettings.of(self.config.custom)
        directory = self.settings.records
        if directory and replica_rank:
            directory = str(Path(directory) / f"replica-{replica_rank}")
        self.records = RecordFiles(directory)
        self.trace = read_trace(self.settings.trace)
        steps = str(self.records.directory / "steps") if self.records.directory else None
        os.environ.update(engine_environment(self.settings, device, steps))
        arguments = engine_arguments(self.settings, self.config, device)
        layouts, model_path = self.settings.all_layouts, self.model_config.local_path
        choice = PolicyChoice(self.settings, model_path, capacities(arguments, layouts), self.config.response_length)
        begin_s = time.time()
        self.engine = AdaptiveEngine(
            model_path=model_path,
            layouts=layouts,
            policy=first_policy(choice),
            costs=choice.costs,
            **arguments,
        )
        facts = {"layouts": self.settings.layouts, "seats": self.engine.seats, "start_s": time.time() - begin_s}
        self.records.engine(facts | {"arguments": arguments, "settings": self.settings.model_dump()})
        self.rollouts = Rollouts(self.engine, choice, self.settings.sequences, self.settings.quiet_s)
        self.sync_begin_s, self.buckets, self.bytes = 0.0, 0, 0

    async def ready(self) -> dict[str, Any]:
        """Once the engine has started: its layouts and processes."""
        return {"layouts": self.settings.layouts, "pids": sorted(self.engine.pids.values())}

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list | None = None,
        video_data: list | None = None,
        **_options: Any,
    ) -> TokenOutput:
        """One response. Its place in the batch is in ``request_id`` where rollout.full_determinism is on."""
        if image_data or video_data:
            raise ValueError("rollout backend pat: images and videos are not supported")
        place, iteration = place_of(request_id), self.rollouts.iteration
        parameters, log_probs = sampling(
            sampling_params,
            self.config.response_length,
            None if place is None else seed_of(self.config.seed, iteration, place),
            forced_tokens(self.trace, iteration, place),
        )
        parameters.setdefault("stop_token_ids", [self.model_config.tokenizer.eos_token_id])
        async with self.rollouts.request(place, prompt_ids) as request:
            replicas = self.engine.layout.dp
            answer = await self.engine.async_generate(
                input_ids=list(prompt_ids),
                sampling_params=parameters,
                return_logprob=log_probs,
                routed_dp_rank=request.place % replicas if replicas > 1 else None,
            )
            request.response_tokens = len(answer["output_ids"])
        for record in self.rollouts.take_closed():
            self.records.rollout(record)
        facts = answer["meta_info"]
        return TokenOutput(
            token_ids=list(answer["output_ids"]),
            log_probs=[float(entry[0]) for entry in facts["output_token_logprobs"]] if log_probs else None,
            stop_reason=(facts.get("finish_reason") or {}).get("type"),
            num_preempted=0,
            extra_fields={"global_steps": iteration},
        )

    async def load_bucket(self, directory: str, size_bytes: int) -> None:
        """Take a part of the weights from the safetensors file of a directory on this host."""
        if not self.buckets:
            self.sync_begin_s = time.time()
        await self.engine.async_load_weights(directory)
        self.buckets, self.bytes = self.buckets + 1, self.bytes + size_bytes

    async def end_sync(self, global_steps: int | None) -> None:
        """All weights have come: back to the starting layout, for the iteration that follows ``global_steps``.

        Every layout has the new weights already, and nothing is running: the way back moves nothing.
        """
        before, end_s = self.engine.layout, time.time()
        if before != self.settings.home:
            await self.engine.async_switch(self.settings.home)
        self.rollouts.iteration = (global_steps or 0) + 1
        record = SyncRecord(
            self.rollouts.iteration,
            end_s,
            end_s - self.sync_begin_s,
            self.buckets,
            self.bytes,
            str(before),
            str(self.engine.layout),
            time.time() - end_s if before != self.engine.layout else 0.0,
        )
        self.records.sync(record)
        self.buckets, self.bytes = 0, 0

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.engine.abort(all_requests=True)

    async def clear_kv_cache(self) -> None:
        await self.engine.tokenizer_manager.flush_cache()

    async def shutdown(self) -> None:
        """End the engine and its processes."""
        self.engine.shutdown()

    async def _nothing(self, **_options: Any) -> None:
        """The engine keeps its memory between phases, and profiles nothing."""

    wake_up = sleep = release_kv_cache = resume_kv_cache = resume_generation = start_profile = stop_profile = _nothing


def first_policy(choice: PolicyChoice):
    """What the engine starts with: it fixes how often replicas report."""
    from pat.policy import StaticPolicy

    return StaticPolicy(choice.settings.all_layouts[0], choice.interval_steps)


def place_of(request_id: str) -> int | None:
    """VeRL's place of a request in its batch, from an id of ``rollout.full_determinism``; None from any other."""
    match = re.fullmatch(r"det-(\d+)", request_id)
    return int(match[1]) if match else None


def seed_of(seed: int, iteration: int, place: int) -> int:
    """Sampling seed of a response, below 2**62."""
    digest = hashlib.sha256(f"{seed} {iteration} {place}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def read_trace(path: str | None) -> list[list[int]] | None:
    """Forced response lengths by iteration and place; ValueError names what is wrong with the file."""
    if path is None:
        return None
    try:
        lengths = json.loads(Path(path).read_text())["lengths"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f'trace: {path} is not {{"lengths": [[...], ...]}} ({error!r})') from None
    if not lengths or any(not row or min(row) < 1 for row in lengths):
        raise ValueError(f"trace: {path} has an iteration without lengths, or a length below 1")
    return lengths


def forced_tokens(trace: list[list[int]] | None, iteration: int, place: int | None) -> int | None:
    """The trace's length for a request; None without a trace. ValueError where the trace does not say."""
    if trace is None:
        return None
    if place is None:
        raise ValueError("trace: requests have no place in the batch; set actor_rollout_ref.rollout.full_determinism")
    row = trace[(iteration - 1) % len(trace)]
    if place >= len(row):
        raise ValueError(f"trace: iteration {iteration} has {len(row)} lengths, request {place} needs one more")
    return row[place]
