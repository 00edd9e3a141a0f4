"""GPUs that cells name: memory, and which of them this machine has."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """``memory_bytes`` is the whole memory of the board as ``nvidia-smi`` reports it (its MiB), ECC on."""

    name: str
    title: str
    memory_bytes: int
    marker: str
    """What CUDA's device name contains, beside which the memory decides (two H100 boards differ)."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h100_sxm", "H100 SXM 80 GB", 81_559 * MIB, "H100"),
        Gpu("h200_sxm", "H200 SXM 141 GB", 143_771 * MIB, "H200"),
        Gpu("a100_sxm", "A100 SXM 80 GB", 81_920 * MIB, "A100"),
        Gpu("a40", "A40 48 GB", 46_068 * MIB, "A40"),
        Gpu("l40s", "L40S 48 GB", 46_068 * MIB, "L40S"),
    )
}


def gpu(name: str) -> Gpu:
    """By the name that experiments use (``h100_sxm``); ValueError lists the known ones."""
    if name not in GPUS:
        raise ValueError(f"gpu {name!r} is not known; known ones: {', '.join(GPUS)}")
    return GPUS[name]


def recognise(device_name: str, memory_bytes: int) -> Gpu | None:
    """The known GPU with this CUDA device name and memory (within 8%, for ECC and driver reserve), or None."""
    for known in GPUS.values():
        close = abs(memory_bytes - known.memory_bytes) <= 0.08 * known.memory_bytes
        if known.marker in device_name.upper().replace("-", " ").split() and close:
            return known
    return None


def local_devices() -> list[tuple[str, int]]:
    """CUDA device names and memory in bytes of this machine; empty where there is no CUDA."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [(device.name, device.total_memory) for device in properties]


def serves(cluster_gpu: str, gpus_per_node: int, devices: list[tuple[str, int]]) -> bool:
    """Whether a machine with these devices is a node of a cell: at least ``gpus_per_node`` of the cell's GPU."""
    found = [recognise(name, memory) for name, memory in devices]
    return sum(match is not None and match.name == cluster_gpu for match in found) >= gpus_per_node > 0
