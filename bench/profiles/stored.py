"""Measured step profiles on disk: what one is of, the cache, and the refusal of one that is of something else."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from bench.cache import cache_dir
from bench.errors import UserError
from bench.profiles.samples import Samples
from bench.provenance import load_average, machine, provenance, versions
from pat.layout import Layout

OF = ("model files", "device", "sglang", "torch", "cpu", "cores", "gpus")
"""What must be the same where a profile is used as where it was measured."""
PLAN = 3
"""Part of the cache's key: raise it when a profile would be measured in another way."""
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


def stamped(samples: Samples, of: dict[str, str]) -> Samples:
    """With what they are of, how they were made, and the load on the machine as they were."""
    made = provenance() | {"of": of, "load_average": load_average()}
    return replace(samples, provenance=samples.provenance | made)


def check(samples: Samples, of: dict[str, str], layouts: Iterable[Layout], source: str) -> None:
    """UserError where a profile is of another model, machine or version, or lacks a layout."""
    theirs = samples.provenance.get("of", {})
    for name in OF:
        if theirs.get(name) != of[name]:
            raise UserError(
                f"profile {source}: is of {name} {theirs.get(name, 'unknown')!r}, here it is {of[name]!r}; "
                "measure one with `python -m bench profile`, or force it with --force-profile"
            )
    check_tps(samples, layouts, source)


def check_tps(samples: Samples, layouts: Iterable[Layout], source: str) -> None:
    """UserError where a profile lacks a layout's TP degree; nothing can force that."""
    tps = [layout.tp for layout in samples.layouts]
    missing = sorted({layout.tp for layout in layouts} - set(tps))
    if missing:
        raise UserError(f"profile {source}: has no TP{missing[0]}, only {tps}; measure it with --layouts")


def load_given(path: Path, of: dict[str, str], layouts: Iterable[Layout], force: bool = False) -> Samples:
    """A profile that the user names; UserError as :func:`check`, with ``force`` only where it cannot be used at all."""
    try:
        samples = Samples.load(path)
    except ValueError as error:
        raise UserError(str(error)) from None
    if force:
        check_tps(samples, layouts, path.name)
    else:
        check(samples, of, layouts, path.name)
    return samples


def cached_path(of: dict[str, str], layouts: Iterable[Layout]) -> Path:
    """Where the profile of a model, machine and versions is cached."""
    key = repr((PLAN, sorted(of.items()), sorted(map(str, layouts))))
    return cache_dir("live-profiles") / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.parquet"


def load_cached(
    of: dict[str, str], layouts: Iterable[Layout], sequences: int = 1, max_context_tokens: int = 1
) -> Samples | None:
    """What is cached; None where nothing is, it is spoilt, or covers fewer sequences or tokens than asked for."""
    path = cached_path(of, layouts)
    if not path.is_file():
        return None
    try:
        samples = Samples.load(path)
        check(samples, of, layouts, path.name)
    except (ValueError, UserError) as error:
        log.warning("%s; measured anew", error)
        return None
    covers = samples.sequences >= sequences and samples.max_context_tokens >= max_context_tokens
    return samples if covers else None


def cached_or(
    measured: Callable[[], Samples], of: dict[str, str], layouts: Iterable[Layout], sequences: int, longest_tokens: int
) -> Samples:
    """The cached profile, else what ``measured`` gives, which is cached."""
    samples = load_cached(of, layouts, sequences, longest_tokens)
    if samples is None:
        samples = stamped(measured(), of)
        keep(samples, layouts)
    return samples


def keep(samples: Samples, layouts: Iterable[Layout]) -> None:
    """Cache a profile; a cache that cannot be written is done without."""
    try:
        samples.save(cached_path(samples.provenance["of"], layouts))
    except OSError as error:
        log.warning("live profile is not cached: %s", error)


def recorded_path(out: Path, model: str) -> Path:
    """Where the profile that an experiment's rollouts planned with lies among the records."""
    return out / "raw" / f"profile-{Path(model).name}.parquet"
