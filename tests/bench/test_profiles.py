"""Profiles of real GPUs: golden kernel times, hold-out error, the cache, host terms, links."""

import json
import os
import time
from functools import cache

import numpy as np
import pandas as pd
import pytest

from bench.models import model_directory, model_shape
from bench.profiles import PROFILED, a40, aiconfigurator, host_terms, step_profile
from bench.profiles.comm_tables import logits_gather_s, newest
from bench.profiles.grid import graph_buckets, grid_batches
from bench.profiles.host_terms import host_term
from bench.profiles.links import LINKS, links_of
from bench.profiles.sampling import sampling_s
from pat.model import ModelShape
from pat.profile import StepProfile

LLAMA, QWEN = "LLaMA3.1-8B", "Qwen3-14B"


def sampler_s(model: str, gpu: str, tp: int, batch: np.ndarray) -> np.ndarray:
    """What the builder adds to kernel time."""
    vocab = model_shape(model).vocab
    if gpu == "a40":
        return sampling_s(batch, vocab, a40.BYTES_PER_S) + a40.gather_s(tp, batch * vocab * 2)
    bandwidth = aiconfigurator.SYSTEMS[gpu] * aiconfigurator.MEMORY_EFFICIENCY
    return sampling_s(batch, vocab, bandwidth) + logits_gather_s(aiconfigurator.data_root(), gpu, tp, batch * vocab)


def kernel_ms(model: str, gpu: str, batch: int, context: int) -> list[float]:
    """Decode step without sampling, by TP degree."""
    profile = step_profile(model, gpu, "none")
    times_s = [profile.decode_s(tp, batch, context) - sampler_s(model, gpu, tp, np.array(batch)) for tp in profile.tps]
    return [1e3 * float(t) for t in times_s]


@pytest.mark.parametrize(
    ("model", "batch", "expected_ms"),
    [(LLAMA, 1, [6.78, 4.17, 2.72, 2.08]), (LLAMA, 16, [11.97, 6.94, 4.13, 2.99]), (QWEN, 1, [11.4, 6.9, 4.2, 3.1])],
)
def test_h100_kernel_times_at_8k(model, batch, expected_ms):
    assert kernel_ms(model, "h100_sxm", batch, 8000) == pytest.approx(
        expected_ms, rel=0.005 if model == LLAMA else 0.02
    )


def test_h100_prefill():
    profile = step_profile(LLAMA, "h100_sxm", "none")
    assert [1e3 * float(profile.prefill_s(tp, 16000)) for tp in profile.tps] == pytest.approx(
        [457, 262, 163, 104], rel=0.01
    )


@pytest.mark.parametrize(
    ("model", "batch", "expected_ms"),
    [
        (LLAMA, 1, [28.4, 15.0, 8.6, 6.5]),
        (LLAMA, 16, [57.8, 32.9, 19.6, 17.3]),
        (LLAMA, 32, [87.6, 49.3, 29.9, 31.7]),
        (QWEN, 1, [52.9, 27.1, 15.1, 10.7]),
    ],
)
def test_a40_is_near_the_earlier_estimate(model, batch, expected_ms):
    assert kernel_ms(model, "a40", batch, 8000) == pytest.approx(expected_ms, rel=0.15)


@cache
def engine(model: str, gpu: str, tp: int):
    return aiconfigurator.compile_engine(model_directory(model), gpu, tp)


@pytest.mark.parametrize(
    ("model", "gpu", "tp"),
    [
        (LLAMA, "h100_sxm", 1),
        (LLAMA, "h100_sxm", 8),
        (QWEN, "h100_sxm", 2),
        (QWEN, "h200_sxm", 8),
        (LLAMA, "a100_sxm", 4),
        (LLAMA, "a100_sxm", 8),
        (LLAMA, "l40s", 8),
    ],
)
def test_hold_out_error_is_below_one_percent(model, gpu, tp):
    profile, random = step_profile(model, gpu, "none"), np.random.default_rng(0)
    grid = profile.grids[tp]
    largest = max(grid.graph_batches)
    for batches in (random.choice(grid.graph_batches, 600), random.integers(largest + 1, 4097, 200)):
        contexts = random.integers(1, 32768, len(batches))
        asked = zip(batches, contexts, strict=True)
        exact_ms = np.array([engine(model, gpu, tp).predict_decode_latency(b, c, 2) for b, c in asked])
        eager_s = np.where(batches > largest, grid.eager_extra_s, 0.0)
        exact_s = exact_ms * 1e-3 + sampler_s(model, gpu, tp, batches) + eager_s
        errors = np.abs(profile.table(tp, 4096).step_s(batches, contexts) / exact_s - 1)
        assert np.quantile(errors, 0.99) < 0.01
        assert errors.mean() < 0.002
    tokens = random.integers(16, 16384, 200)
    exact_s = [engine(model, gpu, tp).predict_prefill_latency(1, int(n)) * 1e-3 for n in tokens]
    assert np.quantile(np.abs(profile.prefill_s(tp, tokens) / exact_s - 1), 0.99) < 0.01


def test_short_prefills_are_within_a_tenth():
    tokens = np.arange(1, 16)
    exact_s = [engine(LLAMA, "l40s", 8).predict_prefill_latency(1, int(n)) * 1e-3 for n in tokens]
    assert step_profile(LLAMA, "l40s", "none").prefill_s(8, tokens) == pytest.approx(exact_s, rel=0.1)


def test_contexts_beyond_the_grid_are_extrapolated_though_kernels_were_measured_there():
    profile = step_profile(LLAMA, "h100_sxm", "none")
    assert not profile.extrapolated(8, 1, 32768)
    assert profile.extrapolated(8, 1, 32769)


def test_the_packages_decode_question_is_one_step_at_the_context_given():
    mine = engine(LLAMA, "h100_sxm", 2)
    one_ms = mine.predict_decode_latency(16, 8192, 2)
    assert mine.predict_decode_latency(16, 8192, 3) == pytest.approx(2 * one_ms)
    by_operation_ms = [row[1] for row in mine._engine.decode_step_per_op(16, 8191, 2)]  # counts the new token too
    assert sum(by_operation_ms) == pytest.approx(one_ms)


@pytest.mark.parametrize("gpu", PROFILED)
def test_every_gpu_has_sane_profiles(gpu):
    profile = step_profile(LLAMA, gpu, "none")
    assert profile.tps == (1, 2, 4, 8)
    for grid in profile.grids.values():
        assert np.isfinite(grid.decode_s).all()
        assert (grid.decode_s > 0).all()
        assert np.isfinite(grid.prefill_s).all()
        assert set(grid.graph_batches) <= set(grid.batches.tolist())
        assert grid.eager_extra_s >= 0
    assert profile.decode_s(2, 64, 8192) > profile.decode_s(2, 64, 1024) > profile.decode_s(2, 8, 1024)
    assert profile.extrapolated(1, 8, 8192) == (gpu == "a40")
    assert profile.extrapolated(1, 256, 32_000)
    assert gpu != "a40" or profile.provenance["source"] == "roofline + measured all-reduce"


def test_graph_buckets_are_rows_of_the_grid():
    assert graph_buckets(32) == (1, 2, 4, 8, 12, 16, 24, 32)
    assert graph_buckets(512)[-3:] == (480, 496, 512)
    rows = grid_batches(256)
    assert rows[:5] == (1, 2, 4, 8, 12)
    assert rows[-1] == 4096
    assert {513, 1025} <= set(rows)


def test_a_cached_profile_loads_fast_and_a_broken_one_is_made_anew(tmp_path, monkeypatch):
    built = step_profile(LLAMA, "h100_sxm", "none")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(aiconfigurator, "build", lambda *_: built)
    shape, directory = model_shape(LLAMA), model_directory(LLAMA)
    path = aiconfigurator.cache_path(shape, "h100_sxm")
    assert path.is_relative_to(tmp_path)
    aiconfigurator.profile(shape, directory, "h100_sxm")
    StepProfile.load(path)
    monkeypatch.setattr(aiconfigurator, "build", lambda *_: pytest.fail("built again"))
    took_s = []
    for _ in range(3):
        start = time.perf_counter()
        loaded = aiconfigurator.profile(shape, directory, "h100_sxm")
        took_s.append(time.perf_counter() - start)
    assert min(took_s) < 0.1
    assert np.array_equal(loaded.grids[8].decode_s, built.grids[8].decode_s)
    path.write_bytes(path.read_bytes()[:1000])
    monkeypatch.setattr(aiconfigurator, "build", lambda *_: built)
    aiconfigurator.profile(shape, directory, "h100_sxm")
    assert StepProfile.load(path).model == LLAMA


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch):
    built = step_profile(LLAMA, "h100_sxm", "none")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(aiconfigurator, "build", lambda *_: built)
    assert aiconfigurator.profile(model_shape(LLAMA), model_directory(LLAMA), "h100_sxm") is built


def test_only_meaningless_notices_are_dropped(capfd):
    with aiconfigurator.without_notices():
        os.write(2, b"Loading low-fidelity fallback rows for x\nsomething real\n")
    assert capfd.readouterr().err == "something real\n"
    with pytest.raises(RuntimeError, match="kept"), aiconfigurator.without_notices():
        raise RuntimeError("kept")


def test_paper_era_host_term():
    term = host_term("paper-era")
    assert 1e3 * term.base_s == pytest.approx(1.2, rel=0.1)
    assert 1e3 * term.per_sequence_s == pytest.approx(0.045, rel=0.1)
    assert not term.overlapped
    assert term.step_s(8, 4) == term.step_s(1, 4)


def test_the_paper_era_fit_hangs_on_its_rows_and_the_source_says_so():
    """Holds the two other fits that the docstring names, so that nobody takes the preset for the only reading."""
    rows = pd.read_csv(host_terms.CPU_OVERHEADS).query("batch_size <= 96")
    for parts, base_ms in ((host_terms.HOST_PARTS, 0.505), (np.delete(host_terms.HOST_PARTS, 2), 0.198)):
        slope_ms, offset_ms = np.polyfit(rows.batch_size, rows[list(parts)].sum(axis=1), 1)
        assert offset_ms == pytest.approx(base_ms, abs=0.005)
        assert slope_ms == pytest.approx(0.067, abs=0.0005)
    assert "chosen to meet a prior" in host_term("paper-era").source


def test_modern_host_term_is_overlapped_and_broadcasts():
    term = host_term("sglang-0.5")
    assert term.overlapped
    assert 1e3 * term.step_s(1, 100) == pytest.approx(1.1)
    assert 1e3 * term.step_s(2, 100) == pytest.approx(1.6)
    assert host_term("none").step_s(8, 128) == 0


@pytest.mark.parametrize(
    ("call", "known"),
    [
        (lambda: host_term("x"), "paper-era-96-no-launch, sglang-0.5, none"),
        (lambda: links_of("x"), "h100_sxm"),
        (lambda: step_profile(LLAMA, "x", "none"), "h100_sxm, h200_sxm, a100_sxm, l40s, a40"),
        (lambda: model_shape("x"), f"{LLAMA}, {QWEN}"),
    ],
)
def test_unknown_names_list_the_known(call, known):
    with pytest.raises(ValueError, match=r"'x'") as error:
        call()
    assert known in str(error.value)


@pytest.mark.parametrize("gpu", aiconfigurator.SYSTEMS)
def test_links_are_those_of_the_packages_tables(gpu):
    version = links_of(gpu).source.split("NCCL ")[1].split(" ")[0]
    path = aiconfigurator.data_root() / gpu / "comm" / "nccl" / version / "nccl_perf.parquet"
    table = pd.read_parquet(path)
    rows = table[(table.op_name == "alltoall") & (table.nccl_dtype == "half") & (table.num_gpus == 8)]
    largest, smallest = rows.loc[rows.message_size.idxmax()], rows.loc[rows.message_size.idxmin()]
    bytes_per_s = largest.message_size * 2 * 7 / 8 / (largest.latency * 1e-3)
    assert links_of(gpu).intra_node_bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    assert links_of(gpu).latency_s == pytest.approx(smallest.latency * 1e-3, rel=0.02)


def test_every_gpu_has_links_and_nodes_are_no_faster_apart():
    assert set(LINKS) == set(PROFILED)
    assert all(links.inter_node_bytes_per_s <= links.intra_node_bytes_per_s for links in LINKS.values())


def test_newest_version_is_by_number(tmp_path):
    for version in ("0.5.6.post2", "0.5.9", "0.5.14"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "t").touch()
    (tmp_path / "0.6.0").mkdir()
    assert newest(tmp_path, "t").parent.name == "0.5.14"


def test_a_model_directory_is_profiled_too(tmp_path):
    config = json.loads((model_directory(QWEN) / "config.json").read_text())
    directory = tmp_path / "half-qwen"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 20}))
    half, whole = a40.profile(model_shape(str(directory))), a40.profile(model_shape(QWEN))
    assert half.model == "half-qwen"
    assert 0.5 < half.decode_s(1, 8, 4096) / whole.decode_s(1, 8, 4096) < 0.6


def test_shapes_are_the_papers():
    assert model_shape(LLAMA).params == pytest.approx(8.03e9, rel=1e-3)
    assert model_shape(QWEN).params == pytest.approx(14.77e9, rel=1e-3)
    assert isinstance(model_shape(LLAMA), ModelShape)
    assert model_shape(LLAMA).name == LLAMA
