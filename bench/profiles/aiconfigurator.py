"""Step profiles from aiconfigurator-core: kernel times measured with SGLang on real GPUs, composed to steps.

A grid is compiled once for a (model, GPU) and cached as Parquet; only then aiconfigurator is imported (seconds).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import numpy as np

from bench.cache import cache_dir
from bench.gpus import gpu as gpu_of
from bench.launch_plan import graph_batch
from bench.profiles.comm_tables import allreduce_gap_s, logits_gather_s
from bench.profiles.coverage import attention_coverage
from bench.profiles.grid import CONTEXTS_TOKENS, PREFILL_TOKENS, graph_buckets, grid_batches, tps_of
from bench.profiles.sampling import sampling_s
from pat.model import ModelShape
from pat.profile import StepProfile, TpGrid

PACKAGE = "aiconfigurator-core"
BUILDER = 4
"""Part of the cache key: raise it when this module would build another grid from the same tables."""
SYSTEMS = {"h100_sxm": 3350e9, "h200_sxm": 4800e9, "a100_sxm": 2039e9, "l40s": 864e9}
"""GPUs taken from the package, with the peak memory bandwidth of each in bytes/s (its ``mem_bw``)."""
MEMORY_EFFICIENCY = 0.8
"""Share of the peak that streaming kernels reach (the package's ``mem_bw_empirical_scaling_factor``)."""
LIKE_LLAMA = ("MistralForCausalLM",)
IGNORED_NOTICES = ("low-fidelity fallback", "resolve_attention_lane_order")
"""Notices of the package that mean nothing here: stand-ins for tables of MoE and MLA kernels, which dense models do not
use; no default among attention kernels, where the tables hold one kernel only."""


def profile(shape: ModelShape, directory: Path, gpu: str) -> StepProfile:
    """Profile of a model on one of SYSTEMS, without host term: from the cache, or built and put there.

    directory: holds the model's ``config.json``. A cache file that cannot be read is built anew; one that cannot be
    written is done without.
    """
    path = cache_path(shape, gpu)
    try:
        return StepProfile.load(path)
    except ValueError:
        built = build(shape, directory, gpu)
        with suppress(OSError):
            built.save(path)
        return built


def cache_path(shape: ModelShape, gpu: str) -> Path:
    """Where the profile is kept: keyed by model shape, GPU, package version and builder version."""
    key = json.dumps([asdict(shape), gpu, version(PACKAGE), BUILDER], sort_keys=True)
    return cache_dir("profiles") / f"{shape.name}-{gpu}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.parquet"


def build(shape: ModelShape, directory: Path, gpu: str) -> StepProfile:
    """Compile the grids of every TP degree that divides the model."""
    grids = {tp: build_grid(shape, directory, gpu, tp) for tp in tps_of(shape)}
    provenance = {
        "tier": "predicted",
        "source": f"{PACKAGE} {version(PACKAGE)}, kernels measured with SGLang on {gpu}, interpolated",
        "added": "sampling step (memory-bound passes, all-gather of logits)",
    }
    return StepProfile(shape.name, gpu, grids, provenance=provenance)


def build_grid(shape: ModelShape, directory: Path, gpu: str, tp: int) -> TpGrid:
    """Grid of one TP degree.

    The package's decode question takes (batch, context, osl) and answers osl - 1 steps at that same context, so osl = 2
    is one step; a test holds this to its answer by operation. ``eager_extra_s``: without a CUDA graph each of two
    all-reduces a layer and the embedding's takes longer, by the measured gap at the first batch without one. Launches
    of other kernels are hidden behind the kernels of so large a batch.
    """
    engine = compile_engine(directory, gpu, tp)
    largest = graph_batch(gpu_of(gpu).memory_bytes, tp)
    batches = grid_batches(largest)
    decode_ms = [[engine.predict_decode_latency(b, c, 2) for c in CONTEXTS_TOKENS] for b in batches]
    prefill_ms = [engine.predict_prefill_latency(1, n) for n in PREFILL_TOKENS]
    batch = np.array(batches)
    reductions = 2 * shape.layers + 1
    coverage = attention_coverage(data_root(), gpu, shape, tp)
    return TpGrid(
        tp,
        batch,
        np.array(CONTEXTS_TOKENS),
        np.array(decode_ms) * 1e-3 + added_s(shape, gpu, tp, batch)[:, None],
        np.array(PREFILL_TOKENS),
        np.array(prefill_ms) * 1e-3,
        graph_batches=graph_buckets(largest),
        eager_extra_s=reductions * allreduce_gap_s(data_root(), gpu, tp, (largest + 1) * shape.hidden),
        **coverage,
    )


def added_s(shape: ModelShape, gpu: str, tp: int, batch: np.ndarray) -> np.ndarray:
    """[B] seconds of the sampling step, which the package's decode step lacks."""
    gather_s = logits_gather_s(data_root(), gpu, tp, batch * shape.vocab)
    return sampling_s(batch, shape.vocab, SYSTEMS[gpu] * MEMORY_EFFICIENCY) + gather_s


def data_root() -> Path:
    """The package's directory of measured tables, found without importing it."""
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None:
        raise ValueError(f"step profiles need {PACKAGE}: pip install {PACKAGE}")
    return Path(spec.submodule_search_locations[0]) / "systems" / "data"


def compile_engine(directory: Path, gpu: str, tp: int):
    """The package's engine of a model under a TP degree, without its notices; errors are kept.

    An architecture that the package does not know, but that has the layers of LLaMA (Mistral), is compiled as LLaMA of
    the same sizes.
    """
    from aiconfigurator_core.sdk.engine import EngineHandle

    config = json.loads((directory / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder, without_notices():
        if config["architectures"][0] in LIKE_LLAMA:
            directory = Path(folder)
            like = config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
            (directory / "config.json").write_text(json.dumps(like))
        return EngineHandle.compile(str(directory), gpu, "sglang", tp_size=tp)


@contextmanager
def without_notices() -> Iterator[None]:
    """Drop lines with IGNORED_NOTICES from stdout and stderr, of native code too; all others follow afterwards."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    kept = {fd: os.dup(fd) for fd in (1, 2)}
    with tempfile.TemporaryFile() as file:
        for fd in kept:
            os.dup2(file.fileno(), fd)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for fd, original in kept.items():
                os.dup2(original, fd)
                os.close(original)
            file.seek(0)
            for line in file.read().decode(errors="replace").splitlines():
                if not any(notice in line for notice in IGNORED_NOTICES):
                    print(line, file=sys.stderr)
