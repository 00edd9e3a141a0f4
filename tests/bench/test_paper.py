"""The paper's numbers: claims with confidence, golden cells, swaps, memory of a switch."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.experiment import load_experiment
from bench.machine import paper_numbers
from bench.models import model_shape
from bench.paper.claims import claims
from bench.paper.memory import fused_bytes, layers_together, peak_bytes, seat_memory
from bench.paper.ours import Ours
from bench.paper.setting import SWAPS, Bench, Setting, with_all_reduce
from bench.paper.studies import all_cells, distance, paper_cells, tasks
from bench.paper.tables import tiny_shape
from bench.predicted import Cell, run_cell
from bench.profiles import step_profile
from bench.profiles.a40 import all_reduce_s
from bench.profiles.host_terms import paper_era_fits
from bench.report.paper import claim_row
from pat.layout import Layout

GOLDEN = Path(__file__).parent / "golden" / "paper_cells.json"


def test_every_number_has_confidence_and_source():
    paper = paper_numbers()
    found = claims(paper)
    assert {c.confidence.split()[0] for c in found} <= set(paper["sources"])
    assert len({c.keys for c in found}) == len(found)
    by_keys = {c.keys: c for c in found}
    abstract = by_keys["end_to_end", "iteration time reduced by up to"]
    assert (abstract.value, abstract.confidence) == (0.272, "abstract")
    assert by_keys["generation", "LLaMA3.1-8B h100x8 24K", "pat_tok_s"].value == 3510.9
    assert by_keys["models", "Qwen3-14B", "params"].value == 14.77e9
    assert by_keys["switch_overhead_s", "total", "pat"].value == 5.52


def test_a_number_without_confidence_is_refused():
    with pytest.raises(KeyError, match=r"new\.figure"):
        claims({"sources": {}, "new": {"figure": 3.0}})


def test_differences_are_points_or_percent():
    (claim,) = claims({"sources": {"abstract": "x"}, "a": {"value": 0.25, "confidence": "abstract"}})
    notes: list[str] = []
    row = claim_row(claim, Ours({"": 31.0}, "%", "predicted", "because", 100.0), notes)
    assert (row["paper"], row["difference"], row["why"]) == ("25%", "+6.0 points", "1")
    assert notes == ["*a*: because"]
    row = claim_row(claim, Ours({"": 0.26}, "s", "predicted"), notes)
    assert (row["difference"], row["why"], len(notes)) == ("+4.0%", "", 1)
    assert claim_row(claim, Ours({"": 0.25}, "s", "input"), notes)["difference"] == "–"


@pytest.mark.parametrize("name", ["a40x8-llama-16k", "h100x8-llama-24k", "h100x8-qwen-16k"])
def test_golden_cells(name):
    """Seed 0, 128 sequences, paper-era. Static arms to six digits; PAT, whose planner may improve, to 2%."""
    golden = json.loads(GOLDEN.read_text())["rollout_s"][name]
    found = {r.arm: r.rollout_s for r, _ in run_cell(Cell(load_experiment(name), 128, "paper-era", 0))}
    for arm, rollout_s in golden.items():
        assert found[arm] == pytest.approx(rollout_s, rel=1e-6 if arm.startswith("static") else 0.02), arm


def test_must_reach_h100_llama_24k_uncalibrated():
    """Mean tokens/s over seeds 0 to 2 within 10% of the paper's 2570.6 and 3510.9."""
    bench, paper = Bench.of(Setting(load_experiment("h100x8-llama-24k"))), (2570.6, 3510.9)
    rates = []
    for seed in range(3):
        trace = bench.trace(seed)
        rates.append(trace.response_tokens.sum() / [bench.static(trace).rollout_s, bench.pat(trace, seed).rollout_s])
    assert np.mean(rates, axis=0) == pytest.approx(paper, rel=0.10)


def test_a_setting_as_it_stands_is_the_cell_of_bench_gen():
    experiment = load_experiment("h100x8-llama-16k")
    bench = Bench.of(Setting(experiment))
    records = {r.arm: r.rollout_s for r, _ in run_cell(Cell(experiment, 128, "paper-era", 1))}
    trace = bench.trace(1)
    assert bench.static(trace).rollout_s == records["static-TP2xDP4"]
    assert bench.pat(trace, 1).rollout_s == records["pat-paper"]


def test_every_swap_changes_the_setting_and_has_a_name_of_its_own():
    setting = Setting(load_experiment("a40x8-llama-16k"))
    assert len({s.name for s in SWAPS}) == len(SWAPS)
    assert [s.name for s in SWAPS if s.change(setting) == setting] == ["as it stands"]


def test_all_reduce_swap_by_formula():
    """Twice the time adds 65 all-reduces of batch x 4096 x 2 bytes at TP2, and nothing at TP1."""
    profile, shape = step_profile("LLaMA3.1-8B", "a40", "none"), model_shape("LLaMA3.1-8B")
    twice = with_all_reduce(profile, shape, 2.0)
    extra = twice.decode_s(2, 16, 4096) - profile.decode_s(2, 16, 4096)
    assert extra == pytest.approx(65 * float(all_reduce_s(2, np.array([16 * 4096 * 2]))[0]))
    assert twice.decode_s(1, 16, 4096) == profile.decode_s(1, 16, 4096)


def test_distance_is_the_larger_of_both_arms():
    rows = [("verl", 0, {"tokens_per_s": 110.0}), ("pat", 0, {"tokens_per_s": 150.0})]
    assert distance(rows, {"baseline_tok_s": 100.0, "pat_tok_s": 200.0}) == pytest.approx(0.25)
    assert distance([], {}) == np.inf


def test_the_grid_and_its_tasks():
    assert len(all_cells()) == 24
    assert set(paper_cells()) == {"a40x8-llama-16k", "h100x8-llama-24k", "a40x16-qwen-16k", "h100x8-qwen-16k"}
    assert len(set(tasks())) == len(tasks())


def test_host_fits_tell_how_well_they_fit():
    fits = paper_era_fits()
    assert fits["paper-era"].r_squared == pytest.approx(0.865, abs=0.001)
    assert fits["paper-era-96"].r_squared == pytest.approx(0.998, abs=0.001)
    assert (fits["paper-era"].rows, fits["paper-era-96"].rows) == (13, 11)


def test_copies_of_fused_tensors():
    """LLaMA3.1-8B at TP8: Q, K, V 4096 x (4 + 2) x 128 and gate, up 2 x 4096 x 1792, 32 layers of 2 bytes."""
    shape = model_shape("LLaMA3.1-8B")
    assert fused_bytes(shape, 8, merged=False) == 32 * 2 * 4096 * 6 * 128
    assert fused_bytes(shape, 8, merged=True) == 32 * 2 * 4096 * (6 * 128 + 2 * 1792)


def test_seats_copy_gate_and_up_only_where_all_copies_stay_small():
    shape = model_shape("LLaMA3.1-8B")
    one, all_three = (Layout(2, 4), Layout(8, 1)), (Layout(2, 4), Layout(4, 2), Layout(8, 1))
    assert seat_memory(shape, one).copied_bytes == fused_bytes(shape, 8, merged=True)
    assert seat_memory(shape, all_three).copied_bytes == sum(fused_bytes(shape, tp, False) for tp in (4, 8))


def test_memory_formula_meets_what_was_measured_on_cpu():
    """From raw/switch.json of commit f8c3124, llama-0.1b on 2 ranks: copies of TP2's seat, and (KV bytes sent + kept,
    peak) of a switch down, where both ranks move alike, and of one up, where one rank has a little more."""
    shape = tiny_shape("llama-0.1b")
    assert seat_memory(shape, (Layout(1, 2), Layout(2, 1))).copied_bytes == 33_554_432
    for moved_bytes, peak, tolerance in ((2 * 24_379_392, 15_237_120, 0.0), (2 * 20_185_088, 15_925_248, 0.06)):
        tokens = moved_bytes // shape.kv_bytes_per_token()
        expected = peak_bytes(shape, tokens, 2, layers_together(shape, tokens), copies=1)
        assert expected == pytest.approx(peak, rel=tolerance)


def test_a_setting_without_room_starts_nothing():
    """TP1 of Qwen3-14B does not hold a sequence on A40 with a twentieth of the KV cache."""
    setting = replace(Setting(load_experiment("a40x8-qwen-24k")), kv_share=0.05)
    assert Layout(1, 8) not in setting.machine().layouts
