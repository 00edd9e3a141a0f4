"""An engine that holds the weights of one seat at a time: a switch moves them, and tokens stay the static layout's."""

import asyncio
from dataclasses import replace

import pytest

from bench.tiny_models import PRESETS, materialise
from pat.layout import Layout
from pat.model import ModelShape
from pat.sglang.engine import EngineDied
from pat.sglang.guard import alive
from pat.sglang.order import Fault
from tests.sglang_live.conftest import adaptive_engine, generate, generate_with_switches, hf_greedy, hf_model, run

QWEN3 = PRESETS["tiny-qwen3"]
PROMPTS = [[5 + (7 * i + 3 * j) % 200 for j in range(6 + 7 * i)] for i in range(6)]
LENGTHS = [40 + 9 * (i % 5) for i in range(len(PROMPTS))]
LOW, HIGH = Layout(1, 2), Layout(2, 1)


@pytest.mark.engine
def test_weights_move_both_ways() -> None:
    """Up by slices, with nothing on the wire; down all-gathered, at most a layer's memory beside; updates go along."""
    path, other = materialise(QWEN3), hf_model(materialise(replace(QWEN3, seed=1)))
    want, news = hf_greedy(hf_model(path), PROMPTS, LENGTHS), hf_greedy(other, PROMPTS, LENGTHS)
    shape = ModelShape.load(path)
    layer = 4 * (shape.attention_params + shape.mlp_params - 2 * shape.head_dim)
    sharded = 4 * 2 * shape.vocab * shape.hidden + shape.layers * layer
    with adaptive_engine(path, (LOW, HIGH), seats="one") as engine:
        answers, records = run(
            engine,
            generate_with_switches(
                engine, PROMPTS, LENGTHS, [(0.1, HIGH, "migrate"), (0.05, LOW, "migrate"), (0.05, HIGH, "recompute")]
            ),
        )
        assert [list(a["output_ids"]) for a in answers] == want
        up, down, _ = records
        assert up.migrated
        assert down.migrated
        assert up.weight_wire_bytes == 0
        assert up.weight_local_bytes == sharded  # half of it on each of two ranks
        assert down.weight_wire_bytes == sharded
        for record in records:
            assert 0 < record.weight_extra_bytes <= layer
            assert record.weights_s > 0
            assert abs(record.unattributed_s) < 0.05 * record.total_s
        engine.update_weights(other.state_dict().items())
        for layout in (HIGH, LOW):
            if engine.layout != layout:
                engine.switch(layout)
            answers = run(engine, generate(engine, PROMPTS, LENGTHS))
            assert [list(a["output_ids"]) for a in answers] == news, layout
        a_rank_is_killed_after_the_exchange(engine)


def a_rank_is_killed_after_the_exchange(engine) -> None:
    """Weights and KV cache have moved, the requests run nowhere yet: one clear error, and no process is left."""

    async def scenario():
        task = asyncio.create_task(generate(engine, PROMPTS, [300] * len(PROMPTS)))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineDied):
            await engine.async_switch(HIGH, fault=Fault("after", 1, kill=True))
        with pytest.raises(EngineDied, match=r"rank|process"):
            await task

    run(engine, scenario())
    assert not any(alive(process) for process in engine.guard._processes)
