"""The models that experiments name: the paper's two by their published architecture, others by directory or name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from bench.models.hub import hub_directory, packaged
from pat.model import ModelShape

BUILT_IN = {"LLaMA3.1-8B": "llama3.1-8b", "Qwen3-14B": "qwen3-14b"}
"""Directory beside this file that holds each model's ``config.json``: architecture only, no weights."""


def model_directory(name: str) -> Path:
    """Directory with the ``config.json`` of a built-in model, of the Hugging Face model directory ``name``, or of a
    model of that name on the hub.

    ValueError lists the known names where ``name`` is none of them.
    """
    directory = Path(__file__).parent / BUILT_IN[name] if name in BUILT_IN else Path(name).expanduser()
    if (directory / "config.json").is_file():
        return directory
    if not directory.exists() and (found := hub_directory(name)):
        return found
    raise ValueError(
        f"model {name!r} is neither one of {', '.join((*BUILT_IN, *packaged()))} nor a Hugging Face model directory "
        "(config.json) nor a name of the hub that can be read from here"
    )


def model_shape(name: str) -> ModelShape:
    """Shape of a built-in model, named as experiments name it, or of a model directory; ValueError as above, or where
    its weights are quantised."""
    directory = model_directory(name)
    if "quantization_config" in json.loads((directory / "config.json").read_text()):
        raise ValueError(f"model {name!r}: quantised weights are not modelled; give the unquantised model")
    return replace(ModelShape.load(directory), name=name if name in BUILT_IN else Path(name).name)
