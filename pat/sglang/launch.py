"""Starting SGLang's engine so that it can be switched: what is refused, its signals, and small needs of the start."""

from __future__ import annotations

import logging
import os
import socket
import threading
from typing import Any

import psutil
from sglang.srt.managers.tokenizer_manager import SignalHandler

from pat.layout import Layout
from pat.model import ModelShape
from pat.sglang.guard import EngineDied, Guard

REFUSED = {
    "speculative_algorithm": "speculative decoding",
    "lora_paths": "LoRA",
    "enable_lora": "LoRA",
    "quantization": "quantised weights",
    "enable_dp_attention": "DP attention",
    "enable_hierarchical_cache": "the hierarchical cache",
    "pp_size": "pipeline parallelism",
    "ep_size": "expert parallelism",
    "nnodes": "several nodes",
    "tokenizer_worker_num": "several tokenizers",
}


class QuitHandler(SignalHandler):
    """SGLang's handler of SIGQUIT kills this process; ours ends the engine only."""

    def __init__(self, manager, guard: Guard) -> None:
        super().__init__(manager)
        self.guard = guard

    def running_phase_sigquit_handler(self, signum=None, frame=None) -> None:
        threading.Thread(target=self.guard.fail, args=("a process of the engine has failed",)).start()


def check_arguments(model_path: str, layouts: tuple[Layout, ...], arguments: dict[str, Any]) -> None:
    """ValueError names the first argument that cannot be had together with switching."""
    for name in ("tp_size", "dp_size", "tp", "dp"):
        if name in arguments:
            raise ValueError(f"AdaptiveEngine: give layouts instead of {name}")
    for name, what in REFUSED.items():
        value = arguments.get(name)
        if value and (value is True or value != 1):
            raise ValueError(f"AdaptiveEngine: {what} ({name}) is not supported")
    if arguments.get("load_balance_method", "round_robin") != "round_robin":
        raise ValueError("AdaptiveEngine: load_balance_method must be round_robin")
    shape = ModelShape.load(model_path)
    for layout in layouts:
        shape.check_tp(layout.tp)


def children() -> set[int]:
    """Processes that descend from this one."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def not_of_sigquit(record: logging.LogRecord) -> bool:
    """Log filter: SGLang announces a custom handler of SIGQUIT as an error."""
    return "custom SIGQUIT" not in record.getMessage()


def fail_start(*_signal) -> None:
    """SGLang's handler of SIGQUIT while it starts: its own would kill this process."""
    raise EngineDied("a process of the engine failed while it started; see the messages above")


def memory_directory() -> str | None:
    """A directory that lies in memory, where there is one; None: the default for temporary files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
