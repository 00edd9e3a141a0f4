"""Real engines on the CPU: exactness against Hugging Face transformers, forced lengths, the step log in closed form."""

import os
import signal
import time
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.backends.engine_arguments import EngineError, check_launch
from bench.backends.processes import child_processes, lives, quiet_resource_tracker
from bench.backends.sglang_engine import StaticEngine
from bench.tiny_models import PRESETS, materialise
from pat.layout import Layout

PROMPTS = [[5 + (7 * i + 3 * j) % 200 for j in range(10 + 5 * i)] for i in range(6)]
RESPONSES = [20, 30, 40, 10, 1, 25]


@cache
def hf_greedy(model_name: str) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(materialise(model_name), dtype=torch.float32)
    found = []
    for prompt, new in zip(PROMPTS, RESPONSES, strict=True):
        ids, cache, tail = [], None, torch.tensor([prompt])
        for _ in range(new):
            with torch.no_grad():
                answer = model(tail, past_key_values=cache, use_cache=True)
            cache, tail = answer.past_key_values, answer.logits[:, -1].argmax(-1, keepdim=True)
            ids.append(int(tail))
        found.append(ids)
    return found


CASES = [  # model, layout, plain: gloo and unpinned instead of shared memory and pinned
    ("tiny-llama", Layout(1, 2), False),
    ("tiny-llama", Layout(2, 1), False),
    ("tiny-qwen3", Layout(2, 1), True),
    ("tiny-qwen3", Layout(1, 1), False),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[0]}-{c[1]}-{'gloo' if c[2] else 'shm'}")
def running(request):
    """An engine and a rollout on it whose prefills all came before its first decode step."""
    model, layout, plain = request.param
    hf_greedy(model)  # before an engine takes the cores
    with StaticEngine.of(materialise(model), layout, plain=plain, sequences=8, kv_tokens_per_rank=2048) as engine:
        for _ in range(3):
            rollout = engine.rollout(PROMPTS, RESPONSES)
            ends = rollout.steps.groupby(["replica", "kind"]).time_s
            if (ends.max().unstack()["extend"] < ends.min().unstack()["decode"]).all():
                break
        yield model, engine, rollout
        processes = engine.processes
    assert processes
    assert not any(lives(process) for process in processes)
    assert "PAT_STEP_LOG" not in os.environ


@pytest.mark.engine
def test_tokens_equal_transformers(running) -> None:
    model, _, rollout = running
    assert rollout.output_ids == hf_greedy(model)


@pytest.mark.engine
def test_step_log_follows_from_the_trace(running) -> None:
    _, engine, rollout = running
    layout, steps = engine.layout, rollout.steps
    assert set(steps.tp) == {layout.tp}
    assert sorted(set(steps.replica)) == list(range(layout.dp))
    for replica in range(layout.dp):
        prompts = np.array([len(p) for p in PROMPTS[replica :: layout.dp]])
        decodes = np.array(RESPONSES[replica :: layout.dp]) - 1  # the prefill gives the first token
        mine = steps[steps.replica == replica]
        decode, extend = mine[mine.kind == "decode"], mine[mine.kind == "extend"]
        alive = np.arange(decodes.max())[:, None] < decodes
        assert decode.batch.tolist() == alive.sum(1).tolist()
        assert decode.new_tokens.tolist() == alive.sum(1).tolist()
        context = prompts + 1 + np.arange(decodes.max())[:, None]
        assert decode.context_tokens.tolist() == (alive * context).sum(1).tolist()
        assert extend.batch.sum() == len(prompts)
        assert extend.new_tokens.sum() == prompts.sum()
        assert mine.step.tolist() == list(range(len(mine)))


@pytest.mark.engine
def test_an_idle_engine_leaves_the_cores_to_others(running) -> None:
    _, engine, _ = running

    def cpu_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in engine.processes)

    before_s, idle_s = cpu_s(), 2.0
    time.sleep(idle_s)
    assert cpu_s() - before_s < 0.5 * idle_s  # SGLang's own data-parallel controller alone spins through all of it


@pytest.mark.engine
def test_step_times_sum_to_the_rollout_time(running) -> None:
    _, _, rollout = running
    steps = rollout.steps
    assert (steps.forward_s > 0).all()
    assert (steps.forward_s < steps.latency_s).all()
    last = steps.groupby("replica").latency_s.sum().max()
    assert 0.6 * rollout.seconds < last < 1.01 * rollout.seconds


@pytest.mark.engine
def test_refuses_what_cannot_fit_and_survives(running) -> None:
    _, engine, rollout = running
    with pytest.raises(EngineError, match=r"sequence 0: .* do not fit"):
        engine.rollout([[5] * 100], [100_000])
    done = []
    again = engine.rollout(PROMPTS, RESPONSES, progress=lambda i, n: done.append((i, n)))
    assert again.output_ids == rollout.output_ids
    assert done == [(i, len(PROMPTS)) for i in range(1, len(PROMPTS) + 1)]


@pytest.mark.engine
def test_a_killed_rank_or_an_interrupt_ends_the_rollout(running) -> None:
    """The last test of each engine. That its processes are gone is checked where the fixture ends."""
    _, engine, _ = running
    schedulers = [p for p in engine.processes if "sglang::scheduler" in " ".join(p.cmdline())]
    assert len(schedulers) == engine.layout.world
    if engine.layout.world > 1:
        victim, number, expected = schedulers[-1].pid, signal.SIGKILL, EngineError
    else:
        victim, number, expected = os.getpid(), signal.SIGINT, KeyboardInterrupt
    with pytest.raises(expected):
        engine.rollout(PROMPTS, [1, *[2000] * 5], progress=lambda *_: os.kill(victim, number))


@pytest.mark.engine
def test_a_failed_start_leaves_nothing(tmp_path) -> None:
    """A checkpoint without weights: the scheduler fails while it starts."""
    for file in materialise("tiny-llama").glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    quiet_resource_tracker()
    before, variable = set(child_processes()), os.environ.get("PAT_STEP_LOG")
    with pytest.raises(EngineError, match=r"did not start|failed while it started"):
        StaticEngine.of(tmp_path, Layout(1, 1)).start()
    assert not [p for p in child_processes() if p not in before and lives(p)]
    assert os.environ.get("PAT_STEP_LOG") == variable


@pytest.mark.engine
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_forced_lengths_on_cuda() -> None:
    """With CUDA graphs and overlap scheduling: lengths as forced, every token's step in the log."""
    with StaticEngine.of(materialise("llama-0.1b"), Layout(1, 1), "cuda", sequences=8) as engine:
        rollout = engine.rollout(PROMPTS, RESPONSES)
    decode = rollout.steps[rollout.steps.kind == "decode"]
    assert [len(ids) for ids in rollout.output_ids] == RESPONSES
    assert len(decode) >= max(RESPONSES) - 1
    assert decode.batch.sum() >= sum(RESPONSES) - len(RESPONSES)


def test_launch_errors_name_a_remedy(tmp_path) -> None:
    with pytest.raises(EngineError, match="TP3 does not divide 8"):
        check_launch(str(materialise("tiny-llama")), Layout(3, 1), "cpu")
    with pytest.raises(EngineError, match="no model directory"):
        check_launch(str(tmp_path / "none"), Layout(1, 1), "cpu")
    with pytest.raises(ValueError, match="neither llama nor qwen3"):
        replace(PRESETS["tiny-llama"], architecture="gpt2")
    with pytest.raises(ValueError, match="is not a preset"):
        materialise("tiny-gpt2")
