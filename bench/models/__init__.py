"""The models that experiments name: the paper's two by their published architecture, any other by its directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pat.model import ModelShape

BUILT_IN = {"LLaMA3.1-8B": "llama3.1-8b", "Qwen3-14B": "qwen3-14b"}
"""Directory beside this file that holds each model's ``config.json``: architecture only, no weights."""


def model_directory(name: str) -> Path:
    """Directory with the ``config.json`` of a built-in model, or of the Hugging Face model directory ``name``.

    ValueError lists the built-in names where ``name`` is neither.
    """
    directory = Path(__file__).parent / BUILT_IN[name] if name in BUILT_IN else Path(name).expanduser()
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"model {name!r} is neither one of {', '.join(BUILT_IN)} nor a Hugging Face model directory (config.json)"
        )
    return directory


def model_shape(name: str) -> ModelShape:
    """Shape of a built-in model, named as experiments name it, or of a model directory; ValueError as above."""
    return replace(ModelShape.load(model_directory(name)), name=name if name in BUILT_IN else Path(name).name)
