"""What an SGLang engine is started with: its arguments and environment by layout, as pure functions."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from pat.layout import Layout
from pat.model import ModelShape


class EngineError(ValueError):
    """An engine cannot be started or a rollout cannot be run; the message says what to do."""


def engine_arguments(
    model_path: str,
    layout: Layout,
    device: str = "cpu",
    *,
    sequences: int = 128,
    kv_tokens_per_rank: int | None = None,
    mem_fraction: float | None = None,
    seed: int = 0,
) -> dict:
    """Arguments of ``sgl.Engine`` for a static layout. ``device``: ``cpu`` or ``cuda``.

    sequences            of the whole rollout: a replica runs at most its share at once
    kv_tokens_per_rank   KV budget of one rank, counted in tokens of *all* heads; a replica of tp ranks caches tp times
                         as many, so every layout has the same memory. On CUDA None lets SGLang fill the GPU.
    """
    arguments = {
        "model_path": str(model_path),
        "device": device,
        "tp_size": layout.tp,
        "dp_size": layout.dp,
        "load_balance_method": "round_robin",
        "max_running_requests": -(-sequences // layout.dp),
        "random_seed": seed,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "log_level": "error",
    }
    if kv_tokens_per_rank is not None:
        arguments["max_total_tokens"] = kv_tokens_per_rank * layout.tp
    if device == "cuda":
        return arguments | {"dtype": "bfloat16"} | ({"mem_fraction_static": mem_fraction} if mem_fraction else {})
    arguments.setdefault("max_total_tokens", 16_384 * layout.tp)
    return arguments | {
        "dtype": "float32",  # bfloat16 on a CPU is not exact between layouts
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "sleep_on_idle": True,  # else a replica that has finished takes a core from the others and the main process
    }


def engine_environment(
    layout: Layout, device: str, log_directory: Path, *, shm_allreduce: bool = True, pin: bool = True
) -> dict[str, str]:
    """Environment variables of the engine's processes: SGLang's CPU mode, and the parts of PAT's plugin to turn on."""
    environment = {"PAT_STEP_LOG": str(log_directory), "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
    if device == "cuda":
        return environment
    cores = os.cpu_count() or 1
    return environment | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % cores) for rank in range(layout.world)),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling SGLang's few small functions takes 3.5 s a start; steps are as fast
        "PAT_SHM_ALLREDUCE": "1" if shm_allreduce else "",
        "PAT_PIN": "1" if pin else "",
        "PAT_CALM": "1",
        "PAT_WARM": "1",
    }


def check_launch(model_path: str, layout: Layout, device: str) -> None:
    """EngineError, with a remedy, where an engine of this layout could not start."""
    if importlib.util.find_spec("sglang") is None:
        raise EngineError("sglang is not installed; run through tox, or `python bench/install.py VENV`")
    local = Path(model_path).is_dir()
    if not local and (device == "cpu" or Path(model_path).is_absolute() or str(model_path).startswith(".")):
        raise EngineError(f"no model directory at {model_path}; give one, or a preset of bench.tiny_models")
    if local:
        shape = ModelShape.load(Path(model_path))
        try:
            shape.check_tp(layout.tp)
        except ValueError as error:
            raise EngineError(f"{error}; choose a TP that divides the heads") from None
