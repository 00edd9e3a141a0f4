"""Gathering requests into rollouts, on an engine that only pretends; and the policy that learns from them."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest

from pat.host import NO_HOST
from pat.layout import Layout
from pat.links import Links
from pat.policy import AdaptivePolicy, StaticPolicy
from pat.profile import StepProfile, TpGrid
from pat.reshard.kv import KvCosts
from pat.sglang.engine import SwitchVetoed
from pat.switch_cost import SwitchParts
from pat.verl.policies import PolicyChoice, SwitchCosts, load_switch_costs, save_switch_costs
from pat.verl.rollout import Rollouts
from pat.verl.settings import PatSettings

LOW, HIGH = Layout(1, 2), Layout(2, 1)


class Pretender:
    """Stands for an engine with its controller: notes when rollouts begin and end."""

    def __init__(self, begin_error=None, end_error=None):
        self.layout, self.records, self.events, self.policy = LOW, [], [], None
        self.controller, self.decisions, self.reports_s = self, [], 0.0
        self.begin_error, self.end_error = begin_error, end_error

    def begin(self, prompt_tokens):
        self.events.append(("begin", prompt_tokens.tolist()))
        if self.begin_error:
            raise self.begin_error

    def end(self):
        self.events.append("end")
        if self.end_error:
            raise self.end_error


def rollouts(engine, expected, quiet_s=0.02):
    choice = PolicyChoice(PatSettings(layouts=("TP1xDP2", "TP2xDP1")), "none", {}, 100)
    return Rollouts(engine, choice, expected, quiet_s)


async def answered(pool, place, prompt, tokens=3, wait_s=0.0):
    async with pool.request(place, prompt) as request:
        await asyncio.sleep(wait_s)
        request.response_tokens = tokens


def test_a_rollout_begins_when_all_have_come_and_ends_with_the_last_answer():
    engine = Pretender()
    pool = rollouts(engine, expected=3)

    async def work():
        first = [asyncio.create_task(answered(pool, i, [7] * (i + 1), tokens=10 + i)) for i in (2, 0)]
        await asyncio.sleep(0.1)
        assert engine.events == []  # the third is missing
        await asyncio.gather(*first, answered(pool, 1, [7, 7], tokens=11))

    asyncio.run(work())
    assert engine.events == [("begin", [3, 1, 2]), "end"]
    (record,) = pool.take_closed()
    assert (record.places, record.prompt_tokens, record.response_tokens) == ([0, 1, 2], [1, 2, 3], [10, 11, 12])
    assert record.prompts[0] != record.prompts[1]
    assert pool.take_closed() == []


def test_without_a_number_a_quiet_moment_begins_it_and_later_requests_join():
    engine = Pretender()
    pool = rollouts(engine, expected=None)

    async def work():
        slow = asyncio.create_task(answered(pool, 0, [1], wait_s=0.3))
        await asyncio.sleep(0.15)
        await answered(pool, 1, [1, 2])
        await slow
        await answered(pool, 0, [1])

    asyncio.run(work())
    assert engine.events == [("begin", [1]), "end", ("begin", [1]), "end"]
    assert [record.places for record in pool.take_closed()] == [[0, 1], [0]]


def test_too_few_requests_begin_in_the_end():
    engine = Pretender()
    asyncio.run(asyncio.wait_for(answered(rollouts(engine, expected=9, quiet_s=0.005), 0, [1]), 10))
    assert engine.events == [("begin", [1]), "end"]


@pytest.mark.parametrize("when", ["begin", "end"])
def test_a_vetoed_switch_is_noted_and_the_rollout_goes_on(when):
    engine = Pretender(**{f"{when}_error": SwitchVetoed("TP2xDP1: no memory")})
    pool = rollouts(engine, expected=1)
    asyncio.run(answered(pool, 0, [1]))
    (record,) = pool.take_closed()
    assert "no memory" in record.error
    assert record.response_tokens == [3]


def test_a_policy_that_cannot_begin_fails_every_request_and_not_the_next_rollout():
    engine = Pretender(begin_error=ValueError("no profile"))
    pool = rollouts(engine, expected=2)

    async def work():
        return await asyncio.gather(*(answered(pool, i, [1]) for i in range(2)), return_exceptions=True)

    assert [str(error) for error in asyncio.run(work())] == ["no profile"] * 2
    engine.begin_error = None
    asyncio.run(work_of_two(pool))
    assert len(pool.take_closed()) == 1


async def work_of_two(pool):
    await asyncio.gather(*(answered(pool, i, [1]) for i in range(2)))


@pytest.fixture
def measured(tmp_path):
    """Files of a profile in which TP2 halves a step, of switch costs, and a model's configuration."""
    grids = {}
    for tp in (1, 2):
        batches, contexts = np.array([1, 64]), np.array([1, 1000])
        decode_s = np.array([[0.01, 0.01], [0.02 * tp, 0.02 * tp]]) / tp
        grids[tp] = TpGrid(tp, batches, contexts, decode_s, np.array([1, 1000]), np.array([0.001, 0.01]))
    StepProfile("toy", "cpu", grids, NO_HOST).save(tmp_path / "profile.parquet")
    parts = SwitchParts("toy", 0.01, 0.0, 0.0, 0.0, 0.01)
    costs = SwitchCosts(Links(1e9, 1e9, 1e-3, 1e9), parts, {LOW: KvCosts(), HIGH: KvCosts(exchange_s=0.5)})
    save_switch_costs(tmp_path / "costs.json", costs)
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"vocab_size": 99, "intermediate_size": 128, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return SimpleNamespace(folder=tmp_path, costs=costs)


def adaptive(measured, **options):
    files = {"profile": measured.folder / "profile.parquet", "switch_costs": measured.folder / "costs.json"}
    files |= {"lengths": options.pop("lengths", None)}
    settings = PatSettings(
        layouts=("TP1xDP2", "TP2xDP1"),
        policy="adaptive",
        **{name: str(path) for name, path in files.items() if path},
        **options,
    )
    return PolicyChoice(settings, str(measured.folder), {LOW: 10_000, HIGH: 20_000}, cap_tokens=400)


def test_switch_costs_come_back_from_their_file(measured):
    assert load_switch_costs(measured.folder / "costs.json") == measured.costs
    assert adaptive(measured).costs == measured.costs.kv
    (measured.folder / "costs.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no switch costs"):
        adaptive(measured)


def test_the_first_iteration_stays_and_later_ones_know_the_lengths_so_far(measured):
    choice = adaptive(measured, remember=2)
    assert isinstance(choice.next(), StaticPolicy)
    expected = []
    for lengths in ([20] * 8, [20] * 7 + [350], [20] * 6 + [350] * 2):
        choice.learn(lengths)
        policy = choice.next()
        assert isinstance(policy, AdaptivePolicy)
        expected.append(choice.expected_s(policy, LOW, np.full(8, 10)))
    assert choice.lengths_known == 16  # of the last two
    assert expected[0] < expected[1] < expected[2]


def test_given_lengths_serve_until_some_are_seen(measured):
    path = measured.folder / "lengths.json"
    path.write_text(json.dumps([10, 20, 30]))
    choice = adaptive(measured, lengths=path, start="TP1xDP2")
    policy = choice.next()
    assert (choice.lengths_known, policy.start) == (3, LOW)
    choice.learn([5] * 4)
    choice.next()
    assert choice.lengths_known == 4
