"""Step table: its closed forms are the sums they claim to be."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat.step_table import StepTable

BATCHES = 3


@st.composite
def tables(draw) -> StepTable:
    knots = sorted(draw(st.sets(st.integers(0, 400), min_size=1, max_size=6)))
    times = st.floats(1e-3, 1.0)
    rows = draw(st.lists(st.lists(times, min_size=len(knots), max_size=len(knots)), min_size=BATCHES, max_size=BATCHES))
    ascending = np.sort(np.array(rows), axis=1)  # a longer context is no faster, so that no slope reaches below zero
    return StepTable(np.array(knots), np.vstack([np.zeros(len(knots)), ascending]))


batches = st.integers(1, BATCHES)


@given(tables(), batches, st.integers(0, 500), st.integers(0, 300))
def test_run_is_the_sum_of_its_steps(table, batch, start, steps):
    expected = sum(float(table.step_s(batch, start + i)) for i in range(steps))
    assert float(table.run_s(batch, start, steps)) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(tables(), batches, st.floats(0, 500), st.integers(0, 50), st.integers(0, 50))
def test_runs_add_up(table, batch, start, first, second):
    whole = table.run_s(batch, start, first + second)
    parts = table.run_s(batch, start, first) + table.run_s(batch, start + first, second)
    assert float(whole) == pytest.approx(float(parts), rel=1e-9, abs=1e-12)


@given(tables(), batches, st.floats(0, 500))
def test_one_step_equals_vectorised(table, batch, context):
    assert table.one_step_s(batch, context) == pytest.approx(float(table.step_s(batch, context)), rel=1e-12)


@given(tables(), batches, st.integers(0, 500), st.integers(0, 100), st.floats(0, 0.99))
def test_steps_within_a_budget(table, batch, start, steps, share):
    run_s = float(table.run_s(batch, start, steps))
    budget_s = run_s + share * table.one_step_s(batch, start + steps)
    found = table.steps_within(batch, start, budget_s)
    assert abs(found - steps) <= 1  # a budget of exactly n steps may round to n - 1
    assert float(table.run_s(batch, start, found)) <= budget_s * (1 + 1e-9) + 1e-12


def test_values_are_linear_between_knots_and_beyond():
    table = StepTable(np.array([100, 200]), np.array([[0.0, 0.0], [1.0, 3.0]]))
    assert table.step_s(1, np.array([0, 100, 150, 200, 300])).tolist() == [1.0, 1.0, 2.0, 3.0, 5.0]
    assert table.step_s(0, np.array([0, 300])).tolist() == [0.0, 0.0]


def test_broadcasts_batches_against_contexts():
    table = StepTable(np.array([10]), np.array([[0.0], [1.0], [2.0]]))
    assert table.run_s(np.array([1, 2])[:, None], np.array([0, 5, 50]), 4).tolist() == [[4.0] * 3, [8.0] * 3]


def test_a_free_step_has_no_number_of_steps():
    with pytest.raises(ValueError, match="0 sequences"):
        StepTable(np.array([10]), np.array([[0.0], [1.0]])).steps_within(0, 10, 1.0)
