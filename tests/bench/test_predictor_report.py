"""results/predictor.md from records made by hand: every error in it is known beforehand."""

import json

import pytest

from bench.errors import UserError
from bench.experiment import load_experiment
from bench.profiles.stored import OF, recorded_path, stamped
from bench.records import RecordStore, frame_of
from bench.report.comparison import Comparison
from bench.report.predictor import SECTIONS, check_predictor, render_predictor
from bench.report.regret import ablation_section, regret_section, scenario_section
from bench.report.step_errors import hold_out_rows
from bench.report.tables import error_summary
from tests.bench.test_fidelity import EXPERIMENT, run, trace_of
from tests.bench.test_live_profile import samples_of
from tests.bench.test_records import summary as record_of

SLOWER = 1.25
"""Measured times over those of the profile: every prediction is 20% too short."""


@pytest.fixture
def out(tmp_path):
    """A profile, and two measured rollouts on a machine that has become slower since."""
    samples = stamped(samples_of(), dict.fromkeys(OF, "here"))
    samples.save(recorded_path(tmp_path, "tiny"))
    store, records = RecordStore(tmp_path, EXPERIMENT.name), []
    for arm in ("static-TP1xDP2", "pat-forced"):
        record, steps, _ = run(arm, SLOWER)
        records.append(record.model_copy(update={"fingerprint": arm, "load_average": 2.0}))
        store.write_steps(records[-1], steps)
    store.append(records)
    trace = trace_of()
    trace.write(tmp_path / "raw" / "traces" / f"{trace.sha256[:12]}.jsonl")
    made = {"experiment": EXPERIMENT.model_dump(mode="json"), "fingerprints": [r.fingerprint for r in records]}
    provenance = {name: samples.provenance[name] for name in ("command", "commit", "machine", "versions")}
    store.write_made(made | {"traces": [], "provenance": provenance})
    return tmp_path


def cells_of(text: str, *starts: str) -> list[str]:
    """The cells of the one table row that begins with these."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    (row,) = [row for row in rows if tuple(row[: len(starts)]) == starts]
    return row[len(starts) :]


def test_every_section_and_the_known_errors(out):
    path = render_predictor(out)
    check_predictor(path)
    text = path.read_text()
    assert cells_of(text, "cpu-tiny", "rollout time") == ["2", "20.0%", "20.0%", "20.0%"]
    assert cells_of(text, "cpu-tiny", "decode step, mean of a rollout") == ["2", "20.0%", "20.0%", "20.0%"]
    static = cells_of(text, "cpu-tiny", "static-TP1xDP2", "0")
    assert static[0] == "TP1xDP2"
    assert static[3] == "-20.0%"
    assert cells_of(text, "tiny", "TP1xDP2", "15")[:3] == ["0.0%", "0.0%", "0.0%"]
    assert "p90 error 20.0%, mean signed error -20.0%" in text
    assert "records of ablation arms are not there" in text
    assert (out / "plots" / "predictor.svg").stat().st_size > 1000
    assert render_predictor(out).read_text() == text


def test_a_profile_of_another_machine_is_not_replayed(out):
    store = RecordStore(out, EXPERIMENT.name)
    made = store.read_made()
    made["provenance"]["machine"]["cpu"] = "another"
    store.write_made(made)
    assert "No measured rollouts with a profile of the same model and machine" in render_predictor(out).read_text()


def test_a_missing_section_or_record_is_an_error(out, tmp_path_factory):
    path = render_predictor(out)
    path.write_text(path.read_text().replace(SECTIONS[3], ""))
    with pytest.raises(UserError, match="lacks the section '## Fidelity"):
        check_predictor(path)
    with pytest.raises(UserError, match="no records there"):
        render_predictor(tmp_path_factory.mktemp("empty"))


def test_hold_out_rows_tell_what_repeats_differ_by():
    def drift(rows):
        rows.loc[rows.repeat == 3, "latency_s"] *= 1.1
        return rows

    row = hold_out_rows([samples_of(drift)])[0]
    assert row["mean"] == "0.0%"  # the median repeat is exact
    assert row["repeats, mean"] == "6.5%"  # (4.76 + 4.76 + 10) / 3


def test_summaries_leave_out_what_is_not_known():
    assert error_summary([0.1, -0.3, float("nan")]) == {"points": "2", "p50": "20.0%", "p90": "28.0%", "mean": "20.0%"}
    assert error_summary([])["mean"] == "–"


def test_regret_and_ablations_are_against_the_oracle_and_the_planner():
    times = {"static-TP8xDP1": 16.0, "pat-planned": 12.8, "oracle": 10.0, "no-check": 14.0}
    records = [record_of(arm, seed, rollout_s=t, batch=128) for arm, t in times.items() for seed in (0, 1)]
    comparisons = Comparison.of(load_experiment("h100x8-llama-24k"), frame_of(records))
    regret = "\n".join(regret_section(comparisons))
    assert cells_of(regret, "h100x8-llama-24k", "128")[-3:] == ["42%", "28.0%", "28.0%"]
    ablation = "\n".join(ablation_section(comparisons))
    assert cells_of(ablation, "no-check")[:4] == ["1", "-8.57%", "-8.57%", "-8.57%"]


def test_scenarios_by_family_and_the_worst(tmp_path):
    assert "are not there" in scenario_section(tmp_path)[1]
    same = {
        "model": "m",
        "gpu": "g",
        "gpus": 8,
        "host_term": "h",
        "cap_tokens": 9,
        "batch": 8,
        "best_static": "TP8xDP1",
    }
    same |= {"layouts": [[0.0, "TP2xDP4"], [1.5, "TP8xDP1"]]}
    gains = {"uniform:1,9": (4.0, -2.0), "constant:5": (0.0, 0.5)}
    rows = [same | {"scenario": f"{f}-{g}", "lengths": f, "gain_percent": g} for f, gs in gains.items() for g in gs]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "scenarios.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "\n".join(scenario_section(tmp_path))
    assert cells_of(text, "uniform") == ["2", "+1.00%", "+4.00%", "-2.00%", "1"]
    assert cells_of(text, "constant") == ["2", "+0.25%", "+0.50%", "+0.00%", "0"]
    assert "1 are more than 1% slower; the worst is -2.00%" in text
    assert cells_of(text, "uniform:1,9--2.0")[-1] == "TP2xDP4 → TP8xDP1"
