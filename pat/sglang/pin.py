"""Pin each scheduler to one core, so that ranks do not chase one another over the machine (CPU tier).

On by ``PAT_PIN=1``. SGLANG_CPU_OMP_THREADS_BIND does not do it: it acts only where SGLang's AMX kernels exist.
"""

from __future__ import annotations

import os


def core_of(rank: int, cores: list[int]) -> int:
    """Core of a rank: ranks go round the cores in order."""
    return cores[rank % len(cores)]


def pin_process(core: int) -> None:
    """Pin every thread of this process to ``core``; threads started later inherit it from their creator."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), {core})
        except ProcessLookupError:  # the thread ended meanwhile
            continue


def register() -> None:
    """Pin at the start of the event loop, when the threads of start-up exist. Does nothing but on Linux."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def before_event_loop(scheduler):
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        rank = (parallel.dp_rank or 0) * parallel.tp_size + parallel.tp_rank
        pin_process(core_of(rank, sorted(os.sched_getaffinity(0))))

    if hasattr(os, "sched_setaffinity"):
        HookRegistry.register(
            "sglang.srt.managers.scheduler.Scheduler.run_event_loop", before_event_loop, HookType.BEFORE
        )
