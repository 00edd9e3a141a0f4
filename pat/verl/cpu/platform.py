"""VeRL's platform for machines without an accelerator: ranks are processes, Ray's GPUs are logical."""

from __future__ import annotations

import resource
import types
from contextlib import contextmanager

import psutil
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def nothing(*_arguments, **_options) -> None:
    """For what has no meaning on a CPU."""


def resident_bytes(*_arguments) -> int:
    return psutil.Process().memory_info().rss


def peak_bytes(*_arguments) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_info(*_arguments) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def device_module() -> types.ModuleType:
    """``torch.cpu`` with what VeRL asks of ``torch.cuda`` besides; memory is this process's."""
    module = types.ModuleType("pat_verl_cpu")
    module.__dict__.update({name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("__")})
    module.memory_allocated = module.memory_reserved = resident_bytes
    module.max_memory_allocated = module.max_memory_reserved = peak_bytes
    module.mem_get_info = memory_info
    module.empty_cache = module.reset_peak_memory_stats = module.ipc_collect = nothing
    module.manual_seed = module.manual_seed_all = torch.manual_seed
    module.get_rng_state, module.set_rng_state = torch.get_rng_state, torch.set_rng_state
    module.is_available = lambda: False  # of an accelerator
    module.current_device = lambda: "cpu"
    module.get_device_name = lambda *_arguments: "CPU"
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """As VeRL's interface names them; profiling and IPC are not to be had."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = device_module()
    synchronize = set_device = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return not torch.cuda.is_available()

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str):
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False
