"""Loaded in the fork server of :mod:`pat.sglang.warm`: what its processes need to be like spawned ones."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path

import setproctitle

from pat.sglang.warm import ENVIRONMENT_FILE

ENVIRONMENT = Path(os.environ[ENVIRONMENT_FILE])
SERVER, MAIN = os.getpid(), os.getppid()
PR_SET_PDEATHSIG = 1


def become_engine_process() -> None:
    """In a process just forked: the environment that the engine is started with, no signal handler of the server, and
    the server in place of one of its own for the processes that it starts. Those that it forks are left as they are.
    """
    if os.getppid() == SERVER:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        forkserver._forkserver.ensure_running = lambda: None
        os.environ.clear()
        os.environ.update(json.loads(ENVIRONMENT.read_text()))


def relay(*_signal) -> None:
    """An engine process that fails sends SIGQUIT to its parent, which here is the server: the engine's owner acts."""
    os.kill(MAIN, signal.SIGQUIT)


setproctitle.setproctitle("pat::fork_server")  # finds where titles go while the environment lies where it began
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # its processes end with it, as SGLang has them end
signal.signal(signal.SIGQUIT, relay)
os.register_at_fork(after_in_child=become_engine_process)

logging.disable(logging.WARNING)  # the registry names every model whose kernels a CPU lacks
for module in ("managers.data_parallel_controller", "managers.detokenizer_manager", "managers.scheduler"):
    import_module(f"sglang.srt.{module}")
import_module("sglang.srt.models.registry")
logging.disable(logging.NOTSET)
