"""The rollout server on a real engine, without Ray: weight sync in every layout, seeds, lengths, records, faults.

Tokens are compared with Hugging Face's greedy ones of the same weights, which are new in every sync.
"""

import asyncio
import json
import os
import signal
import time

import psutil
import pytest
import torch
from safetensors.torch import save_file

from bench.tiny_models import materialise
from pat.layout import Layout
from pat.policy import Switch
from pat.sglang.engine import EngineDied, SwitchVetoed
from tests.sglang_live.conftest import ENVIRONMENT, hf_greedy, hf_model

pytestmark = [
    pytest.mark.engine,
]
LOW, HIGH = Layout(1, 2), Layout(2, 1)
PROMPTS = [[5 + (7 * i + 3 * j) % 200 for j in range(6 + 3 * i)] for i in range(6)]
LENGTHS = [12, 40, 15, 36, 9, 30]
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "logprobs": True}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """(server, its loop, directory of its records, an HF model to make new weights with)."""
    from verl.workers.config import HFModelConfig, RolloutConfig

    from pat.verl.server import PatServer

    directory, path = tmp_path_factory.mktemp("server"), materialise("tiny-qwen3")
    trace = directory / "trace.json"
    trace.write_text(json.dumps({"lengths": [LENGTHS]}))
    pat = {
        "layouts": ["TP1xDP2", "TP2xDP1"],
        "policy": "thresholds",
        "thresholds": [[4, "TP2xDP1"]],
        "interval_steps": 2,
        "trace": str(trace),
        "records": str(directory / "records"),
        "sequences": len(PROMPTS),
        "kv_tokens_per_rank": 2048,
    }
    names = {"name": "pat", "dtype": "float32", "free_cache_engine": False, "response_length": 64, "max_num_seqs": 16}
    config = RolloutConfig(**names, tensor_model_parallel_size=2, full_determinism=True, custom={"pat": pat})
    before = dict(os.environ)  # the server adds to it, for its processes
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        model_config = HFModelConfig(path=str(path), tokenizer_path=str(path))
        server = PatServer(config, model_config, "cpu")
        try:
            yield server, loop, directory / "records", hf_model(path)
        finally:
            server.engine.shutdown()
            for name in os.environ.keys() - before.keys():
                del os.environ[name]


def run(loop, work):
    return loop.run_until_complete(asyncio.wait_for(work, 90))


async def rollout(server, parameters=GREEDY):
    """All prompts at once, in reverse order of arrival; the outputs in order of their places."""
    places = range(len(PROMPTS))
    requests = [server.generate(PROMPTS[i], parameters, f"det-{i}") for i in reversed(places)]
    return (await asyncio.gather(*requests))[::-1]


async def sync(server, model, directory, buckets=3):
    """The model's weights, in several buckets."""
    weights = model.state_dict()
    names = sorted(weights)
    for i in range(buckets):
        part = {name: weights[name].clone().contiguous() for name in names[i::buckets]}
        target = directory / f"bucket-{i}"
        target.mkdir(exist_ok=True)
        save_file(part, target / "model.safetensors")
        await server.load_bucket(str(target), sum(tensor.nbytes for tensor in part.values()))
    await server.end_sync(server.rollouts.iteration)


def perturb(model, seed):
    """New weights, as after an update."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05 * tensor.std())


def last_lines(path, count=1):
    return [json.loads(line) for line in path.read_text().splitlines()[-count:]]


@pytest.mark.parametrize("before", ["low", "high", "after a switch in the rollout"])
def test_a_sync_reaches_every_layout_and_leaves_the_starting_one(started, tmp_path, before):
    server, loop, records, model = started
    perturb(model, seed=len(before))
    if before == "high" and server.engine.layout != HIGH:
        run(loop, server.engine.async_switch(HIGH))
    if before == "low" and server.engine.layout != LOW:
        run(loop, server.engine.async_switch(LOW))
    if before == "after a switch in the rollout":
        run(loop, rollout(server))
        assert last_lines(records / "rollouts.jsonl")[0]["end"] == str(HIGH)
    run(loop, sync(server, model, tmp_path))
    row = last_lines(records / "syncs.jsonl")[0]
    assert (row["buckets"], row["after"]) == (3, str(LOW))
    assert row["before"] == str(LOW if before == "low" else HIGH)
    assert row["bytes"] == sum(tensor.nbytes for tensor in model.state_dict().values())

    outputs = run(loop, rollout(server))  # half of it in each layout
    record = last_lines(records / "rollouts.jsonl")[0]
    assert (record["start"], record["end"], len(record["switches"])) == (str(LOW), str(HIGH), 1)
    assert [output.token_ids for output in outputs] == hf_greedy(model, PROMPTS, LENGTHS)
    assert record["error"] is None
    assert record["response_tokens"] == LENGTHS
    assert record["prompt_tokens"] == [len(prompt) for prompt in PROMPTS]
    assert record["places"] == list(range(len(PROMPTS)))


def test_log_probs_are_the_models(started):
    server, loop, _, model = started
    for prompt, output in zip(PROMPTS, run(loop, rollout(server)), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(output.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=2e-5, rtol=0)


def test_sampled_tokens_hang_on_seeds_and_not_on_the_layout(started, monkeypatch):
    server, loop, *_ = started
    sampled = GREEDY | {"temperature": 1.0}

    def drawn(choice_of_switch, iteration):
        monkeypatch.setattr(server.rollouts.choice, "settings", choice_of_switch)
        server.rollouts.iteration = iteration
        if server.engine.layout != LOW:
            run(loop, server.engine.async_switch(LOW))
        return [output.token_ids for output in run(loop, rollout(server, sampled))]

    switching = server.rollouts.choice.settings
    staying = switching.model_copy(update={"policy": "static"})
    assert drawn(switching, 5) == drawn(staying, 5)
    assert drawn(staying, 5) != drawn(staying, 6)


def test_a_failed_switch_leaves_a_whole_rollout_and_a_note(started, monkeypatch):
    server, loop, records, model = started
    if server.engine.layout != LOW:
        run(loop, server.engine.async_switch(LOW))

    def veto(layout):
        raise SwitchVetoed(f"{layout}: no")

    monkeypatch.setattr(server.engine.controller, "switch", veto)
    outputs = run(loop, rollout(server))
    assert [output.token_ids for output in outputs] == hf_greedy(model, PROMPTS, LENGTHS)
    record = last_lines(records / "rollouts.jsonl")[0]
    assert (record["end"], record["switches"]) == (str(LOW), [])
    assert "SwitchVetoed: TP2xDP1: no" in record["error"]


def test_images_and_unnamed_requests_are_refused(started):
    server, loop, *_ = started
    with pytest.raises(ValueError, match="images"):
        run(loop, server.generate([1], GREEDY, "det-0", image_data=[1]))
    with pytest.raises(ValueError, match="full_determinism"):
        run(loop, server.generate([1], GREEDY, "f00"))


def test_a_killed_rank_fails_the_requests_and_leaves_no_process(started):
    """The last test: the engine is gone after it."""
    server, loop, *_ = started
    pids = server.engine.get_all_child_pids()
    victim = server.engine.pids[1]

    async def kill_meanwhile():
        task = asyncio.create_task(rollout(server))
        await asyncio.sleep(0.3)
        os.kill(victim, signal.SIGKILL)
        await task

    with pytest.raises(EngineDied, match=f"process {victim}|rank 0 failed"):  # its peer may notice first
        run(loop, kill_meanwhile())
    deadline_s = time.monotonic() + 20
    while any(psutil.pid_exists(pid) for pid in [*pids, victim]) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not [pid for pid in [*pids, victim] if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_threshold_policy_goes_to_the_lowest_threshold_that_holds():
    import numpy as np

    from pat.policy import RolloutState
    from pat.verl.policies import ThresholdPolicy

    top = Layout(4, 1)
    policy = ThresholdPolicy(Layout(1, 4), ((8, Layout(2, 2)), (3, top)))

    def state(alive, waiting, layout):
        tokens = np.full(alive, 5)
        return RolloutState(0.0, layout, tokens, tokens, waiting, np.array([]))

    assert not isinstance(policy.decide(state(6, 2, Layout(1, 4))), Switch)
    assert policy.decide(state(7, 0, Layout(1, 4))).layout == Layout(2, 2)
    assert policy.decide(state(2, 0, Layout(2, 2))).layout == top
    assert not isinstance(policy.decide(state(2, 0, top)), Switch)
