"""switch.md from a record made by hand: ratios, parts and the paper's figures."""

import json

import numpy as np
import pytest

from bench.errors import UserError
from bench.report.switch import ALL_PARTS, kv_rows, paper_rows, part_rows, ratios, render_switch, sentences
from bench.switch import LAYOUTS, ToAndFro
from pat.policy import Keep, RolloutState, Switch


def record(old, new, kv_s) -> dict:
    parts = dict.fromkeys((f"{part}_s" for part in ALL_PARTS), 0.0) | {"pause_s": 0.010, "kv_s": kv_s}
    return parts | {
        "old": old,
        "new": new,
        "total_s": 0.010 + kv_s,
        "kv_wire_bytes": 3_000_000,
        "kv_local_bytes": 1_000_000,
        "weight_wire_bytes": 0,
        "groups_created": 3,
    }


@pytest.fixture
def found() -> dict:
    up = [record("TP1xDP2", "TP2xDP1", kv) for kv in (9.0, 0.020, 0.030, 0.040)]  # the first is a warm-up
    down = [record("TP2xDP1", "TP1xDP2", kv) for kv in (9.0, 0.010)]
    return {
        "model": "llama-0.1b",
        "sequences": 16,
        "prompt_tokens": 64,
        "switches": up + down,
        "kv_trials": [
            {"old": "TP1xDP2", "new": "TP2xDP1", "way": way, "sequences": n, "predicted_s": 0.012, "measured_s": s}
            for way in ("migrate", "recompute")
            for n in (1, 8)
            for s in (0.010, 0.012, 0.016)
        ],
        "seats_bytes": {"TP1": [0, 400_000_000], "TP2": [175_000_000, 25_000_000]},
        "decode_step_ms": {"TP1": 100.0, "TP2": 50.0},
        "restart": {"stop_s": 1.0, "start_s": 7.0, "prefill_s": 2.0, "total_s": 10.0},
        "load_average": 0.1,
        "provenance": {
            "command": "python -m bench switch",
            "commit": "c",
            "versions": {"x": "1"},
            "machine": {"cpu": "y"},
        },
    }


def test_ratios(found):
    up, down, rest = sentences(found)
    assert "A switch up takes 40 ms (median of 3): 0.40% of a restart (10.0 s), 0.4 decode steps" in up
    assert "A switch down takes 20 ms (median of 1): 0.20% of a restart (10.0 s), 0.4 decode steps" in down
    assert "sent 0 bytes of weights and created 0 communicators" in rest


def test_ratios_as_numbers(found):
    value = ratios(found)
    assert value["up / restart"] == pytest.approx(0.004)
    assert value["down / decode step"] == pytest.approx(0.4)
    assert value["seats / weights"] == pytest.approx(25 / 400)
    assert (value["weight bytes sent"], value["communicators created"]) == (0, 0)


def test_predictions_of_kv_cache(found):
    """Errors +20%, 0 and -25%."""
    rows = kv_rows(found)
    assert [(row["KV cache"], row["sequences"]) for row in rows] == [
        ("migrate", "1"),
        ("migrate", "8"),
        ("recompute", "1"),
        ("recompute", "8"),
    ]
    assert rows[0] == {
        "switch": "TP1xDP2 → TP2xDP1",
        "KV cache": "migrate",
        "sequences": "1",
        "predicted": "12.0",
        "measured": "12.0",
        "error": "+0% (-20 – +16)",
        "switches": "3",
    }


def test_parts(found):
    rows = {row["part"]: row for row in part_rows(found)}
    assert rows["kv"]["up"] == "30.0 (22.0 – 38.0)"
    assert rows["total"]["down"] == "20.0 (20.0 – 20.0)"
    assert rows["KV sent, MB"]["up"] == "3.0"


def test_beside_the_paper(found):
    rows = {row["part"]: row for row in paper_rows(found)}
    assert (rows["kv cache"]["restart, paper"], rows["kv cache"]["PAT, paper"]) == ("19.01", "2.36")
    assert (rows["kv cache"]["restart, measured here"], rows["kv cache"]["PAT, measured here"]) == ("2.00", "0.0300")
    assert rows["process restart"]["restart, measured here"] == "8.00"
    assert (rows["PAT / restart"]["PAT, paper"], rows["PAT / restart"]["PAT, measured here"]) == ("9.4%", "0.40%")


def test_rendering(found, tmp_path):
    with pytest.raises(UserError, match="python -m bench switch"):
        render_switch(tmp_path)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "switch.json").write_text(json.dumps(found))
    text = render_switch(tmp_path).read_text()
    (seat,) = (line for line in text.splitlines() if line.startswith("| TP2 "))
    assert [cell.strip() for cell in seat.split("|")[1:-1]] == ["TP2", "175.0", "25.0", "6.2%"]
    assert (tmp_path / "plots" / "switch.svg").is_file()


def test_to_and_fro_switches_at_every_hop():
    def state(generated, switches):
        tokens = np.array([generated, generated - 3])
        return RolloutState(0.0, LAYOUTS[switches % 2], tokens, tokens + 9, 0, np.array([]), switches)

    policy = ToAndFro(every_tokens=10)
    assert isinstance(policy.decide(state(9, 0)), Keep)
    assert policy.decide(state(10, 0)) == Switch(LAYOUTS[1], 0.0, 0.0)
    assert isinstance(policy.decide(state(19, 1)), Keep)
    assert policy.decide(state(20, 1)) == Switch(LAYOUTS[0], 0.0, 0.0)
