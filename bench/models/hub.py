"""Configurations of models by their hub names: from the step-time package where it has them, else from the hub."""

from __future__ import annotations

import importlib.util
import json
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from bench.cache import cache_dir
from pat.model import ModelShape

PACKAGE = "aiconfigurator_core"
SUFFIX = "_config.json"


@cache
def packaged() -> dict[str, Path]:
    """Configuration files of the dense, unquantised models that come with the step-time package, by hub name."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        return {}
    found = {}
    for path in sorted((Path(spec.submodule_search_locations[0]) / "model_configs").glob(f"*{SUFFIX}")):
        config = json.loads(path.read_text())
        with suppress(ValueError, IndexError, TypeError):
            ModelShape.from_config(config)
            if "quantization_config" not in config:
                found[path.name.removesuffix(SUFFIX).replace("--", "/")] = path
    return found


def hub_directory(name: str) -> Path | None:
    """A directory with the ``config.json`` of the hub's model ``org/name``; None where there is none to be had."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    if name in packaged():
        directory = cache_dir("models") / name.replace("/", "--") / name.partition("/")[2]
        directory.mkdir(parents=True, exist_ok=True)
        partial = directory / f"config.{id(name)}.partial"
        partial.write_text(packaged()[name].read_text())
        return partial.replace(directory / "config.json").parent
    return downloaded(name)


def downloaded(name: str) -> Path | None:
    """From the hub's cache on this machine, or from the hub."""
    with suppress(Exception):  # not installed, offline, no such model, no access: all the same to the caller
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, "config.json", etag_timeout=5)).parent
    return None
