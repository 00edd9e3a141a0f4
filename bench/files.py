"""Files and directories that are written whole or not at all: no reader meets half of one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_whole(path: Path, text: str) -> Path:
    """Write ``text`` beside ``path``, then take its name; its folder is made. Returns ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    return partial.replace(path)


def directory_whole(target: Path, fill: Callable[[Path], None]) -> Path:
    """``target``, which ``fill`` has written to where it did not exist; processes may race for it."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fill(partial)
        partial.chmod(0o755)
        partial.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target
