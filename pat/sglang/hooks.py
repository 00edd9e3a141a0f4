"""The hooks of the live switch: which of SGLang's functions are wrapped, and by what. On by ``PAT_SWITCH``."""

from __future__ import annotations

import torch

from pat.sglang.penalties import remember
from pat.sglang.router import Router
from pat.sglang.seats import Seats
from pat.sglang.settings import Settings
from pat.sglang.step_reports import StepReports
from pat.sglang.switch import Switcher
from pat.sglang.whole_update import UPDATES


def keep_config(_original, model_config, *_arguments, **_options):
    """Around adjust_config_with_unaligned_cpu_tp, which pads heads and sizes for each TP on the CPU: shards of two
    layouts would not be of the same whole."""
    return model_config


def uncompiled(original, *arguments, **options):
    """Around a compiled function: on the CPU, compiling it takes every rank of every seat seconds at start."""
    return getattr(original, "_torchdynamo_orig_callable", original)(*arguments, **options)


def register() -> None:
    """Hook the processes of an engine whose settings are in the environment."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def hook(target: str, function, kind=HookType.AROUND) -> None:
        HookRegistry.register(f"sglang.srt.{target}", function, kind)

    settings = Settings.from_environment()
    seats = Seats(settings)
    step_reports, router = StepReports(seats), Router(settings)
    switcher = Switcher(seats, step_reports)
    scheduler = "managers.scheduler.Scheduler"
    hook(f"{scheduler}.__init__", seats.scheduler_init)
    hook(f"{scheduler}.init_ipc_channels", seats.init_ipc_channels)
    hook(f"{scheduler}.run_event_loop", switcher.run_event_loop)
    hook(f"{scheduler}.process_input_requests", switcher.process_input_requests)
    if settings.report_steps:
        hook(f"{scheduler}.process_batch_result", step_reports.after_step, HookType.AFTER)
    hook("distributed.bootstrap.init_parallel_runtime", seats.init_parallel_runtime)
    hook("distributed.bootstrap._init_parallel_groups", seats.init_parallel_groups, HookType.REPLACE)
    hook("model_loader.loader.DefaultModelLoader.load_model", seats.load_model)
    hook("model_loader.loader.DummyModelLoader.load_model", seats.load_model)
    hook("mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal", seats.create_buffers)
    hook("mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes", seats.available_bytes)
    for update in UPDATES:
        HookRegistry.register(update, seats.update_weights, HookType.AROUND)
    hook("sampling.sampling_batch_info.SamplingBatchInfo.adjusted_from_schedule_batch", remember, HookType.AFTER)
    hook("managers.data_parallel_controller.DataParallelController.event_loop", router.event_loop)
    hook("managers.tp_worker.broadcast_pyobj", seats.broadcast_seed)
    hook("model_executor.model_runner.adjust_config_with_unaligned_cpu_tp", keep_config)
    if not torch.cuda.is_available():
        hook("layers.vocab_parallel_embedding.get_masked_input_and_mask", uncompiled)
