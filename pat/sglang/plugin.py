"""Entry point ``pat`` of the group ``sglang.srt.plugins``: SGLang calls :func:`register` in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Register the hooks that the environment asks for (none by default)."""
