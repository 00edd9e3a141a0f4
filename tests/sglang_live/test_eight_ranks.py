"""DP4 x TP2 to TP8 with 8 KV heads, eight processes on whatever cores there are: the paper's switch, in small.

Takes minutes on two cores, for eight processes to start: runs where PAT_SLOW_TESTS is set.
"""

import os
from dataclasses import replace

import pytest

from bench.tiny_models import PRESETS, materialise
from pat.layout import Layout
from pat.sglang.engine import EngineDied
from pat.sglang.guard import alive
from pat.sglang.order import Fault
from tests.sglang_live.conftest import adaptive_engine, generate, generate_with_switches, run, tokens

PROMPTS = [[5 + (7 * i + 3 * j) % 200 for j in range(6 + 7 * i)] for i in range(8)]
LENGTHS = [24 + 3 * (i % 4) for i in range(len(PROMPTS))]


@pytest.mark.engine
@pytest.mark.skipif(not os.environ.get("PAT_SLOW_TESTS"), reason="slow: set PAT_SLOW_TESTS=1 to run it")
def test_the_papers_switch() -> None:
    model = replace(PRESETS["tiny-llama"], kv_heads=8, layers=2)
    low, high = Layout(2, 4), Layout(8, 1)
    with adaptive_engine(materialise(model), (low, high)) as engine:
        want = run(engine, generate(engine, PROMPTS, LENGTHS))
        hops = [(0.15, high, "migrate"), (0.1, low, "migrate"), (0.05, high, "recompute")]
        answers, records = run(engine, generate_with_switches(engine, PROMPTS, LENGTHS, hops))
        assert tokens(answers) == tokens(want)
        up = records[0]
        assert up.migrated >= 4
        # a sequence's KV lies on 2 ranks, each of which keeps 1 of its 4 heads and sends 3
        assert up.kv_wire_bytes == pytest.approx(3 * up.kv_local_bytes)
        with pytest.raises(EngineDied):
            engine.switch(low, fault=Fault("after", 5, kill=True))
        assert not any(alive(process) for process in engine.guard._processes)
