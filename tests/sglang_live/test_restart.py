"""The restart baseline, and the fit of measured costs."""

import pytest

from baselines.restart import rollout_with_restart
from bench.tiny_models import materialise
from pat.layout import Layout
from pat.sglang.calibrate import fit_costs
from tests.sglang_live.conftest import ARGUMENTS, ENVIRONMENT, hf_greedy, hf_model

PROMPTS = [[5 + (7 * i + 3 * j) % 200 for j in range(6 + 7 * i)] for i in range(4)]
LENGTHS = [30, 40, 50, 60]


@pytest.mark.engine
def test_a_restart_gives_the_same_tokens_and_its_cost(monkeypatch) -> None:
    from pat.sglang.engine import AdaptiveEngine

    path = materialise("tiny-llama")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def start(layout):
        return AdaptiveEngine(model_path=str(path), layouts=(layout,), **ARGUMENTS)

    low, high = Layout(1, 2), Layout(2, 1)
    responses, record = rollout_with_restart(start, low, high, PROMPTS, LENGTHS, restart_after_tokens=60)
    assert responses == hf_greedy(hf_model(path), PROMPTS, LENGTHS)
    assert record.requests >= 2
    assert record.tokens >= 60
    assert min(record.stop_s, record.start_s, record.prefill_s) > 0
    assert record.total_s == pytest.approx(record.stop_s + record.start_s + record.prefill_s)


def test_costs_are_found_again() -> None:
    """Exact where seconds follow the law; a term that would be negative is left out; the rest by relative errors."""
    terms = [(1, n, b) for n, b in ((1, 10), (4, 40), (4, 900), (8, 300))]
    assert fit_costs(terms, [2 + 3 * n + 0.5 * b for _, n, b in terms]) == pytest.approx([2, 3, 0.5])
    fixed, slope = fit_costs([(1, 1), (1, 2)], [1, 4])
    assert fixed == 0
    assert 1 < slope < 2
    assert fit_costs([(1, 1), (1, 2), (1, 3)], [2, 2, 2]) == pytest.approx([2, 0])
