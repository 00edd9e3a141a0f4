"""Where this project keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir(kind: str) -> Path:
    """``$XDG_CACHE_HOME/pat-reproduction/<kind>`` (default ``~/.cache``); not created here."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "pat-reproduction" / kind
