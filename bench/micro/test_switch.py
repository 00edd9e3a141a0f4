"""Whole switches of a 0.1 B model on real SGLang, as ratios to what was measured beside them in one run. Minutes."""

import json
from pathlib import Path

from bench.report.switch import ratios
from bench.switch import run


def test_ratios_of_a_switch(benchmark, tmp_path: Path) -> None:
    path = benchmark.pedantic(run, ("llama-0.1b", 2, tmp_path), rounds=1)
    found = ratios(json.loads(path.read_text()))
    benchmark.extra_info |= {name: round(value, 4) for name, value in found.items()}
    for way in ("up", "down"):
        assert found[f"{way} / restart"] <= 0.01
        assert found[f"{way} / decode step"] < 3
    assert found["seats / weights"] <= 0.25
    assert found["weight bytes sent"] == 0
    assert found["communicators created"] == 0
    assert found["unattributed / switch"] < 0.05
