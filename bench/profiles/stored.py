"""Measured step profiles on disk: what a profile is of, the cache, and the refusal of one that is of something else."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from bench.cache import cache_dir
from bench.errors import UserError
from bench.provenance import load_average, machine, versions
from pat.layout import Layout
from pat.profile import StepProfile

OF = ("model files", "device", "sglang", "torch", "cpu", "cores", "gpus")
"""What must be the same where a profile is used as where it was measured."""
log = logging.getLogger(__name__)


def identity(model_path: Path, device: str) -> dict[str, str]:
    """What a profile measured here and now would be of, by the names of :data:`OF`."""
    found, here = versions(), machine()
    software = {name: found.get(name, "none") for name in ("sglang", "torch")}
    hardware = {name: here[name] for name in ("cpu", "cores", "gpus")}
    return {"model files": model_hash(model_path), "device": device} | software | hardware


def model_hash(model_path: Path) -> str:
    """Of the configuration's content and the weight files' names and sizes: step times hang on shapes, not on values.

    UserError where there is no configuration.
    """
    try:
        digest = hashlib.sha256((model_path / "config.json").read_bytes())
    except OSError:
        raise UserError(f"model {model_path}: has no config.json; give a preset or a model directory") from None
    for path in sorted(model_path.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def stamped(profile: StepProfile, of: dict[str, str]) -> StepProfile:
    """The profile with what it is of, and the load on the machine as it was measured."""
    return replace(profile, provenance=profile.provenance | {"of": of, "load_average": load_average()})


def check(profile: StepProfile, of: dict[str, str], layouts: Iterable[Layout], source: str) -> None:
    """UserError where a profile is of another model, machine or version, or lacks a layout's TP degree."""
    theirs = profile.provenance.get("of", {})
    for name in OF:
        if theirs.get(name) != of[name]:
            raise UserError(
                f"profile {source}: is of {name} {theirs.get(name, 'unknown')!r}, here it is {of[name]!r}; "
                "measure one with `python -m bench profile`, or force it with --force-profile"
            )
    check_tps(profile, layouts, source)


def check_tps(profile: StepProfile, layouts: Iterable[Layout], source: str) -> None:
    """UserError where a profile lacks a layout's TP degree; nothing can force that."""
    missing = sorted({layout.tp for layout in layouts} - set(profile.tps))
    if missing:
        raise UserError(f"profile {source}: has no TP{missing[0]}, only {list(profile.tps)}; measure it with --layouts")


def load_given(path: Path, of: dict[str, str], layouts: Iterable[Layout], force: bool = False) -> StepProfile:
    """A profile that the user names; UserError as :func:`check`, with ``force`` only where it cannot be used at all."""
    try:
        profile = StepProfile.load(path)
    except ValueError as error:
        raise UserError(str(error)) from None
    if force:
        check_tps(profile, layouts, path.name)
    else:
        check(profile, of, layouts, path.name)
    return profile


def cached_path(of: dict[str, str], layouts: Iterable[Layout], *shape: int) -> Path:
    """Where the profile of these layouts is cached; ``shape``: the sequences and tokens that it covers."""
    key = repr((sorted(of.items()), sorted(map(str, layouts)), shape))
    return cache_dir("live-profiles") / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.parquet"


def load_cached(path: Path, of: dict[str, str], layouts: Iterable[Layout]) -> StepProfile | None:
    """What is cached there; None where nothing is, or it is spoilt."""
    if not path.is_file():
        return None
    try:
        profile = StepProfile.load(path)
        check(profile, of, layouts, path.name)
    except (ValueError, UserError) as error:
        log.warning("%s; measured anew", error)
        return None
    return profile


def keep(profile: StepProfile, path: Path) -> None:
    """Cache a profile; a cache that cannot be written is done without."""
    try:
        profile.save(path)
    except OSError as error:
        log.warning("live profile is not cached: %s", error)
