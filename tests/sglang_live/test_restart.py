"""The restart baseline and the measured costs of a switch, on one engine after the other."""

import pytest

from baselines.restart import rollout_with_restart
from bench.tiny_models import materialise
from pat.layout import Layout
from pat.sglang.calibrate import fit_line, measure_costs
from tests.sglang_live.conftest import ARGUMENTS, ENVIRONMENT, adaptive_engine, generate, run

PROMPTS = [[5 + (7 * i + 3 * j) % 200 for j in range(6 + 7 * i)] for i in range(4)]
LENGTHS = [30, 40, 50, 60]


@pytest.mark.engine
def test_a_restart_gives_the_same_tokens_and_its_cost(monkeypatch) -> None:
    from pat.sglang.engine import AdaptiveEngine

    path = materialise("tiny-llama")
    low, high = Layout(1, 2), Layout(2, 1)
    with adaptive_engine(path, (low, high)) as engine:
        want = [list(a["output_ids"]) for a in run(engine, generate(engine, PROMPTS, LENGTHS))]
        costs = run(engine, measure_costs(engine, (32, 256), sequences=2, rounds=2))
        assert costs.bytes_per_s > 1e5
        assert 0 < costs.recompute_s(100) < 10
        assert 0 <= costs.exchange_s < 1
        engine.costs = costs
        assert engine.switch(high).migrated == 0
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def start(layout):
        return AdaptiveEngine(model_path=str(path), layouts=(layout,), **ARGUMENTS)

    responses, record = rollout_with_restart(start, low, high, PROMPTS, LENGTHS, restart_after_tokens=60)
    assert responses == want
    assert record.requests >= 2
    assert record.tokens >= 60
    assert min(record.stop_s, record.start_s, record.prefill_s) > 0
    assert record.total_s == pytest.approx(record.stop_s + record.start_s + record.prefill_s)


def test_fit_of_a_line() -> None:
    assert fit_line([1, 2, 4], [3, 5, 9]) == pytest.approx((1, 2))
    assert fit_line([1, 2], [2, 1])[1] == 0
    fixed, slope = fit_line([1, 2], [1, 4])
    assert fixed == 0
    assert slope > 0
