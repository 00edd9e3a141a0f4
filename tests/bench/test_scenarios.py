"""Random scenarios: the same ones each time, all of them kept, only what is missing run again."""

import pytest

import bench.scenarios as scenarios
from bench.scenarios import FAMILIES, draw, read, run


def test_the_same_scenarios_are_drawn_each_time_and_cover_what_they_should():
    cells = draw(500)
    assert cells[:20] == draw(20)
    families = [cell.experiment.lengths.split(":")[0] for cell in cells]
    assert {families.count(family) for family in FAMILIES} == {100}
    assert {cell.batch for cell in cells} <= set(range(8, 1025, 8))
    assert min(cell.batch for cell in cells) == 8
    assert max(cell.batch for cell in cells) > 900
    assert {(c.experiment.model, c.experiment.cluster.gpu) for c in cells} == {
        (model, gpu) for model in scenarios.MODELS for gpu, _ in scenarios.CLUSTERS
    }


def test_only_what_is_missing_runs_again(tmp_path, monkeypatch):
    ran = []

    def fake(cell):
        ran.append(cell.experiment.name)
        return {"scenario": cell.experiment.name, "gain_percent": 1.0}

    monkeypatch.setattr(scenarios, "run_one", fake)
    path = run(tmp_path, 2)
    assert [row["scenario"] for row in read(path)] == ran == ["scenario-000", "scenario-001"]
    whole = path.read_bytes()
    told = []
    run(tmp_path, 2, lambda done, of: told.append((done, of)))
    assert (len(ran), told) == (2, [(2, 2)])
    path.write_bytes(whole[:-5])  # the last line is cut
    run(tmp_path, 2)
    assert ran[2:] == ["scenario-001"]
    assert path.read_bytes() == whole


def test_an_interrupted_run_keeps_what_it_had(tmp_path, monkeypatch):
    def fake(cell):
        if cell.experiment.name == "scenario-001":
            raise KeyboardInterrupt
        return {"scenario": cell.experiment.name, "gain_percent": 1.0}

    monkeypatch.setattr(scenarios, "run_one", fake)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, 2)
    assert [row["scenario"] for row in read(tmp_path / "raw" / "scenarios.jsonl")] == ["scenario-000"]
