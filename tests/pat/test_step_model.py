"""Step-time model: laws found again, no fall but a proven one, hold-out errors in closed form."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat.step_model import half_interval, hold_out_errors, kept, monotone_fit, predicted_s, ramps

FAR = 200.0
BATCHES, CONTEXTS = (1, 2, 3, 4, 8), (10, 100, 190)


def points(step_s, batches=BATCHES, contexts=CONTEXTS):
    batch, context = (np.array(x, dtype=float).ravel() for x in np.meshgrid(batches, contexts, indexing="ij"))
    return batch, context, step_s(batch, context)


def law(batch, context):
    """10 ms + 2 ms a sequence + 20 us a token of context + 5 us a sequence and token: inside the model's family."""
    return 0.010 + 0.002 * batch + 2e-5 * context + 5e-6 * batch * context


def test_ramps_go_from_knot_to_knot_and_the_last_goes_on():
    found = ramps(np.array([1.0, 2.0, 4.0]), np.array([0.5, 1.0, 1.5, 3.0, 6.0]))
    assert found.tolist() == [[1, 0, 0], [1, 0, 0], [1, 0.5, 0], [1, 1, 0.5], [1, 1, 2.0]]


def test_a_law_of_the_family_is_found_again_between_and_beyond_the_points():
    batch, context, seconds = points(law)
    knots = np.unique(batch)
    values = monotone_fit(batch, context, seconds, knots, FAR)
    assert values[:, 0] == pytest.approx(law(knots, 0.0), rel=1e-6)
    assert values[:, 1] == pytest.approx(law(knots, FAR), rel=1e-6)
    asked = np.array([1.0, 2.5, 6.0, 12.0]), np.array([0.0, 50.0, 200.0, 300.0])
    assert predicted_s(knots, values, FAR, *asked) == pytest.approx(law(*asked), rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.5, 2.0), min_size=15, max_size=15), st.lists(st.floats(0.1, 1.0), min_size=5, max_size=5))
def test_no_fit_of_noise_falls_with_context_nor_beyond_the_last_batch(noise, bases):
    batch, context, seconds = points(lambda b, c: np.repeat(bases, len(CONTEXTS)) + 0 * b)
    knots = np.unique(batch)
    values = monotone_fit(batch, context, seconds * np.array(noise), knots, FAR)
    assert (values[:, 1] >= values[:, 0] - 1e-9).all()
    assert (values[-1] >= values[-2] - 1e-9).all()


def test_an_unproven_fall_is_levelled_and_a_proven_one_is_kept():
    """Steps of 4 sequences take 80% of those of 3: beyond doubt in exact points, not in ones that scatter by 30%."""
    exact = {1: 0.05, 2: 0.08, 3: 0.10, 4: 0.08, 8: 0.12}
    batch, context, seconds = points(lambda b, c: np.array([exact[int(x)] for x in b]))
    knots = np.unique(batch)
    assert monotone_fit(batch, context, seconds, knots, FAR)[:, 0] == pytest.approx(list(exact.values()))
    scatter = np.resize([1.3, 0.8, 0.95, 0.75, 1.25], len(seconds))
    levelled = monotone_fit(batch, context, seconds * scatter, knots, FAR)
    assert (np.diff(levelled, axis=0) >= -1e-9).all()


def test_hold_out_of_a_straight_line_is_exact_and_of_a_bent_one_is_what_interpolation_errs_by():
    batch, context, seconds = points(law)
    errors = hold_out_errors(batch, context, seconds, batch, FAR)
    assert np.isnan(errors[(batch == 1) | (batch == 8)]).all()
    assert errors[(batch > 1) & (batch < 8)] == pytest.approx(0, abs=1e-6)
    bent = {1: 1.0, 2: 3.0, 4: 4.0}
    batch, context, seconds = points(lambda b, c: np.array([bent[int(x)] for x in b]), batches=tuple(bent))
    errors = hold_out_errors(batch, context, seconds, batch, FAR)
    assert errors[batch == 2] == pytest.approx((1 + (4 - 1) / 3) / 3 - 1, abs=1e-6)  # on the line from 1 to 4


def test_the_interval_covers_nine_of_ten_errors():
    assert half_interval(np.array([np.nan, *np.linspace(-0.1, 0.1, 21)])) == pytest.approx(0.09, abs=0.011)
    assert half_interval(np.array([np.nan])) == float("inf")


def test_outliers_are_those_far_from_the_median_either_way():
    assert kept(np.array([1.0, 1.01, 0.99, 1.02, 5.0, 0.2])).tolist() == [True, True, True, True, False, False]
    assert kept(np.full(4, 3.0)).all()
