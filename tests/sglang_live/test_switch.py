"""Live switches on real SGLang: whatever happens to the layout, answers are those of the static layout and of HF."""

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass, field, replace

import psutil
import pytest
from sglang.srt.arg_groups.attention_hook import handle_deterministic_inference
from sglang.srt.server_args import ServerArgs

from bench.tiny_models import PRESETS, materialise
from pat.layout import Layout
from pat.policy import Switch
from pat.sglang.calibrate import measure_costs
from pat.sglang.engine import EngineDied, SwitchVetoed
from pat.sglang.guard import alive
from pat.sglang.order import Fault
from tests.sglang_live.conftest import (
    SwitchBelow,
    adaptive_engine,
    generate,
    generate_with_switches,
    hf_greedy,
    hf_model,
    run,
    tokens,
)

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Setup:
    """One engine: model, layouts, SGLang's arguments, and the fault that ends it in the last test (None: a hang)."""

    name: str
    model: object
    layouts: tuple[Layout, ...]
    fault: Fault | None
    arguments: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    cases: int = 8
    crowded: bool = False


LLAMA, QWEN3 = PRESETS["tiny-llama"], PRESETS["tiny-qwen3"]
SETUPS = [
    Setup("llama", LLAMA, (Layout(1, 2), Layout(2, 1)), Fault("prepare", 1, kill=True), cases=16),
    Setup(
        "qwen3-overlap-chunked-pages",
        replace(QWEN3, tied=True),
        (Layout(1, 4), Layout(2, 2), Layout(4, 1)),
        Fault("commit", 2),
        {"disable_overlap_schedule": False, "chunked_prefill_size": 16, "page_size": 4, "staging_bytes": 20_000},
        {"PAT_SHM_ALLREDUCE": "1"},
    ),
    Setup(
        "llama-replicated-heads-no-radix-one-seat",
        replace(LLAMA, kv_heads=2),
        (Layout(2, 2), Layout(4, 1)),
        None,
        {"disable_radix_cache": True, "max_total_tokens": 420, "wait_s": 6, "seats": "one"},
        {"PAT_SHM_ALLREDUCE": "1"},
        crowded=True,
    ),
]
PROMPTS = [[5 + (7 * i + 3 * j) % 200 for j in range(6 + 7 * i)] for i in range(8)]
SHARED = [9 + (5 * j) % 150 for j in range(41)]
PROMPTS += [SHARED + [20 + i] * (1 + i) for i in range(3)]
LENGTHS = [40 + 9 * (i % 5) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module", params=SETUPS, ids=lambda setup: setup.name)
def live(request):
    """(set-up, engine, answers of HF greedy as token ids, the engine's own answers without a switch)."""
    setup = request.param
    path = materialise(setup.model)
    hf = hf_greedy(hf_model(path), PROMPTS, LENGTHS)
    policy = SwitchBelow(5, setup.layouts[0], setup.layouts[-1])
    with adaptive_engine(path, setup.layouts, setup.environment, policy=policy, **setup.arguments) as engine:
        want = run(engine, generate(engine, PROMPTS, LENGTHS))
        yield setup, engine, hf, want


def go_to(engine, layout) -> None:
    if engine.layout != layout:
        engine.switch(layout)


def test_every_static_layout_equals_transformers(live) -> None:
    setup, engine, hf, want = live
    assert [list(a["output_ids"]) for a in want] == hf
    for layout in setup.layouts[::-1]:
        go_to(engine, layout)
        assert tokens(run(engine, generate(engine, PROMPTS, LENGTHS))) == tokens(want), layout


def test_random_switches_change_no_token(live) -> None:
    setup, engine, _, want = live
    rng = random.Random(5)
    migrated = recomputed = 0
    for case in range(setup.cases):
        picked = rng.sample(range(len(PROMPTS)), rng.randint(3, len(PROMPTS)))
        hops = [
            (rng.uniform(0, 0.15), rng.choice(setup.layouts), rng.choice(["migrate", "recompute", "auto"]))
            for _ in range(rng.randint(1, 3))
        ]
        answers, records = run(
            engine,
            generate_with_switches(engine, [PROMPTS[i] for i in picked], [LENGTHS[i] for i in picked], hops),
        )
        assert tokens(answers) == tokens([want[i] for i in picked]), (case, hops)
        migrated += sum(r.migrated for r in records)
        recomputed += sum(r.recomputed for r in records)
    assert migrated
    assert recomputed


def test_hops_through_all_layouts_migrate_everything(live) -> None:
    """Up and down again, KV migrated: no request is prefilled again, no communicator is made. Weights are moved only
    where one seat at a time has them, and then on the way down only."""
    setup, engine, _, want = live
    go_to(engine, setup.layouts[0])
    way = [*setup.layouts[1:], *setup.layouts[-2::-1]]
    hops = [(0.12 if i == 0 else 0.02, layout, "migrate") for i, layout in enumerate(way)]
    answers, records = run(engine, generate_with_switches(engine, PROMPTS, LENGTHS, hops))
    assert tokens(answers) == tokens(want)
    assert [record.new for record in records] == way
    assert records[0].migrated >= 4
    for record in records:
        moves = setup.arguments.get("seats") == "one"
        assert (record.weight_local_bytes > 0) == moves
        assert (record.weight_wire_bytes > 0) == (moves and record.new.tp < record.old.tp)
        assert record.recomputed == 0
        assert record.kv_wire_bytes > 0 or not record.migrated or setup.model.kv_heads < record.old.tp
        assert record.groups_created == records[0].groups_created
        assert abs(record.unattributed_s) < 0.05 * record.total_s
        assert len(record.placements) == record.migrated + record.queued


def test_what_finds_no_room_waits(live) -> None:
    setup, engine, _, _ = live
    if not setup.crowded:
        pytest.skip("the pools of this engine have room")
    prompts, lengths = [[3 + (11 * i + 5 * j) % 220 for j in range(150)] for i in range(4)], [50] * 4
    go_to(engine, setup.layouts[0])
    want = run(engine, generate(engine, prompts, lengths))
    hops = [(0.25, setup.layouts[-1], "migrate")]
    answers, (record,) = run(engine, generate_with_switches(engine, prompts, lengths, hops))
    assert tokens(answers) == tokens(want)
    assert record.migrated
    assert record.queued
    assert record.migrated + record.queued + record.waiting == 4


def test_log_probabilities_are_the_static_ones(live) -> None:
    setup, engine, _, _ = live
    go_to(engine, setup.layouts[0])
    want = run(engine, generate(engine, PROMPTS, LENGTHS, return_logprob=True, logprob_start_len=0))
    hops = [(0.1, setup.layouts[-1], "migrate"), (0.1, setup.layouts[0], "recompute")]
    got, _ = run(
        engine,
        generate_with_switches(engine, PROMPTS, LENGTHS, hops, return_logprob=True, logprob_start_len=0),
    )
    assert tokens(got) == tokens(want)
    for a, b in zip(got, want, strict=True):
        x, y = a["meta_info"]["output_token_logprobs"], b["meta_info"]["output_token_logprobs"]
        assert len(x) == len(y)
        assert max(abs(p[0] - q[0]) for p, q in zip(x, y, strict=True)) < 1e-4


def test_streams_go_on(live) -> None:
    setup, engine, _, want = live

    async def stream(i):
        seen = []
        sampling = {"temperature": 0, "max_new_tokens": LENGTHS[i], "ignore_eos": True}
        async for chunk in await engine.async_generate(input_ids=PROMPTS[i], sampling_params=sampling, stream=True):
            seen.append(len(chunk["output_ids"]))
            last = chunk
        return last["text"], seen

    async def all_streams():
        tasks = [asyncio.create_task(stream(i)) for i in range(4)]
        await asyncio.sleep(0.1)
        await engine.async_switch(next(a for a in setup.layouts if a != engine.layout))
        return await asyncio.gather(*tasks)

    for i, (text, seen) in enumerate(run(engine, all_streams())):
        assert text == want[i]["text"]
        assert len(seen) > 5


def test_arrivals_and_aborts_during_switches(live) -> None:
    setup, engine, _, want = live

    async def late(i):
        await asyncio.sleep(0.01 * i)
        return (await generate(engine, [PROMPTS[i]], [LENGTHS[i]]))[0]

    async def scenario():
        sampling = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}
        doomed = [
            asyncio.create_task(engine.async_generate(input_ids=[9, 8, 7], sampling_params=sampling, rid=f"doomed-{n}"))
            for n in range(2)
        ]
        tasks = [asyncio.create_task(late(i)) for i in range(len(PROMPTS))]
        for n in range(4):
            await asyncio.sleep(0.02)
            other = setup.layouts[0] if engine.layout == setup.layouts[-1] else setup.layouts[-1]
            switch = asyncio.create_task(engine.async_switch(other))
            if n < 2:
                await asyncio.sleep(0.001)
                engine.abort(rid=f"doomed-{n}")
            await switch
        return await asyncio.gather(*tasks), await asyncio.gather(*doomed)

    answers, doomed = run(engine, scenario())
    assert tokens(answers) == tokens(want)
    for answer in doomed:
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer["output_ids"]) < 200


def test_penalties_remember_what_was_generated(live) -> None:
    setup, engine, _, _ = live
    go_to(engine, setup.layouts[0])
    prompts, lengths = PROMPTS[:4], LENGTHS[:4]
    sampling = {"frequency_penalty": 0.1, "repetition_penalty": 1.05}  # weak enough for tokens to depend on the counts
    want = run(engine, generate(engine, prompts, lengths, sampling=sampling))
    for kv in ("migrate", "recompute"):
        hops = [(0.1, setup.layouts[-1], kv), (0.05, setup.layouts[0], kv)]
        answers, records = run(engine, generate_with_switches(engine, prompts, lengths, hops, sampling=sampling))
        assert records[0].migrated if kv == "migrate" else records[0].recomputed
        assert tokens(answers) == tokens(want), kv

    async def vetoed():
        task = asyncio.create_task(generate(engine, prompts, lengths, sampling=sampling))
        await asyncio.sleep(0.1)
        with pytest.raises(SwitchVetoed):
            await engine.async_switch(setup.layouts[-1], fault=Fault("prepare", 1))
        return await task

    assert tokens(run(engine, vetoed())) == tokens(want)


def test_seeds_are_not_honoured_on_a_cpu(live) -> None:
    """SGLang honours seeds of requests in its deterministic mode only, and refuses that mode with the one attention
    backend that a CPU has here: without a switch too, one seed gives other tokens each time. With switches, sampled
    requests all get their tokens."""
    setup, engine, _, _ = live
    with pytest.raises(ValueError, match="supported for deterministic inference"):
        handle_deterministic_inference(
            ServerArgs(
                model_path=engine.server_args.model_path,
                device="cpu",
                attention_backend="torch_native",
                enable_deterministic_inference=True,
            )
        )
    go_to(engine, setup.layouts[0])
    sampling = {"temperature": 0.8, "sampling_seed": 3}
    first, second = (run(engine, generate(engine, PROMPTS[:1], LENGTHS[:1], sampling=sampling)) for _ in range(2))
    assert tokens(first) != tokens(second)
    hops = [(0.08, setup.layouts[-1], "migrate"), (0.05, setup.layouts[0], "migrate")]
    answers, _ = run(engine, generate_with_switches(engine, PROMPTS, LENGTHS, hops, sampling=sampling))
    assert [len(a["output_ids"]) for a in answers] == LENGTHS


def test_a_veto_leaves_all_requests_in_the_old_layout(live) -> None:
    setup, engine, _, want = live
    before = engine.layout
    target = next(a for a in setup.layouts if a != before)

    async def scenario():
        task = asyncio.create_task(generate(engine, PROMPTS, LENGTHS))
        await asyncio.sleep(0.1)
        with pytest.raises(SwitchVetoed, match="fault staged on rank 1 in prepare"):
            await engine.async_switch(target, fault=Fault("prepare", 1))
        assert engine.layout == before
        twice = await asyncio.gather(*(engine.async_switch(target) for _ in range(2)), return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in twice) == ["SwitchRecord", "SwitchVetoed"]
        return await task

    assert tokens(run(engine, scenario())) == tokens(want)
    with pytest.raises(SwitchVetoed, match="already"):
        engine.switch(target)
    with pytest.raises(ValueError, match="not one of this engine's layouts"):
        engine.switch(Layout(16, 1))


def test_the_policy_switches_inside_a_rollout(live) -> None:
    setup, engine, _, want = live
    policy = engine.controller.policy
    policy.seen.clear()
    sampling = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in LENGTHS]
    answers = engine.generate(input_ids=PROMPTS, sampling_params=sampling)
    assert tokens(answers) == tokens(want)
    assert engine.layout == setup.layouts[-1]
    made = [d for d in engine.controller.decisions if isinstance(d.answer, Switch)]
    assert [d.layout for d in made] == [setup.layouts[0]]
    assert made[0].alive < 5
    for state in policy.seen:
        assert len(state.generated_tokens) + state.waiting + len(state.finished_tokens) <= len(PROMPTS)
        assert set(state.finished_tokens) <= set(LENGTHS)
        assert (state.context_tokens > state.generated_tokens).all()
    with pytest.raises(ZeroDivisionError), engine.rollout([1]):
        raise ZeroDivisionError


def test_weight_updates_reach_every_seat(live) -> None:
    setup, engine, hf, _ = live
    prompts, lengths = PROMPTS[:3], [12] * 3
    other = hf_model(materialise(replace(setup.model, seed=1)))
    old = hf_model(materialise(setup.model))
    want, had = hf_greedy(other, prompts, lengths), [ids[:12] for ids in hf[:3]]
    assert want != had
    go_to(engine, setup.layouts[-1])
    for model, expected in ((other, want), (old, had)):
        weights = {n: t for n, t in model.state_dict().items() if not (setup.model.tied and n == "lm_head.weight")}
        engine.update_weights(weights.items())
        for layout in setup.layouts:
            go_to(engine, layout)
            assert [list(a["output_ids"]) for a in run(engine, generate(engine, prompts, lengths))] == expected


def test_costs_can_be_measured(live) -> None:
    setup, engine, _, _ = live
    if setup.crowded:
        pytest.skip("the pools of this engine have too little room")
    found = run(engine, measure_costs(engine, ((1, 32), (2, 256)), rounds=1))
    assert set(found) == set(setup.layouts)
    for costs in found.values():
        assert 0 < costs.exchange_s + costs.migrate_s(1e4) < 1
        assert 0 < costs.prefill_fixed_s + costs.recompute_s(100) < 10


def test_fifty_switches_leave_nothing_behind(live) -> None:
    setup, engine, _, want = live

    def sizes():
        processes = [psutil.Process(p.pid) for p in engine.guard._processes]
        return [(p.num_threads(), p.num_fds()) for p in processes], sum(p.memory_info().rss for p in processes)

    def rounds(n):
        for k in range(n):
            engine.switch(setup.layouts[-1] if engine.layout != setup.layouts[-1] else setup.layouts[0])
            if k % 10 == 0:
                run(engine, generate(engine, PROMPTS[:2], [4, 4]))

    rounds(4)
    counts, memory = sizes()
    rounds(50)
    assert run(engine, engine.tokenizer_manager.flush_cache()).success
    assert len(run(engine, engine.tokenizer_manager.get_internal_state())) == engine.layout.dp
    assert sizes()[0] == counts
    assert sizes()[1] < memory + 40e6
    assert tokens(run(engine, generate(engine, PROMPTS, LENGTHS))) == tokens(want)


def test_a_lost_rank_ends_in_one_clear_error(live) -> None:
    """The last test of each engine."""
    setup, engine, _, _ = live
    processes = list(engine.guard._processes)
    target = next(a for a in setup.layouts if a != engine.layout)

    async def scenario():
        task = asyncio.create_task(generate(engine, PROMPTS, [300] * len(PROMPTS)))
        await asyncio.sleep(0.1)
        if setup.fault is None:
            os.kill(engine.pids[3], signal.SIGSTOP)
        with pytest.raises(EngineDied):
            await engine.async_switch(target, fault=setup.fault or Fault())
        with pytest.raises(EngineDied, match=r"rank|process|no answer"):
            await task

    start_s = time.monotonic()
    run(engine, scenario())
    assert time.monotonic() - start_s < 40
    assert not any(alive(process) for process in processes)
    with pytest.raises(EngineDied):
        engine.switch(setup.layouts[0])
    with pytest.raises(EngineDied):
        run(engine, generate(engine, [[1, 2]], [3]))
