"""Sampling that follows each request's ``sampling_seed``: the same tokens in every layout, batch and order of arrival.

On by ``PAT_SEEDED``; needs SGLang's ``sampling_backend`` ``pytorch``. SGLang has this as part of its deterministic
inference, which no attention backend of the CPU can be combined with.
"""

from __future__ import annotations

import numpy as np
import torch

NO_SEED = 42
"""SGLang's seed for requests without one."""


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[n] float64 in [0, 1): the top 53 bits of two rounds of splitmix64 (Steele, Lea, Flood 2014) over seeds and
    positions, int64 [n] both."""
    state = mix(seeds.astype(np.int64).view(np.uint64)) + positions.astype(np.int64).view(np.uint64)
    return (mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mix(value: np.ndarray) -> np.ndarray:
    """One step of splitmix64 on uint64 [n]."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def sample(log_probs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[n, 1] column of each row of ``log_probs`` [n, m], drawn by inverting its cumulative distribution in float64."""
    drawn = torch.from_numpy(uniforms(seeds.cpu().numpy(), positions.cpu().numpy())).to(log_probs.device)
    cumulative = log_probs.double().exp_().cumsum(dim=-1)
    wanted = drawn[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True).clamp_(max=log_probs.shape[-1] - 1)


def register() -> None:
    """Hook this process's sampling."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def with_seeds(info, _cls, batch, *arguments, **options):
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        info.sampling_seed = torch.tensor([NO_SEED if seed is None else seed for seed in seeds], device=batch.device)
        return info

    of_batch = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(of_batch, with_seeds, HookType.AFTER)
    HookRegistry.register("sglang.srt.layers.sampler.multinomial_with_seed", sample, HookType.REPLACE)
