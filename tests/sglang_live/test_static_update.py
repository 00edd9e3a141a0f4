"""Weight updates of an engine with one layout: answered when every rank has the weights, not only the leader."""

import os
from dataclasses import dataclass, replace

import pytest

from bench.tiny_models import PRESETS, materialise
from pat.layout import Layout
from pat.sglang import whole_update
from tests.sglang_live.conftest import adaptive_engine, generate, hf_greedy, hf_model, run

PROMPTS = [[5 + (7 * i + 3 * j) % 200 for j in range(9)] for i in range(3)]


@dataclass
class Output:
    success: bool = True
    message: str = "done"


@pytest.mark.parametrize(
    ("others", "answer"),
    [((True, "done"), (True, "done")), ((False, "no such file"), (False, "no such file"))],
)
def test_the_answer_is_that_of_all_ranks(monkeypatch, others, answer):
    import sglang.srt.distributed as distributed

    gathered = []

    class Group:
        world_size, cpu_group = 2, "gloo"

    def gather(told, mine, group):
        gathered.append((mine, group))
        told[:] = [mine, others]

    monkeypatch.setattr(distributed, "get_tp_group", Group)
    monkeypatch.setattr(whole_update.dist, "all_gather_object", gather)
    output = whole_update.after_all(lambda updater, request: Output(), None, None)
    assert (output.success, output.message) == answer
    assert gathered == [((True, "done"), "gloo")]


@pytest.mark.engine
@pytest.mark.timeout(180)
def test_an_update_reaches_both_ranks_which_start_with_the_hook(monkeypatch):
    from sglang.srt.entrypoints.engine import Engine

    start, seen = Engine.__init__, []

    def noted(engine, **arguments):
        seen.append(os.environ.get(whole_update.VARIABLE))
        start(engine, **arguments)

    monkeypatch.setattr(Engine, "__init__", noted)
    path = materialise(PRESETS["tiny-llama"])
    other = hf_model(materialise(replace(PRESETS["tiny-llama"], seed=1)))
    want, had = hf_greedy(other, PROMPTS, [12] * 3), hf_greedy(hf_model(path), PROMPTS, [12] * 3)
    assert want != had
    with adaptive_engine(path, (Layout(2, 1),)) as engine:
        assert (seen, os.environ.get(whole_update.VARIABLE)) == (["1"], None)
        for expected in (had, want):
            assert [list(a["output_ids"]) for a in run(engine, generate(engine, PROMPTS, [12] * 3))] == expected
            engine.update_weights(other.state_dict().items())
