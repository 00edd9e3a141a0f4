"""The switch on two CUDA devices, with CUDA graphs kept in each seat, or captured anew. Skips without them."""

import pytest
import torch

from bench.tiny_models import materialise
from pat.layout import Layout
from tests.sglang_live.conftest import generate, generate_with_switches, run, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
PROMPTS = [[5 + (7 * i + 3 * j) % 200 for j in range(6 + 7 * i)] for i in range(8)]
LENGTHS = [120] * len(PROMPTS)


@pytest.mark.parametrize("seats", ["all", "one"])
def test_switches_on_cuda_keep_their_tokens(seats) -> None:
    from pat.sglang.engine import AdaptiveEngine

    low, high = Layout(1, 2), Layout(2, 1)
    path = str(materialise("tiny-llama"))
    engine = AdaptiveEngine(model_path=path, layouts=(low, high), dtype="float32", mem_fraction_static=0.5, seats=seats)
    try:
        want = run(engine, generate(engine, PROMPTS, LENGTHS))
        hops = [(0.1, high, "migrate"), (0.1, low, "recompute"), (0.1, high, "auto")]
        answers, records = run(engine, generate_with_switches(engine, PROMPTS, LENGTHS, hops))
        assert [len(a["output_ids"]) for a in answers] == LENGTHS
        assert tokens(answers) == tokens(want)
        up, down, _ = records
        assert up.weight_wire_bytes == 0
        assert (down.weight_wire_bytes > 0) == (seats == "one")
        assert all((record.graphs_s > 0.01) == (seats == "one") for record in records)
    finally:
        engine.shutdown()
