"""Switch cost: closed forms, the estimate equals the cost of an even batch, the cheaper way is taken."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.backends.simulated.synthetic import LLAMA_8B, constant_profile
from pat.layout import Layout, layouts
from pat.links import Links
from pat.placement import Room, place
from pat.switch_cost import SwitchModel, SwitchParts, wire_share

LINKS = Links(intra_node_bytes_per_s=1e11, inter_node_bytes_per_s=1e10, latency_s=1e-4, local_copy_bytes_per_s=1e12)
PARTS = SwitchParts("test", pause_s=0.1, groups_s=0.2, weights_s=0.3, graphs_s=0.4, resume_s=0.5)
KV = LLAMA_8B.kv_bytes_per_token()


def model(kv: str = "cheaper", prefill_token_s: float = 1e-4, node: int = 8) -> SwitchModel:
    profile = constant_profile(dict.fromkeys((1, 2, 4, 8), 1e-2), prefill_token_s, prefill_fixed_s=1e-3)
    return SwitchModel(LLAMA_8B, profile, LINKS, PARTS, node, kv)


def even(old: Layout, new: Layout, per_rank: int, tokens: int, node: int = 8):
    """``per_rank`` sequences for each world rank, the same context, dealt evenly: cost's arguments."""
    replica = np.arange(per_rank * old.world) % old.dp
    context = np.full(len(replica), tokens)
    return context, replica, place(old, new, replica, context, Room(1 << 40), node)


def test_wire_share_keeps_the_common_heads():
    assert wire_share(Layout(2, 4), Layout(8, 1)) == 0.75
    assert wire_share(Layout(8, 1), Layout(2, 4)) == 0.75
    assert wire_share(Layout(2, 4), Layout(2, 4)) == 0.0
    assert wire_share(Layout(1, 8), Layout(8, 1)) == 7 / 8


@pytest.mark.parametrize("tokens", [1, 1000, 20_000])
def test_closed_form_of_one_sequence_going_up(tokens):
    """Half of the KV lies on each of two ranks; each sends 3/4 of it and copies it once."""
    cost = model("migrate").cost(Layout(2, 4), Layout(8, 1), np.array([tokens]), np.array([3]), np.array([0]))
    rank_bytes = tokens * KV / 2
    assert cost.kv_s == pytest.approx(1e-4 + rank_bytes * (0.75 / 1e11 + 1 / 1e12), rel=1e-12)
    assert cost.kv_bytes == int(0.75 * tokens * KV)
    assert cost.fixed_s == pytest.approx(1.5)
    assert cost.total_s == cost.fixed_s + cost.kv_s
    assert (cost.migrated, cost.recomputed) == (1, 0)


def test_replicas_send_side_by_side_and_prefill_in_turn():
    args = (Layout(2, 4), Layout(4, 2), np.full(3, 1000), np.array([0, 0, 1]), np.array([0, 0, 1]))
    one = model("migrate").cost(*args[:2], np.array([1000]), np.array([0]), np.array([0]))
    assert model("migrate").cost(*args).kv_s == pytest.approx(2 * one.kv_s, rel=1e-12)
    redone = model("recompute").cost(*args)
    assert redone.kv_s == pytest.approx(2 * (1e-3 + 1000 * 1e-4), rel=1e-12)
    assert redone.kv_bytes == 0
    assert (redone.migrated, redone.recomputed) == (0, 3)


def test_another_node_is_slower_by_the_links():
    """TP8 on two nodes: a sequence that changes node sends all of its KV over the slow link."""
    cost = model("migrate").cost(Layout(4, 4), Layout(8, 2), np.array([1000]), np.array([0]), np.array([1]))
    assert cost.kv_s == pytest.approx(1e-4 + 1000 * KV / 4 * (1 / 1e10 + 1 / 1e12), rel=1e-12)
    stay = model("migrate").cost(Layout(4, 4), Layout(8, 2), np.array([1000]), np.array([3]), np.array([1]))
    assert stay.kv_s == pytest.approx(1e-4 + 1000 * KV / 4 * (0.5 / 1e11 + 1 / 1e12), rel=1e-12)


def test_no_switch_costs_nothing_and_an_empty_one_its_fixed_part():
    none = np.empty(0, dtype=int)
    assert model().cost(Layout(2, 4), Layout(2, 4), np.array([5]), np.array([0]), np.array([0])).total_s == 0
    assert model().cost(Layout(2, 4), Layout(8, 1), none, none, none).total_s == pytest.approx(1.5)


PAIRS = [(a, b, w) for w in (8, 16) for a, b in product(layouts(w, node=8), repeat=2)]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(PAIRS),
    st.integers(1, 5),
    st.integers(1, 30_000),
    st.sampled_from(["cheaper", "migrate", "recompute"]),
    st.sampled_from([1e-7, 1e-5, 1e-4]),
)
def test_estimate_equals_the_cost_of_an_even_batch(pair, per_rank, tokens, kv, prefill_token_s):
    old, new, _ = pair
    switches = model(kv, prefill_token_s)
    context, replica, target = even(old, new, per_rank, tokens)
    cost = switches.cost(old, new, context, replica, target)
    estimate = switches.estimates_s((old, new), np.array([len(context)]), np.array([tokens]))[0, 1]
    assert estimate[0] == pytest.approx(cost.total_s, rel=1e-9)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([(a, b) for a, b, w in PAIRS if w == 8 and a.tp <= b.tp]), st.integers(1, 40))
def test_estimate_counts_the_fullest_replica_of_an_uneven_batch(pair, batch):
    old, new = pair
    replica, context = np.arange(batch) % old.dp, np.full(batch, 700)
    cost = model("migrate").cost(old, new, context, replica, place(old, new, replica, context, Room(1 << 40), 8))
    estimate = model("migrate").estimates_s((old, new), np.array([batch]), np.array([700]))[0, 1]
    assert estimate[0] == pytest.approx(cost.total_s, rel=1e-9)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(PAIRS),
    st.lists(st.integers(1, 30_000), min_size=1, max_size=20),
    st.sampled_from([1e-7, 1e-6, 1e-4]),
)
def test_each_sequence_takes_its_cheaper_way(pair, contexts, prefill_token_s):
    old, new, _ = pair
    if old == new:
        return
    context = np.array(contexts)
    replica = np.arange(len(context)) % old.dp
    target = place(old, new, replica, context, Room(1 << 40), 8)
    ways = {kv: model(kv, prefill_token_s).cost(old, new, context, replica, target) for kv in ("cheaper", "migrate")}
    counted = 0
    for c, d, e in zip(context, replica, target, strict=True):
        alone = [
            model(kv, prefill_token_s).cost(old, new, *(np.array([x]) for x in (c, d, e)))
            for kv in ("migrate", "recompute")
        ]
        counted += alone[0].kv_s <= alone[1].kv_s
    assert ways["cheaper"].migrated == counted
    assert ways["cheaper"].migrated + ways["cheaper"].recomputed == len(context)
    assert ways["cheaper"].kv_bytes <= ways["migrate"].kv_bytes


def test_unknown_kv_way_is_refused():
    with pytest.raises(ValueError, match="cheaper, migrate or recompute, not 'teleport'"):
        model("teleport")
