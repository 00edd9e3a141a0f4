"""The hydra overrides of a GRPO run with rollout backend ``pat``, and the environment of its processes: pure."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pat.layout import Layout
from pat.verl.settings import PatSettings


@dataclass(frozen=True)
class GrpoRun:
    """One launch of ``python -m verl.trainer.main_ppo``.

    model_path           directory of the model, or its hub name
    train_files          Parquet files of VeRL's schema (data_source, prompt, reward_model, extra_info)
    ranks                GPUs, or processes on the CPU, of a node; ``nodes`` nodes
    settings             of the rollout backend
    reward               (file, function) of a reward; None: VeRL's choice by data_source
    prompts, samples     a batch is ``prompts`` x ``samples`` responses, one optimiser step each
    steps                iterations (trainer.total_training_steps)
    micro_batch          sequences of a forward pass in training, on each rank
    kl_coef              weight of the KL loss against the reference model; 0: no reference model
    device               ``cpu`` (float32) or ``cuda`` (bfloat16)
    bucket_megabytes     weights go to the rollout in buckets of this size
    gpu_share            share of a GPU's memory for the rollout (CUDA); ``offload``: FSDP parameters and optimiser to
                         the host between phases
    ray_address          an existing Ray cluster; None: one is started for this run
    loggers              VeRL's trackers. ``extra``: further overrides, last, so that they win
    """

    model_path: str
    train_files: tuple[str, ...]
    ranks: int
    settings: PatSettings
    val_files: tuple[str, ...] = ()
    nodes: int = 1
    reward: tuple[str, str] | None = None
    prompts: int = 8
    samples: int = 4
    max_prompt_tokens: int = 128
    max_response_tokens: int = 128
    steps: int = 4
    learning_rate: float = 1e-4
    micro_batch: int = 8
    kl_coef: float = 0.001
    temperature: float = 1.0
    seed: int = 0
    shuffle: bool = False
    device: str = "cpu"
    bucket_megabytes: int = 256
    gpu_share: float = 0.5
    offload: bool = True
    ray_address: str | None = None
    checkpoint_directory: str = "checkpoints"
    save_every: int = -1
    project: str = "pat"
    experiment: str = "grpo"
    loggers: tuple[str, ...] = ("console", "file")
    extra: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device: {self.device!r} is neither cpu nor cuda")
        layouts = [Layout.parse(name) for name in self.settings.layouts]
        if any(layout.world != self.ranks for layout in layouts):
            raise ValueError(f"layouts: {', '.join(map(str, layouts))} are not of ranks = {self.ranks}")
        if self.prompts * self.samples % (self.ranks * self.nodes):
            raise ValueError(f"prompts x samples = {self.prompts * self.samples} is no multiple of the ranks")


def overrides(run: GrpoRun) -> list[str]:
    """Arguments for ``python -m verl.trainer.main_ppo``, in hydra's syntax."""
    cpu = run.device == "cpu"
    actor, rollout, ref = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
    model = "actor_rollout_ref.model"
    dtype, compute = ("float32", "fp32") if cpu else ("bfloat16", "bf16")
    values: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "trainer.use_v1": False,
        "trainer.device": run.device,
        "data.train_files": list(run.train_files),
        "data.val_files": list(run.val_files or run.train_files),
        "data.train_batch_size": run.prompts,
        "data.max_prompt_length": run.max_prompt_tokens,
        "data.max_response_length": run.max_response_tokens,
        "data.filter_overlong_prompts": False,
        "data.truncation": "left",
        "data.shuffle": run.shuffle,
        "data.seed": run.seed,
        "data.dataloader_num_workers": 0,
        f"{model}.path": run.model_path,
        f"{model}.external_lib": "pat.verl.register",
        f"{model}.use_remove_padding": not cpu,
        f"{model}.enable_gradient_checkpointing": not cpu,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": run.prompts,
        f"{actor}.ppo_micro_batch_size_per_gpu": run.micro_batch,
        f"{actor}.use_kl_loss": run.kl_coef > 0,
        f"{actor}.kl_loss_coef": run.kl_coef,
        f"{actor}.optim.lr": run.learning_rate,
        f"{actor}.fsdp_config.param_offload": run.offload and not cpu,
        f"{actor}.fsdp_config.optimizer_offload": run.offload and not cpu,
        f"{ref}.log_prob_micro_batch_size_per_gpu": run.micro_batch,
        f"{rollout}.name": "pat",
        f"{rollout}.n": run.samples,
        f"{rollout}.temperature": run.temperature,
        f"{rollout}.tensor_model_parallel_size": run.ranks,
        f"{rollout}.dtype": dtype,
        f"{rollout}.load_format": "dummy",
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.full_determinism": True,
        f"{rollout}.seed": run.seed,
        f"{rollout}.gpu_memory_utilization": run.gpu_share,
        f"{rollout}.free_cache_engine": False,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": run.micro_batch,
        f"{rollout}.agent.num_workers": 1 if cpu else 8,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": run.bucket_megabytes,
        f"+{rollout}.custom": {"pat": run.settings.model_dump(exclude_none=True)},
        "reward.num_workers": 1 if cpu else 8,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.n_gpus_per_node": run.ranks,
        "trainer.nnodes": run.nodes,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.total_training_steps": run.steps,
        "trainer.total_epochs": 1_000_000,
        "trainer.save_freq": run.save_every,
        "trainer.default_local_dir": run.checkpoint_directory,
        "trainer.resume_mode": "disable",
        "trainer.logger": list(run.loggers),
        "trainer.project_name": run.project,
        "trainer.experiment_name": run.experiment,
        "hydra.run.dir": str(Path(run.checkpoint_directory).parent / "hydra"),
    }
    for part in (actor, ref):
        values |= {f"{part}.fsdp_config.dtype": dtype if part == ref or cpu else "float32"}
        values |= {f"+{part}.fsdp_config.mixed_precision.param_dtype": compute}
        if cpu:
            values |= {f"{part}.use_torch_compile": False}
    if cpu:
        values |= {
            f"{actor}.fsdp_config.use_torch_compile": False,
            f"+{model}.override_config.attn_implementation": "sdpa",
        }
    if run.reward is not None:
        values |= {"reward.custom_reward_function.path": run.reward[0]}
        values |= {"reward.custom_reward_function.name": run.reward[1]}
    if run.ray_address is not None:
        values |= {"+ray_kwargs.ray_init.address": run.ray_address}
    elif cpu:  # logical resources: Ray has more actors than this machine has cores, and ranks stand for GPUs
        values |= {
            "ray_kwargs.ray_init.num_cpus": 16 + 2 * run.ranks,
            "+ray_kwargs.ray_init.num_gpus": run.ranks,
            "+ray_kwargs.ray_init.include_dashboard": False,
        }
    return [f"{name}={text(value)}" for name, value in values.items()] + list(run.extra)


def text(value: Any) -> str:
    """A value in the syntax of hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(text, value)) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace("'", "\\'")
        return f"'{escaped}'"
    return repr(value)


def environment(run: GrpoRun, metrics: Path) -> dict[str, str]:
    """What the launched process needs in its environment, beside the caller's. ``metrics``: where VeRL's ``file``
    logger writes one JSON object an iteration."""
    common = {
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "PYTHONWARNINGS": "ignore",
        "TQDM_DISABLE": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HYDRA_FULL_ERROR": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if run.device == "cuda":
        return common
    cores = os.cpu_count() or 1
    return common | {
        "VERL_PLATFORM": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # SGLang's few small functions: compiling takes longer than it saves
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % cores) for rank in range(run.ranks)),
    }
