"""PAT as a measured arm on a real engine: the tokens of the static layout, and a switch where it is due."""

import pytest

from bench.backends.adaptive_engine import REPORT_STEPS, AdaptiveRollouts
from bench.backends.sglang_engine import StaticEngine
from bench.profiles.live import measure
from bench.tiny_models import materialise
from pat.layout import Layout
from pat.policy import Keep, Switch

LOW, HIGH = Layout(1, 2), Layout(2, 1)
PROMPTS = [[5 + (7 * i + 3 * j) % 200 for j in range(10 + 5 * i)] for i in range(6)]
RESPONSES = [12, 16, 20, 24, 60, 80]
SIZES = {"sequences": 8, "kv_tokens_per_rank": 2048}


class UpBelow:
    """Begins in the lowest TP; goes up as soon as fewer than ``alive`` sequences run."""

    interval_steps = REPORT_STEPS
    alive = 4

    def first_layout(self, prompt_tokens):
        return LOW

    def decide(self, state):
        due = state.layout == LOW and len(state.generated_tokens) < self.alive
        return Switch(HIGH, 1.0, 0.1) if due else Keep()

    def switched(self, predicted_s, observed_s):
        assert predicted_s == 0.1
        assert observed_s > 0


@pytest.mark.engine
def test_an_adaptive_rollout_gives_the_static_tokens_and_finds_its_switch():
    model = materialise("tiny-llama")
    with StaticEngine.of(model, LOW, **SIZES) as static:
        expected = static.rollout(PROMPTS, RESPONSES).output_ids
    with AdaptiveRollouts.over(model, (LOW, HIGH), **SIZES) as engine:
        engine.policy = UpBelow()
        for _ in range(2):  # the second begins in the lowest TP again
            found = engine.rollout(PROMPTS, RESPONSES)
            assert found.output_ids == expected
            assert [(s.old, s.new) for s in found.switches] == [(LOW, HIGH)]
            assert found.steps.tp.iloc[0] == 1
            assert found.steps.tp.iloc[-1] == 2
        samples = measure(engine, "tiny", 8, 128)
    assert samples.layouts == (LOW, HIGH)
    assert set(samples.steps.batch[samples.steps.kind == "decode"]) >= {1, 2, 3, 4}
    assert {(s["old"], s["new"], s["migrated"]) for s in samples.switches} == {
        (str(LOW), str(HIGH), 0),
        (str(HIGH), str(LOW), 0),
    }
    assert 0 < samples.parts().fixed_s < 5
    assert all((grid.decode_s > 0).all() for grid in samples.profile().grids.values())
