"""Layouts: rank maps that invert each other, groups in order, shards that nest."""

from itertools import product

import pytest

from pat.layout import Layout, layouts

SHAPES = [Layout(tp, world // tp) for world in (1, 2, 4, 8, 16) for tp in (1, 2, 4, 8) if world % tp == 0]
PLACES = [(a, node) for a in SHAPES for node in (a.tp, 8, a.world) if node % a.tp == 0 and a.world % node == 0]


@pytest.mark.parametrize(("layout", "node"), PLACES)
def test_rank_inverts_tp_rank_and_replica(layout, node):
    pairs = [(layout.tp_rank(r, node), layout.replica(r, node)) for r in range(layout.world)]
    assert sorted(pairs) == sorted(product(range(layout.tp), range(layout.dp)))
    assert [layout.rank(i, d, node) for i, d in pairs] == list(range(layout.world))


@pytest.mark.parametrize(("layout", "node"), PLACES)
def test_groups_ascend_stay_in_a_node_and_divide_the_world(layout, node):
    groups = layout.groups(node)
    assert all(list(g) == sorted(g) and len(g) == layout.tp for g in groups)
    assert all(len({rank // node for rank in g}) == 1 for g in groups)
    assert sorted(rank for g in groups for rank in g) == list(range(layout.world))


@pytest.mark.parametrize(("layout", "node"), PLACES)
def test_leader_of_a_replica_is_its_number_inside_the_node(layout, node):
    per_node = node // layout.tp
    assert [g[0] for g in layout.groups(node)] == [d // per_node * node + d % per_node for d in range(layout.dp)]


@pytest.mark.parametrize("world", [8, 16])
def test_higher_tp_slices_lie_inside_lower_tp_slices(world):
    """Rank r holds the share [i / tp, (i + 1) / tp) of the heads: going up, that only shrinks."""
    for low, high in product(layouts(world, node=8), repeat=2):
        if low.tp <= high.tp:
            ratio = high.tp // low.tp
            for rank in range(world):
                assert high.tp_rank(rank, 8) // ratio == low.tp_rank(rank, 8)


def test_replicas_merge_whole_going_up():
    for low, high in product(layouts(16, node=8), repeat=2):
        if low.tp <= high.tp:
            for group in low.groups(8):
                assert any(set(group) <= set(wider) for wider in high.groups(8))


def test_known_groups():
    assert Layout(2, 2).groups() == ((0, 2), (1, 3))
    assert Layout(4, 4).groups(8) == ((0, 2, 4, 6), (1, 3, 5, 7), (8, 10, 12, 14), (9, 11, 13, 15))


def test_parse_and_errors():
    assert Layout.parse("TP2xDP4") == Layout(2, 4)
    assert str(Layout(2, 4)) == "TP2xDP4"
    assert Layout.of(4, 8) == Layout(4, 2)
    for text in ("TP2", "tp2xdp4", "TP2xDP4 ", "TP0xDP4"):
        with pytest.raises(ValueError, match="layout"):
            Layout.parse(text)
    with pytest.raises(ValueError, match="TP3 does not divide 8 GPUs"):
        Layout.of(3, 8)


def test_layouts_stay_inside_a_node():
    assert layouts(16, node=8) == (Layout(1, 16), Layout(2, 8), Layout(4, 4), Layout(8, 2))
    assert layouts(4) == (Layout(1, 4), Layout(2, 2), Layout(4, 1))
    assert layouts(8, tps=(4, 2), node=2) == (Layout(2, 4),)
