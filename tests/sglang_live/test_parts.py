"""Parts of the live switch that need no engine: orders, settings, routing, refusals, moves of KV cache."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.tiny_models import materialise
from pat.layout import Layout
from pat.placement import Room
from pat.reshard.kv import KvCosts, Sequence, plan_kv
from pat.sglang import kv_pool
from pat.sglang.one_seat import OneSeat
from pat.sglang.order import Fault, Order, Route, fields_of
from pat.sglang.router import Router
from pat.sglang.settings import Settings

ORDER = Order(3, 12.5, Layout(4, 2), "recompute", KvCosts(bytes_per_s=7e8), Fault("commit", 5, kill=True))


def test_an_order_survives_its_journey():
    assert Order.decode(ORDER.encode()) == ORDER
    assert all(isinstance(value, int | float) for value in ORDER.encode().values())
    assert fields_of(SimpleNamespace(server_args=ORDER.encode())) == ORDER.encode()
    assert fields_of(SimpleNamespace(server_args={"max_running_requests": 3})) is None
    assert fields_of("something else") is None


def test_settings_survive_the_environment():
    given_settings = Settings((Layout(1, 4), Layout(4, 1)), 1234, "ipc://a", "ipc://b", report_steps=8)
    assert Settings.from_json(given_settings.to_json()) == given_settings
    with pytest.raises(ValueError, match="lowest TP first"):
        Settings((Layout(4, 1), Layout(1, 4)), 1, "a", "b")
    with pytest.raises(ValueError, match="not of one number"):
        Settings((Layout(1, 2), Layout(4, 1)), 1, "a", "b")


class FakeController:
    """As much of SGLang's DataParallelController as the router touches."""

    def __init__(self) -> None:
        self.status, self.max_dp_size, self.sent, self.refreshed = [True, True], 2, [], 0

    def send_control_message(self, message) -> None:
        self.sent.append(("all", message))

    def _request_dispatcher(self, message) -> None:
        self.sent.append((sum(self.status), message))

    def _refresh_active_workers(self) -> None:
        self.refreshed += 1


def test_the_router_holds_what_follows_an_order():
    router, controller = Router(None), FakeController()
    router.take(controller, "before")
    router.obey(controller, ORDER)
    router.take(controller, "during 1")
    router.take(controller, "during 2")
    assert [to for to, _ in controller.sent] == [2, "all"]
    assert Order.decode(controller.sent[1][1].server_args) == ORDER
    router.obey(controller, Route(1))
    pinned = SimpleNamespace(routed_dp_rank=3)
    router.take(controller, pinned)
    assert controller.sent[2:] == [(1, "during 1"), (1, "during 2"), (1, pinned)]
    assert pinned.routed_dp_rank == 0
    assert controller.refreshed == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculative_algorithm": "EAGLE"}, "speculative decoding"),
        ({"lora_paths": ["a"]}, "LoRA"),
        ({"enable_lora": True}, "LoRA"),
        ({"quantization": "fp8"}, "quantised"),
        ({"tp_size": 2}, "layouts instead of tp_size"),
        ({"load_balance_method": "total_tokens"}, "round_robin"),
    ],
)
def test_what_cannot_be_switched_is_refused(arguments, message):
    from pat.sglang.launch import check_arguments

    with pytest.raises(ValueError, match=message):
        check_arguments(str(materialise("tiny-llama")), (Layout(1, 2), Layout(2, 1)), arguments)


def test_layouts_must_divide_the_heads():
    from pat.sglang.launch import check_arguments

    with pytest.raises(ValueError, match="TP3 does not divide 8"):
        check_arguments(str(materialise("tiny-llama")), (Layout(1, 3), Layout(3, 1)), {})
    check_arguments(str(materialise("tiny-llama")), (Layout(1, 8), Layout(8, 1)), {"pp_size": 1, "enable_lora": False})


WORLD, LAYERS, WIDTH = 4, 2, 3
HEADS = st.sampled_from([1, 2, 4, 8])
LAYOUTS = st.sampled_from([Layout(1, 4), Layout(2, 2), Layout(4, 1)])


def value(sequence, token, layer, kind, head):
    """What the KV cache holds there: different everywhere."""
    return float((((sequence * 64 + token) * LAYERS + layer) * 2 + kind) * 8 + head)


def pool(layout, heads, slots):
    """[slots, heads of a rank, WIDTH] for K and V of each layer."""
    per_rank = max(1, heads // layout.tp)
    layers = [[torch.full((slots, per_rank, WIDTH), -1.0) for _ in range(2)] for _ in range(LAYERS)]
    return SimpleNamespace(k_buffer=[k for k, _ in layers], v_buffer=[v for _, v in layers])


def first_head(layout, heads, rank):
    return layout.tp_rank(rank) * heads // layout.tp


@settings(deadline=None, max_examples=60)
@given(LAYOUTS, LAYOUTS, HEADS, st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_moves_bring_every_head_of_every_token(old, new, heads, lengths, data):
    """All ranks of a world, simulated: after the exchange each new replica holds its sequences' KV, head by head."""
    sequences = [Sequence(data.draw(st.integers(0, old.dp - 1)), tokens) for tokens in lengths]
    plan = plan_kv(sequences, old, new, heads, 8, Room(1000, 100), KvCosts(), "migrate")
    slots = {i: torch.arange(10 * i, 10 * i + n) for i, n in enumerate(lengths)}
    moved_to = {i: 100 - slots[i] for i in slots}
    old_pools = [pool(old, heads, 101) for _ in range(WORLD)]
    new_pools = [pool(new, heads, 101) for _ in range(WORLD)]
    for rank in range(WORLD):
        for i, s in enumerate(sequences):
            if s.replica != old.replica(rank):
                continue
            for layer, buffers in enumerate(kv_pool.buffers(old_pools[rank])):
                for kind, buffer in enumerate(buffers):
                    for token in range(s.tokens):
                        for h in range(buffer.shape[1]):
                            full = first_head(old, heads, rank) + h
                            buffer[slots[i][token], h] = value(i, token, layer, kind, full)
    moves = [
        kv_pool.KvMove(
            SimpleNamespace(rank=rank, size=WORLD), old, new, heads, sequences, plan.placements, slots, moved_to
        )
        for rank in range(WORLD)
    ]
    sizes = [[LAYERS * sum(t.count(WIDTH) for t in to) for to in move.sends] for move in moves]
    posts = [[torch.empty(size) for size in row] for row in sizes]
    for rank, move in enumerate(moves):
        move._collect(kv_pool.buffers(old_pools[rank]), posts[rank])
    for rank, move in enumerate(moves):
        assert [LAYERS * sum(t.count(WIDTH) for t in taken) for taken in move.takes] == [row[rank] for row in sizes]
        move._deliver([post[rank] for post in posts], kv_pool.buffers(new_pools[rank]))
    for placement in plan.placements:
        i = placement.sequence
        for rank in new.groups()[placement.replica]:
            for layer, buffers in enumerate(kv_pool.buffers(new_pools[rank])):
                for kind, buffer in enumerate(buffers):
                    for token in range(sequences[i].tokens):
                        for h in range(buffer.shape[1]):
                            full = first_head(new, heads, rank) + h
                            assert buffer[moved_to[i][token], h, 0] == value(i, token, layer, kind, full)


def test_a_pool_can_lie_in_the_memory_of_another():
    first = pool(Layout(1, 2), 4, 40)
    first.k_buffer = [torch.arange(2 * 40 * 4 * WIDTH, dtype=torch.float32).view(2, 40, 4, WIDTH)[0]] * LAYERS
    first.v_buffer = first.k_buffer
    other = SimpleNamespace(size=72, page_size=4, head_num=2, head_dim=WIDTH)
    kv_pool.borrow_buffers(other, first)
    assert [tuple(k.shape) for k in other.k_buffer] == [(76, 2, WIDTH)] * LAYERS
    other.k_buffer[0].fill_(-5)
    assert (first.k_buffer[0][:38] == -5).all()
    other.size = 100
    with pytest.raises(ValueError, match="exceeds the memory"):
        kv_pool.borrow_buffers(other, first)


def test_one_seat_captures_again_the_graphs_that_a_runner_had():
    class Runner:
        def __init__(self, decode, prefill):
            self.eager_runner, self.captured = SimpleNamespace(), []
            self.decode_cuda_graph_runner = "graphs" if decode else self.eager_runner
            self.prefill_cuda_graph_runner = "graphs" if prefill else None

        def init_decode_cuda_graph(self):
            self.captured.append("decode")

        def init_prefill_cuda_graph(self):
            self.captured.append("prefill")

    for decode, prefill, again in ((True, True, ["decode", "prefill"]), (True, False, ["decode"]), (False, False, [])):
        one, runner = OneSeat(None, None, Layout(1, 2), None), Runner(decode, prefill)
        for _ in range(2):  # it remembers, though they are gone when it drops them again
            one.drop_graphs(runner)
            assert runner.decode_cuda_graph_runner is runner.prefill_cuda_graph_runner is runner.eager_runner
        one.capture_graphs(runner)
        assert runner.captured == again
