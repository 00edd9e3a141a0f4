"""Shards of fused dimensions: every copy fetches what its receiver lacks, and going up takes nothing from others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat.layout import Layout
from pat.reshard.weights import Copy, Part, copies, held, slices

POWERS = st.sampled_from([1, 2, 4, 8])


@st.composite
def dimensions(draw):
    """Fused parts that TP 1, 2, 4 and 8 all divide or replicate, like q, k and v."""
    return tuple(
        Part(draw(st.sampled_from([1, 2, 4, 8, 16, 24])), draw(st.integers(1, 3)))
        for _ in range(draw(st.integers(1, 3)))
    )


@st.composite
def layouts(draw, world=8):
    return Layout.of(draw(POWERS), world)


def shard(parts, tp, tp_rank):
    """Row numbers of the whole dimension that a tp rank holds, in its own order: the definition, spelled out."""
    rows, full = [], 0
    for part in parts:
        units = np.arange(part.units)
        mine = np.array_split(units, tp)[tp_rank] if part.units >= tp else units[[tp_rank * part.units // tp]]
        rows += [full + unit * part.width + i for unit in mine for i in range(part.width)]
        full += part.units * part.width
    return np.array(rows)


@given(dimensions(), POWERS, st.data())
def test_held_is_the_even_division(parts, tp, data):
    tp_rank = data.draw(st.integers(0, tp - 1))
    rows = [piece.full + i for piece in held(parts, tp, tp_rank) for i in range(piece.length)]
    assert rows == shard(parts, tp, tp_rank).tolist()
    assert [piece.local for piece in held(parts, tp, tp_rank)] == np.cumsum(
        [0, *[piece.length for piece in held(parts, tp, tp_rank)][:-1]]
    ).tolist()


@given(dimensions(), layouts(), layouts(), st.data())
def test_copies_fill_the_new_shard(parts, old, new, data):
    rank = data.draw(st.integers(0, 7))
    replica = data.draw(st.none() | st.integers(0, old.dp - 1))
    wanted = shard(parts, new.tp, new.tp_rank(rank))
    got = np.full(len(wanted), -1)
    for copy in copies(parts, old, new, rank, replica):
        if replica is not None:
            assert old.replica(copy.source) == replica
        theirs = shard(parts, old.tp, old.tp_rank(copy.source))
        got[copy.to : copy.to + copy.length] = theirs[copy.start : copy.start + copy.length]
    assert got.tolist() == wanted.tolist()


@given(dimensions(), layouts(), layouts(), st.integers(0, 7))
def test_going_up_takes_nothing_from_others(parts, a, b, rank):
    low, high = sorted([a, b])
    pieces = slices(parts, low, high, rank)
    own, wanted = shard(parts, low.tp, low.tp_rank(rank)), shard(parts, high.tp, high.tp_rank(rank))
    got = np.concatenate([own[p.start : p.start + p.length] for p in pieces])
    assert got.tolist() == wanted.tolist()
    assert len(pieces) <= len(parts)


def test_examples():
    qkv = (Part(8, 2), Part(2, 2), Part(2, 2))
    assert slices(qkv, Layout(1, 2), Layout(2, 1), 1) == (Copy(1, 8, 0, 8), Copy(1, 18, 8, 2), Copy(1, 22, 10, 2))
    assert slices((Part(8),), Layout(1, 2), Layout(2, 1), 1) == (Copy(1, 4, 0, 4),)
    assert [c.source for c in copies((Part(8),), Layout(2, 1), Layout(1, 2), 0)] == [0, 1]
    with pytest.raises(ValueError, match="TP4 neither divides"):
        held((Part(6),), 4, 0)
    with pytest.raises(ValueError, match="does not lie inside"):
        slices((Part(8),), Layout(2, 1), Layout(1, 2), 0)
