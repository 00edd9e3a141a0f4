"""Engine processes forked from a server that has SGLang loaded, where each would load it for seconds. ``PAT_WARM=1``.

SGLang starts its processes by multiprocessing's method "spawn". :func:`start`, called before an engine is made, runs
multiprocessing's fork server with SGLang preloaded, and has the method changed to "forkserver" when SGLang has set its
own. The processes are SGLang's, and do what they do when spawned; :mod:`pat.sglang.warm_server` keeps their environment
and signals the same. For machines without a GPU.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import tempfile
from multiprocessing import forkserver
from pathlib import Path

VARIABLE = "PAT_WARM"
ENVIRONMENT_FILE = "PAT_WARM_ENVIRONMENT"
"""Variable of the server: the file with the environment of processes to come."""

READ_WHEN_LOADED = ("OMP_", "MKL_", "TORCH", "SGLANG_USE_CPU_ENGINE", "CUDA_VISIBLE_DEVICES", "PYTHON", "LD_")
"""Prefixes of variables that libraries read once, as they are loaded. Where they differ, processes are spawned."""

_loaded_with: dict[str, str] = {}


def start() -> None:
    """Run the server if the environment asks for it and none runs; returns while it is loading."""
    if not os.environ.get(VARIABLE) or forkserver.get_inherited_fds() is not None:
        return
    if not _loaded_with:
        handle, path = tempfile.mkstemp(prefix="pat-environment-", suffix=".json")
        os.close(handle)
        atexit.register(Path(path).unlink, missing_ok=True)
        _loaded_with.update(read_when_loaded(), **{ENVIRONMENT_FILE: path})
        hook()
    os.environ[ENVIRONMENT_FILE] = _loaded_with[ENVIRONMENT_FILE]
    forkserver.set_forkserver_preload(["pat.sglang.warm_server"])
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[ENVIRONMENT_FILE]


def read_when_loaded() -> dict[str, str]:
    """The part of the environment that processes of the server cannot change."""
    return {name: value for name, value in os.environ.items() if name.startswith(READ_WHEN_LOADED)}


def hook() -> None:
    """Have processes forked from the next engine on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", use_server, HookType.AFTER)
    HookRegistry.apply_hooks()


def use_server(*_arguments) -> None:
    """After SGLang's _set_envs_and_config, which chooses "spawn"."""
    path = _loaded_with[ENVIRONMENT_FILE]
    if os.environ.get(VARIABLE) and _loaded_with == {**read_when_loaded(), ENVIRONMENT_FILE: path}:
        Path(path).write_text(json.dumps(dict(os.environ)))
        multiprocessing.set_start_method("forkserver", force=True)
