"""Sweeps: parallel maps, what is kept, slower wires, and the sentences made from rows."""

import json
from math import factorial

import numpy as np
import pandas as pd
import pytest

from bench import sweep
from bench.errors import UserError
from bench.machine import machine_of
from bench.parallel import chunked, parallel
from bench.profiles import a40
from bench.profiles.links import links_of
from bench.profiles.wire import slower_links, slower_profile
from bench.report import sensitivity, sensitivity_points
from bench.report.sensitivity_points import AXES, gains
from bench.report.sensitivity_words import sentences, span
from bench.sweep import Point, by_system, evaluate, read_rows, run_sweep


@pytest.mark.parametrize("processes", [1, 2])
def test_parallel_gives_every_item_its_result(processes):
    assert dict(parallel(factorial, range(40), processes=processes)) == {k: factorial(k) for k in range(40)}


def test_parallel_says_where_no_ray_cluster_answers(monkeypatch):
    ray = pytest.importorskip("ray")

    def nobody(**_):
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", nobody)
    with pytest.raises(UserError, match=r"--ray 10\.0\.0\.1:6379: no cluster answers there \(nobody there\)"):
        list(parallel(factorial, range(4), ray="10.0.0.1:6379"))


def test_chunks_hold_every_item_once_and_none_is_empty():
    for n in (1, 5, 17):
        chunks = chunked(list(range(n)), 4)
        assert sorted(pair for chunk in chunks for pair in chunk) == [(k, k) for k in range(n)]
        assert all(chunks)
        assert len(chunks) == min(4, n)


# --- what is kept


def points() -> list[Point]:
    return [Point("batch", b, "s", batch=b, host_term="paper-era", seeds=2) for b in (8, 16, 24)]


def test_only_what_is_missing_is_run(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(sweep, "parallel", lambda f, items, ray=None: ran.extend(items) or enumerate(map(f, items)))
    first = run_sweep(points()[:2], tmp_path, "s")
    path = tmp_path / "raw" / "s.jsonl"
    lines = path.read_text().splitlines()
    assert len(lines) == 4
    path.write_text("\n".join(lines[:3]) + '\n{"cut')  # the second point lacks a seed, and a line is spoilt
    ran.clear()
    told = []
    again = run_sweep(points(), tmp_path, "s", progress=told.append)
    assert [[p.batch for p in group] for group in ran] == [[16], [24]]
    assert told == [2, 3, 3]
    assert again.batch.tolist() == [8, 8, 16, 16, 24, 24]
    pd.testing.assert_frame_equal(again.iloc[:4].reset_index(drop=True), first)
    assert list(read_rows(path)) == [p.fingerprint for p in points()]
    before = path.read_bytes()
    ran.clear()
    run_sweep(points(), tmp_path, "s")
    assert (ran, path.read_bytes()) == ([], before)


def test_a_point_is_its_cell():
    """Its rows are the rollouts of the predicted tier."""
    from bench.predicted import Cell, run_cell

    point = Point("x", 0, batch=64, host_term="paper-era", seeds=2)
    (rows,) = evaluate([point])
    for row in rows:
        records = {r.arm: r.rollout_s for r, _ in run_cell(Cell(point.experiment(), 64, "paper-era", row["seed"]))}
        assert row["TP2_s"] == records["static-TP2xDP4"]
        assert row["TP8_s"] == records["static-TP8xDP1"]
        assert row["pat_s"] == records["pat-planned"]


def test_dear_switches_are_not_made():
    points = [Point("x", s, batch=64, host_term="paper-era", switch_s=s, seeds=1) for s in (0.01, 1e4)]
    (cheap,), (dear,) = evaluate(points)
    assert [evaluate([point])[0] for point in points] == [[cheap], [dear]]
    assert " " in cheap["pat_path"]
    assert " " not in dear["pat_path"]


def test_points_of_one_system_are_answered_together():
    same, other = Point("a", 1.0, batch=8), Point("b", 2.0, "s", batch=16)
    dear = Point("switch", 9.0, batch=8, switch_s=9.0)
    assert by_system([same, other, dear]) == [[same, dear], [other]]


# --- slower wires


def test_wires_go_from_the_gpus_own_to_pcie():
    point = Point("x", 0)
    machine = machine_of(point.experiment(), "none")
    shape, own = machine.shape, machine.profile
    same, pcie = (slower_profile(own, shape, "h100_sxm", share) for share in (0.0, 1.0))
    for tp in (1, 2, 8):
        assert same.decode_s(tp, 16, 4096) == pytest.approx(own.decode_s(tp, 16, 4096), rel=1e-12)
    assert pcie.decode_s(1, 16, 4096) == own.decode_s(1, 16, 4096)
    # At full share the whole difference is all-reduces and the gather of logits, as on A40 less as on H100.
    slow_s = 65 * a40.all_reduce_s(8, 16 * 4096 * 2) + a40.gather_s(8, 16 * shape.vocab * 2)
    more_s = pcie.decode_s(8, 16, 4096) - own.decode_s(8, 16, 4096)
    assert 0.9 * slow_s < more_s < slow_s
    times = [slower_profile(own, shape, "h100_sxm", x).decode_s(8, 16, 4096) for x in (0.0, 0.3, 0.6, 1.0)]
    assert np.all(np.diff(times) > 0)
    links = slower_links(links_of("h100_sxm"), 1.0)
    assert links.intra_node_bytes_per_s == pytest.approx(links_of("a40").intra_node_bytes_per_s)
    assert links.inter_node_bytes_per_s == links_of("h100_sxm").inter_node_bytes_per_s


# --- what the rows say


@pytest.mark.parametrize(
    ("gain", "said"),
    [
        ([0.0, 0.5, 0.9], "never at least 1% over best static (most +0.9% at 512 sequences)"),
        ([1.0, 5.0, 2.0], "at least 1% over best static everywhere (most +5.0% at 128 sequences)"),
        ([0.0, 1.5, 2.0], "at least 1% over best static from 128 sequences on (most +2.0% at 512 sequences)"),
        ([3.0, 1.5, 0.0], "at least 1% over best static up to 128 sequences (most +3.0% at 32 sequences)"),
        (
            [3.0, 0.5, 2.0],
            "at least 1% over best static at 2 of 3 values, 32 sequences, 512 sequences (most +3.0% at 32 sequences)",
        ),
    ],
)
def test_where_along_an_axis_it_pays(gain, said):
    batch = next(a for a in AXES if a.sweep == "batch")
    assert span(np.array([32.0, 128.0, 512.0]), np.array(gain), batch) == said


def rows_of(point: Point, statics: dict[str, float], pat_s: float) -> dict:
    row = {name: getattr(point, name) for name in Point.__dataclass_fields__}
    return row | statics | {"pat_s": pat_s, "pat_path": "TP2", "seed": 0, "fingerprint": point.fingerprint}


def test_gains_are_against_the_best_static_and_tp2():
    fits_all, high_only = Point("batch", 8, "a"), Point("batch", 16, "a", batch=16)
    frame = pd.DataFrame(
        [rows_of(fits_all, {"TP2_s": 12.0, "TP8_s": 11.0}, 10.0), rows_of(high_only, {"TP8_s": 9.0}, 10.0)]
    )
    table = gains(frame)
    assert table.best.tolist() == ["TP8", "TP8"]
    assert [g.mean for g in table.vs_best] == pytest.approx([10.0, -10.0])
    assert table.vs_verl[0].mean == pytest.approx(20.0)
    assert table.vs_verl[1] is None
    said = sentences(table)
    assert (
        "beats the best static layout by at least 1% in 1 (median of all +0.0%, most +10.0%; in 0 of the 1 by more"
        in said[0]
    )
    assert "in 1 of the 1 where TP2 fits" in said[0]
    assert "worst point against best static: -10.0% (batch sweep, a, x = 16)" in said[-1]


def test_every_axis_and_preset_is_in_the_points():
    found = sensitivity_points.points()
    assert {p.sweep for p in found} == {"host", *(a.sweep for a in AXES)}
    assert len({p.fingerprint for p in found}) == len(found)
    assert {p.host_term for p in found if p.sweep != "host"} == {"paper-era", "sglang-0.5"}
    assert {p.batch for p in found if p.sweep == "batch"} == {8, 32, 128, 256, 512, 1024, 2048, 4096}


def test_the_section_stands_on_its_records(tmp_path, monkeypatch):
    """Few points of every sweep: figures and tables are made, and made anew from records alone."""
    monkeypatch.setattr(sensitivity_points, "BATCHES", (32,))
    monkeypatch.setattr(sensitivity_points, "SWEPT_BATCHES", (8, 32))
    monkeypatch.setattr(sensitivity_points, "BASE_MS", (0.0, 1.0))
    monkeypatch.setattr(sensitivity_points, "EACH_MS", (0.0, 0.05))
    monkeypatch.setattr(sensitivity_points, "WIRES", (0.0, 1.0))
    monkeypatch.setattr(sensitivity_points, "SIGMAS", (0.5, 1.4))
    monkeypatch.setattr(sensitivity_points, "SWITCH_S", (0.05, 30.0))
    monkeypatch.setattr(sensitivity_points, "MODELS", ("LLaMA3.1-8B",))
    monkeypatch.setattr(sweep, "parallel", lambda f, items, ray=None: enumerate(map(f, items)))
    text = sensitivity.run(tmp_path).read_text()
    assert text.startswith("# When does PAT pay off?")
    for name in ("sensitivity.svg", "sensitivity-host.svg"):
        assert f"(plots/{name})" in text
        assert (tmp_path / "plots" / name).stat().st_size > 10_000
    monkeypatch.setattr(sweep, "parallel", lambda f, items, ray=None: pytest.fail("nothing was missing"))
    assert sensitivity.run(tmp_path).read_text() == text
    made = json.loads((tmp_path / "raw" / "sensitivity.provenance.json").read_text())
    assert {"commit", "versions", "machine"} <= made.keys()
