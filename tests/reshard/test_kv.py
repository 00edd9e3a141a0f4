"""The KV plan: no sequence is lost, no replica is overfilled, the cheaper way is taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat.layout import Layout
from pat.placement import Room
from pat.reshard.kv import KvCosts, Sequence, busiest_heads, plan_kv

WORLD = 8
COSTS = KvCosts(exchange_s=1e-3, sequence_s=5e-4, bytes_per_s=1e9, prefill_fixed_s=1e-3, prefill_token_s=1e-4)
tps = st.sampled_from([1, 2, 4, 8])


@st.composite
def cases(draw):
    """(sequences, old, new, KV heads, room): some sequences share a prefix with the first of their replica."""
    old, new = Layout.of(draw(tps), WORLD), Layout.of(draw(tps), WORLD)
    page = draw(st.sampled_from([1, 4, 16]))
    sequences, first = [], {}
    for i in range(draw(st.integers(0, 20))):
        replica, tokens = draw(st.integers(0, old.dp - 1)), draw(st.integers(1, 300))
        base = first.setdefault(replica, i)
        shared = 0
        if base != i and draw(st.booleans()):
            shared = draw(st.integers(0, min(tokens, sequences[base].tokens) // page)) * page
        sequences.append(Sequence(replica, tokens, base if shared else None, shared))
    room = Room(draw(st.integers(0, 2000)), draw(st.integers(1, 12)), page)
    return sequences, old, new, draw(st.sampled_from([1, 2, 4, 8])), room


@given(cases(), st.sampled_from(["auto", "migrate", "recompute"]))
def test_every_sequence_has_one_place_that_has_room(case, mode):
    sequences, old, new, heads, room = case
    plan = plan_kv(sequences, old, new, heads, 64, room, COSTS, mode)
    assert [p.sequence for p in plan.placements] == list(range(len(sequences)))
    for replica in range(new.dp):
        moved = [p for p in plan.migrated if p.replica == replica]
        slots = sum(room.needed(sequences[p.sequence].tokens - p.start) for p in moved)
        assert slots <= room.tokens
        assert len(moved) <= room.requests
    assert plan.count("migrate") + plan.count("recompute") + plan.count("queue") == len(sequences)
    if mode == "recompute":
        assert plan.count("recompute") == len(sequences)
        assert plan.migrate_s == 0
    if mode == "migrate":
        assert plan.count("recompute") == 0


@given(cases())
def test_a_shared_prefix_is_skipped_only_where_it_comes_along(case):
    sequences, old, new, heads, room = case
    plan = plan_kv(sequences, old, new, heads, 64, room, COSTS, "migrate")
    for p in plan.migrated:
        sequence = sequences[p.sequence]
        if p.start:
            base = plan.placements[sequence.base]
            assert base.how == "migrate"
            assert base.replica == p.replica
            assert p.start == sequence.shared_tokens


@given(cases())
def test_auto_takes_the_way_predicted_to_be_faster(case):
    sequences, old, new, heads, room = case
    for p in plan_kv(sequences, old, new, heads, 64, room, COSTS).placements:
        assert (p.how == "recompute") == (p.migrate_s > p.recompute_s)


def test_migration_loses_where_links_are_slow():
    sequences = [Sequence(0, 100), Sequence(1, 100)]
    room = Room(1000, 8)
    slow = KvCosts(bytes_per_s=1e3)
    assert plan_kv(sequences, Layout(1, 2), Layout(2, 1), 4, 1024, room, slow).count("recompute") == 2
    assert plan_kv(sequences, Layout(1, 2), Layout(2, 1), 4, 1024, room, COSTS).count("migrate") == 2


def test_the_longest_find_room_and_the_rest_is_queued():
    sequences = [Sequence(0, 10), Sequence(0, 500), Sequence(0, 300)]
    plan = plan_kv(sequences, Layout(2, 1), Layout(1, 2), 4, 64, Room(505, 8), COSTS, "migrate")
    assert [p.how for p in plan.placements] == ["migrate", "migrate", "migrate"]
    plan = plan_kv(sequences, Layout(2, 1), Layout(1, 2), 4, 64, Room(501, 1), COSTS, "migrate")
    assert [p.how for p in plan.placements] == ["queue", "migrate", "migrate"]
    assert sorted(p.replica for p in plan.migrated) == [0, 1]


def test_load_is_balanced_and_ties_stay_near():
    sequences = [Sequence(d, 100) for d in range(4)]
    plan = plan_kv(sequences, Layout(1, 4), Layout(2, 2), 4, 64, Room(1000, 8), COSTS, "migrate")
    assert [p.replica for p in plan.placements] == [0, 1, 0, 1]


def test_heads_on_the_busiest_rank():
    up, down = (Layout(1, 2), Layout(2, 1)), (Layout(2, 1), Layout(1, 2))
    assert busiest_heads(8, *up, 0, 0) == 8  # the old rank sends (and keeps) all its heads
    assert busiest_heads(8, *down, 0, 1) == 8
    assert busiest_heads(2, Layout(2, 2), Layout(4, 1), 0, 0) == 2  # replicated: one head to two ranks


def test_the_busiest_rank_sets_the_time_of_a_migration():
    up, down = (Layout(1, 2), Layout(2, 1)), (Layout(2, 1), Layout(1, 2))
    two = [Sequence(0, 100), Sequence(1, 100)]
    plan = plan_kv(two, *up, 8, 10, Room(1000, 8), COSTS, "migrate")
    assert plan.migrate_s == pytest.approx(2e-3 + 100 * 8 * 10 / 1e9)  # each rank sends one, takes half of two
    plan = plan_kv([Sequence(0, 100), Sequence(0, 100)], *down, 8, 10, Room(1000, 8), COSTS, "migrate")
    assert plan.migrated_most == (2, 8000)
    assert plan.migrate_s == pytest.approx(2e-3 + 100 * 8 * 10 / 1e9)  # each sends its half of both, gets all of one


def test_the_fullest_replica_sets_the_time_of_a_recomputation():
    sequences = [Sequence(0, 100), Sequence(0, 50), Sequence(0, 10)]
    costs = KvCosts(prefill_fixed_s=1.0, prefill_sequence_s=0.1, prefill_token_s=1e-3, prefill_token2_s=1e-6)
    plan = plan_kv(sequences, Layout(2, 1), Layout(1, 2), 4, 64, Room(1000, 8), costs, "recompute")
    assert plan.recomputed_most == (2, 60)
    assert plan.recompute_s == pytest.approx(1.0 + 2 * 0.1 + 60e-3 + (50**2 + 10**2) * 1e-6)
    assert plan.migrated_most == (0, 0)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="none of auto, migrate, recompute"):
        plan_kv([], Layout(1, 2), Layout(2, 1), 4, 64, Room(1, 1), COSTS, "teleport")
