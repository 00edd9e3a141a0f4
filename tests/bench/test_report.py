"""Reports: gains, best static and the oracle's share, from records made by hand."""

import pytest

from bench.experiment import load_experiment
from bench.machine import paper_numbers
from bench.records import frame_of
from bench.report.comparison import Comparison, arm_order
from bench.report.findings import findings
from bench.report.tables import gain_rows, measured_rows, paper_rows
from tests.bench.test_records import summary

TIMES = {
    "static-TP1xDP8": (30.0, 30.0),
    "static-TP2xDP4": (20.0, 24.0),
    "static-TP8xDP1": (16.0, 16.0),
    "pat-paper": (16.0, 16.0),
    "pat-planned": (12.8, 12.8),
    "oracle": (10.0, 10.0),
}


@pytest.fixture
def comparison():
    experiment = load_experiment("h100x8-llama-24k")
    records = [
        summary(arm, seed, rollout_s=t, tokens_per_s=32_000 / t, batch=128, physical_limit_s=8.0)
        for arm, times in TIMES.items()
        for seed, t in enumerate(times)
    ]
    (found,) = Comparison.of(experiment, frame_of(records))
    return found


def test_best_static_is_the_fastest_by_mean(comparison):
    assert comparison.best_static == "static-TP8xDP1"
    assert comparison.verl_default == "static-TP2xDP4"


def test_gains_are_paired(comparison):
    """20 / 16 and 24 / 16: +25% and +50%."""
    assert comparison.gain("pat-paper", "static-TP2xDP4").mean == pytest.approx(37.5)
    assert comparison.gain("pat-planned", "static-TP8xDP1").mean == pytest.approx(25.0)
    assert comparison.gain("restart", "static-TP8xDP1") is None


def test_share_of_the_oracles_gain(comparison):
    """25% of the oracle's 60%."""
    assert comparison.share_of_oracle("pat-planned") == pytest.approx(25 / 60)


def test_the_papers_cell(comparison):
    (row,) = paper_rows([comparison], paper_numbers())
    assert row["VeRL tok/s, paper"] == "2,570.6"
    assert row["PAT tok/s, paper"] == "3,510.9"
    assert row["gain vs VeRL, paper"] == "+37%"
    assert row["gain vs VeRL, ours"].startswith("+37.5%")
    assert row["difference, points"] == "+0.5"


def test_gain_table(comparison):
    (row,) = gain_rows([comparison])
    assert row["best static"] == "TP8xDP1"
    assert row["PAT (planned) vs best static"] == "+25.0% ± 0.0"
    assert row["PAT (planned) of oracle's gain"] == "42%"


def test_findings_count_cells(comparison):
    sentences = findings([comparison])
    assert any("gains +37.5% to +37.5% over VeRL's default layout in 1 cells" in s for s in sentences)
    assert any("beats the best static layout by more than 1% in 1 of 1 cells" in s for s in sentences)


def test_an_arm_without_all_seeds_is_left_out():
    experiment = load_experiment("h100x8-llama-24k")
    records = [summary("static-TP2xDP4", 0), summary("static-TP2xDP4", 1), summary("oracle", 0)]
    (found,) = Comparison.of(experiment, frame_of(records))
    assert set(found.rollout_s) == {"static-TP2xDP4"}


def test_without_static_arms_there_is_no_gain():
    experiment = load_experiment("h100x8-llama-24k")
    (found,) = Comparison.of(experiment, frame_of([summary("pat-planned", 0), summary("oracle", 0)]))
    assert found.best_static is None
    (row,) = gain_rows([found])
    assert {row["best static"], row["PAT (planned) vs best static"], row["PAT (planned) of oracle's gain"]} == {"–"}
    assert findings([found]) == []


def test_arms_without_a_seed_in_common_have_no_gain():
    records = [summary("static-TP2xDP1", 0), summary("static-TP1xDP2", 1, rollout_s=5.0)]
    assert [row["vs best static"] for row in measured_rows(frame_of(records))] == ["–", "–"]


def test_measured_rows_name_the_best_static():
    records = [
        summary(arm, seed, rollout_s=t, tokens_per_s=100 / t, tier="measured", host_term="real")
        for arm, times in (("static-TP2xDP1", (4.0, 4.0)), ("static-TP1xDP2", (5.0, 5.0)))
        for seed, t in enumerate(times)
    ]
    first, second = measured_rows(frame_of(records))
    assert (first["arm"], first["vs best static"]) == ("static-TP1xDP2", "-20.0% ± 0.0")
    assert second["arm"] == "static-TP2xDP1 (best static)"


def test_arms_stand_in_one_order():
    arms = ["oracle", "pat-planned", "static-TP8xDP1", "pat-paper", "static-TP2xDP4"]
    assert sorted(arms, key=arm_order) == ["static-TP2xDP4", "static-TP8xDP1", "pat-paper", "pat-planned", "oracle"]
