"""Entry point ``pat`` of the group ``sglang.srt.plugins``: SGLang calls :func:`register` in each of its processes."""

from __future__ import annotations

import os
from importlib import import_module

MODULES = {
    "PAT_SWITCH": "pat.sglang.hooks",
    "PAT_STEP_LOG": "pat.sglang.step_log",
    "PAT_SHM_ALLREDUCE": "pat.sglang.shm_allreduce",
    "PAT_PIN": "pat.sglang.pin",
    "PAT_SEEDED": "pat.sglang.seeded",
    "PAT_CALM": "pat.sglang.calm",
    "PAT_WHOLE_UPDATE": "pat.sglang.whole_update",
}
"""Environment variable that turns a part on -> the module whose ``register()`` hooks it in."""


def register() -> None:
    """Register the hooks that the environment asks for (none by default)."""
    for variable, module in MODULES.items():
        if os.environ.get(variable):
            import_module(module).register()
