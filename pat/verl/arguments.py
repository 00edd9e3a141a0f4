"""What the server starts SGLang with, from VeRL's configuration of the rollout: pure."""

from __future__ import annotations

from typing import Any

from pat.layout import Layout
from pat.verl.settings import PatSettings

CPU_KV_TOKENS_PER_RANK = 16_384


def engine_arguments(settings: PatSettings, config: Any, device: str) -> dict[str, Any]:
    """Arguments of :class:`pat.sglang.engine.AdaptiveEngine` beside model, layouts, policy and costs.

    ``config``: VeRL's RolloutConfig. Requests and KV cache are those of the whole rollout, spread over the replicas of
    the lowest TP. ValueError where VeRL asks for what this backend has not.
    """
    refuse(config)
    low = settings.all_layouts[0]
    arguments = {
        "device": device,
        "dtype": config.dtype,
        "load_format": config.load_format,
        "max_running_requests": -(-(settings.sequences or config.max_num_seqs) // low.dp),
        "random_seed": config.seed,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "sampling_backend": "pytorch",  # the one that takes a seed for each request
        "log_level": "error",
    }
    if settings.kv_tokens_per_rank is not None:
        arguments["max_total_tokens"] = settings.kv_tokens_per_rank * low.tp
    if device == "cuda":
        arguments["mem_fraction_static"] = config.gpu_memory_utilization
        return arguments | settings.engine
    arguments.setdefault("max_total_tokens", CPU_KV_TOKENS_PER_RANK * low.tp)
    cpu = {"attention_backend": "torch_native", "disable_cuda_graph": True, "disable_overlap_schedule": True}
    return arguments | cpu | settings.engine


def refuse(config: Any) -> None:
    """ValueError names the first option of VeRL's rollout that backend ``pat`` cannot serve."""
    unserved = {
        "data_parallel_size": (config.data_parallel_size != 1, "1: layouts say what runs in parallel"),
        "pipeline_model_parallel_size": (config.pipeline_model_parallel_size != 1, "1"),
        "free_cache_engine": (config.free_cache_engine, "False: the rollout keeps its memory between phases"),
        "quantization": (config.quantization is not None, "null"),
        "checkpoint_engine.backend": (config.checkpoint_engine.backend != "naive", "naive"),
    }
    for name, (asked, remedy) in unserved.items():
        if asked:
            raise ValueError(f"rollout backend pat: set actor_rollout_ref.rollout.{name}={remedy}")


def engine_environment(settings: PatSettings, device: str, steps: str | None) -> dict[str, str]:
    """Environment of the engine's processes: the parts of PAT's plugin that are wanted. ``steps``: for the step log."""
    parts = {"PAT_SEEDED": "1"} | ({"PAT_STEP_LOG": steps} if steps else {})
    if device == "cuda":
        return parts
    return parts | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "PAT_SHM_ALLREDUCE": "1" if settings.shm_allreduce else "",
        "PAT_PIN": "1" if settings.pin else "",
        "PAT_CALM": "1",
        "PAT_WARM": "1",
    }


def sampling(
    asked: dict[str, Any], response_length: int, seed: int | None, forced_tokens: int | None
) -> tuple[dict[str, Any], bool]:
    """(SGLang's sampling parameters, whether log-probabilities are wanted) of VeRL's request parameters.

    ``forced_tokens``: the response has exactly as many, whatever tokens come; None: it ends by itself.
    """
    found = dict(asked)
    log_probs = bool(found.pop("logprobs", False))
    limits = [n for n in (found.pop("max_tokens", None), found.pop("max_new_tokens", None)) if n is not None]
    found["max_new_tokens"] = min([*limits, response_length])
    if found.get("repetition_penalty") == 1.0:
        del found["repetition_penalty"]
    if seed is not None:
        found["sampling_seed"] = seed
    if forced_tokens is not None:
        found |= {"max_new_tokens": min(forced_tokens, response_length), "ignore_eos": True}
    return found, log_probs


def capacities(arguments: dict[str, Any], layouts: tuple[Layout, ...]) -> dict[Layout, int]:
    """KV tokens of one replica: the engine's budget counts for its lowest TP, a rank's memory is the same in all."""
    tokens = arguments.get("max_total_tokens") or 1 << 40
    return {layout: tokens * layout.tp // min(layouts).tp for layout in layouts}
