"""Length model: against the empirical survival, closed forms of an exponential law, truncation, online correction."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat.lengths import LengthModel, expected_alive, length_grid, life_table

CAP = 4096


def lognormal(n: int, seed: int, mu: float = 6.0, sigma: float = 1.0) -> np.ndarray:
    return np.ceil(np.random.default_rng(seed).lognormal(mu, sigma, n))


def exponential_survival(edges: np.ndarray, mean: float) -> np.ndarray:
    return np.exp(-edges / mean)


def test_grid_spans_zero_to_cap_and_ascends():
    for cap in (1, 2, 100, 24576):
        edges = length_grid(cap)
        assert edges[0] == 0
        assert edges[-1] == cap
        assert np.all(np.diff(edges) >= 1)


def test_survival_approaches_the_empirical_one_as_data_grow():
    def error(n: int) -> float:
        lengths = np.minimum(lognormal(n, 1), CAP)
        model = LengthModel.fit(lengths, CAP, weight=n)
        empirical = [(lengths > e).mean() for e in model.edges_tokens[:-1]] + [(lengths >= CAP).mean()]
        return float(np.abs(model.survival() - empirical).max())

    assert error(20_000) < error(200) < error(10)
    assert error(20_000) < 1e-3


def test_without_truncation_at_risk_is_a_plain_count():
    lengths = np.array([1.0, 3, 3, 7, 50])
    edges = np.array([0.0, 1, 4, 10, 100])
    ended, at_risk = life_table(edges, lengths, np.empty(0))
    assert ended.tolist() == [1, 2, 1, 1]
    assert at_risk.tolist() == [5, 4, 2, 1]


def test_a_censored_sequence_counts_for_the_part_it_lived_through():
    edges = np.array([0.0, 10, 20])
    ended, at_risk = life_table(edges, np.array([5.0]), np.array([15.0, 20.0]))
    assert ended.tolist() == [1, 0]
    assert at_risk.tolist() == [3, 1.5]
    assert life_table(edges, np.empty(0), np.array([0.0]))[1].tolist() == [0, 0]


def test_lengths_at_the_cap_are_truncated_not_ended():
    lengths = np.minimum(lognormal(50_000, 2, mu=8.0), CAP)
    survival = LengthModel.fit(lengths, CAP, weight=1e9).survival()
    assert survival[-1] == pytest.approx(np.mean(lengths == CAP), abs=2e-3)
    assert survival[-1] > 0.3
    assert LengthModel.fit(np.full(1000, CAP), CAP, weight=1e9).survival().tolist() == [1.0] * len(survival)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, CAP), min_size=1, max_size=50),
    st.lists(st.integers(1, CAP), max_size=50),
    st.lists(st.integers(0, CAP - 1), max_size=50),
)
def test_survival_is_a_survival(earlier, finished, alive):
    model = LengthModel.fit(np.array(earlier), CAP)
    for m in (model, model.updated(np.array(finished), np.array(alive))):
        survival = m.survival()
        assert survival[0] == 1.0
        assert np.all(np.diff(survival) <= 0)
        assert survival[-1] >= 0
        assert np.all(m.ended <= m.at_risk + 1e-9)


def test_a_running_rollout_pulls_a_wrong_prior():
    """The prior says 100 tokens. 500 sequences are alive at 1,000: the model believes them."""
    model = LengthModel.fit(np.random.default_rng(0).integers(50, 150, 500), CAP)
    at_1000 = lambda m: float(np.interp(1000, m.edges_tokens, m.survival()))  # noqa: E731
    assert at_1000(model) < 0.01
    assert at_1000(model.updated(np.empty(0), np.full(500, 1000))) > 0.85
    few = at_1000(model.updated(np.empty(0), np.full(20, 1000)))
    assert at_1000(model) < few < 0.5


def test_prior_weighs_as_many_sequences_as_it_says():
    lengths = lognormal(1000, 3)
    light, heavy = LengthModel.fit(lengths, CAP, weight=10), LengthModel.fit(lengths, CAP, weight=500)
    assert light.at_risk[0] == pytest.approx(10)
    assert heavy.at_risk[0] == pytest.approx(500)
    assert LengthModel.fit(lengths[:5], CAP, weight=64).at_risk[0] == 5


def test_no_earlier_responses_is_an_error():
    with pytest.raises(ValueError, match="no earlier responses"):
        LengthModel.fit(np.empty(0), CAP)


def test_expected_alive_of_an_exponential_law():
    """n exp(-t / mean) whatever has been generated (memoryless), and nobody beyond the cap."""
    edges = length_grid(CAP)
    survival = exponential_survival(edges, 700.0)
    ahead = np.array([0.0, 1, 10, 333, 1000, 2000])
    for generated in (np.zeros(50), np.full(50, 137.0), np.full(50, 1500.0), np.arange(50.0) * 20):
        alive = expected_alive(edges, survival, generated, ahead)
        assert alive == pytest.approx(50 * np.exp(-ahead / 700.0), rel=1e-9)
    assert expected_alive(edges, survival, np.full(3, 96.0), np.array([3999.0, 4000, 5000]))[1:].tolist() == [0, 0]
    assert expected_alive(edges, survival, np.full(3, 96.0), np.array([3999.0])) > 0


def test_expected_alive_is_each_sequences_conditional_survival():
    """Against the sum over sequences one at a time, at the edges where pooling by bin is exact."""
    edges = length_grid(CAP)
    survival = LengthModel.fit(np.minimum(lognormal(3000, 5), CAP), CAP).survival()
    generated = edges[[0, 10, 10, 40, 70]]
    ahead = np.array([0.0, 5, 100, 1000])
    expected = [
        sum(
            np.exp(np.interp(g + t, edges, np.log(survival)) - np.interp(g, edges, np.log(survival)))
            for g in generated
            if g + t < CAP
        )
        for t in ahead
    ]
    assert expected_alive(edges, survival, generated, ahead) == pytest.approx(expected, rel=1e-12)
