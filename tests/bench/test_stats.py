"""Statistics in closed form."""

import numpy as np
import pytest

from bench.stats import gain_percent, interval, reduction_percent, weighted_percentiles


def test_interval_is_students():
    """1, 2, 3: s = 1, t(0.975, 2) = 4.30265."""
    found = interval([1, 2, 3])
    assert found.mean == 2
    assert found.half == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    assert found.text(2) == "2.00 ± 2.48"


def test_one_value_has_no_interval():
    assert interval([5.0]).text(1) == "5.0"
    assert np.isnan(interval([5.0]).half)
    with pytest.raises(ValueError, match="no values"):
        interval([])


def test_gain_and_reduction_are_paired():
    """Twice as fast is +100% and -50% time, in each pair and so on average."""
    assert gain_percent([2, 8], [1, 4]).mean == 100
    assert gain_percent([2, 8], [1, 4]).half == 0
    assert reduction_percent([2, 8], [1, 4]).mean == 50


def test_the_papers_reduction_is_a_gain():
    """34.6% less time is 1 / (1 - 0.346) - 1 = 52.9% more throughput."""
    assert gain_percent([1.0], [1 - 0.346]).mean == pytest.approx(52.9, abs=0.05)


def test_weighted_percentiles_repeat_values():
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1, 98, 1])
    expanded = np.repeat(values, weights)
    expected = [float(np.percentile(expanded, p, method="inverted_cdf")) for p in (50, 90, 99, 100)]
    assert weighted_percentiles(values, weights, (50, 90, 99, 100)) == expected == [1.0, 1.0, 2.0, 3.0]
