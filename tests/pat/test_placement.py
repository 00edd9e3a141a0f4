"""Placement: homes share ranks, shares are even, capacity holds, nobody is lost."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat.layout import Layout, layouts
from pat.placement import Room, home_replica, nearby, place, shares_ranks

PAIRS = [(a, b, w) for w in (8, 16) for a, b in product(layouts(w, node=8), repeat=2)]


@pytest.mark.parametrize(("old", "new", "world"), PAIRS)
def test_shares_ranks_says_whether_the_groups_intersect(old, new, world):
    for d, e in product(range(old.dp), range(new.dp)):
        common = set(old.groups(8)[d]) & set(new.groups(8)[e])
        assert bool(shares_ranks(old, new, np.array([d]), np.array([e]), 8)[0]) == bool(common)
        assert (e in nearby(old, new, 8)[d]) == bool(common)


@pytest.mark.parametrize(("old", "new", "world"), PAIRS)
def test_home_is_the_replica_with_the_old_leader(old, new, world):
    homes = home_replica(old, new, np.arange(old.dp), 8)
    for d, home in enumerate(homes):
        assert old.groups(8)[d][0] in new.groups(8)[home]


@st.composite
def moves(draw):
    old, new, _ = draw(st.sampled_from(PAIRS))
    n = draw(st.integers(0, 40))
    replica = draw(st.lists(st.integers(0, old.dp - 1), min_size=n, max_size=n))
    context = draw(st.lists(st.integers(1, 500), min_size=n, max_size=n))
    return (
        old,
        new,
        np.array(replica, dtype=int),
        np.array(context, dtype=int),
        draw(st.sampled_from([500, 1500, 10**6])),
    )


@settings(max_examples=200, deadline=None)
@given(moves())
def test_no_replica_is_over_its_capacity_and_only_the_homeless_queue(move):
    old, new, replica, context, capacity = move
    target = place(old, new, replica, context, Room(capacity), 8)
    load = np.bincount(target[target >= 0], weights=context[target >= 0] + 1, minlength=new.dp)
    assert np.all(load <= capacity)
    for i in np.flatnonzero(target < 0):  # it had no room anywhere, even at the end
        assert np.all(load + context[i] + 1 > capacity)
    if capacity == 10**6:
        counts = np.bincount(target, minlength=new.dp)
        assert counts.sum() == len(context)
        assert counts.max(initial=0) <= -(-len(context) // new.dp)


@pytest.mark.parametrize(("old", "new", "world"), PAIRS)
def test_even_batches_never_leave_their_ranks(old, new, world):
    """With the same number on every old replica, everyone stays where part of its KV is, and counts stay even."""
    replica = np.arange(4 * world) % old.dp
    target = place(old, new, replica, np.full(4 * world, 100), Room(10**6), 8)
    assert np.all(shares_ranks(old, new, replica, target, 8))
    assert np.bincount(target).tolist() == [4 * world // new.dp] * new.dp


def test_longest_stays_at_home_and_the_surplus_moves_to_the_emptiest():
    """Three on replica 0 (home 0), one on replica 1 (home 1): the shortest of the three moves."""
    target = place(Layout(2, 4), Layout(4, 2), np.array([0, 0, 2, 1]), np.array([50, 10, 40, 5]), Room(1000))
    assert target.tolist() == [0, 1, 0, 1]


def test_the_one_without_room_queues():
    target = place(Layout(4, 2), Layout(8, 1), np.array([0, 1, 0]), np.array([60, 50, 40]), Room(102))
    assert target.tolist() == [0, -1, 0]


def test_pages_and_the_number_of_requests_are_limits_too():
    up = Layout(1, 2), Layout(2, 1)
    assert place(*up, [0, 1], [8, 8], Room(24, page_tokens=8)).tolist() == [0, -1]  # two pages each, three are there
    assert place(*up, [0, 1, 0], [5, 9, 7], Room(1000, requests=2)).tolist() == [-1, 0, 0]


def test_a_shared_prompt_takes_room_once():
    up = Layout(1, 2), Layout(2, 1)
    assert place(*up, [0, 0, 0], [60, 50, 50], Room(83)).tolist() == [0, -1, -1]
    assert place(*up, [0, 0, 0], [60, 50, 50], Room(83), shared={1: (0, 40), 2: (0, 40)}).tolist() == [0, 0, 0]
    assert place(*up, [0, 0, 0], [60, 50, 50], Room(82), shared={1: (0, 40), 2: (0, 40)}).tolist() == [0, 0, -1]
