"""Communicators of several layouts."""

import pytest

from pat.layout import Layout, layouts
from pat.reshard.groups import group_sets, leaders


def test_every_rank_is_in_one_group_of_each_set():
    sets = group_sets(layouts(8))
    assert list(sets) == [1, 2, 4, 8]
    for tp, groups in sets.items():
        assert sorted(rank for group in groups for rank in group) == list(range(8))
        assert all(len(group) == tp and list(group) == sorted(group) for group in groups)


def test_groups_of_one_are_there_without_a_layout_of_tp1():
    assert list(group_sets([Layout(4, 2), Layout(2, 4)])) == [1, 2, 4]


def test_rank_d_leads_replica_d():
    for layout in layouts(8):
        assert leaders(layout) == tuple(range(layout.dp))


def test_layouts_of_two_worlds_are_refused():
    with pytest.raises(ValueError, match="one world"):
        group_sets([Layout(2, 2), Layout(2, 4)])
