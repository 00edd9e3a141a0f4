"""Length distributions: quantiles in closed form, and the fits that paper.yaml gives."""

import numpy as np
import pytest
from scipy.stats import norm

from bench.machine import paper_numbers
from bench.workloads.lengths import parse


@pytest.mark.parametrize(
    ("text", "probabilities", "tokens"),
    [
        ("lognormal:7,1", [0.5, norm.cdf(1)], [np.exp(7), np.exp(8)]),
        ("pareto:100,2", [0.0, 0.75], [100, 200]),
        ("uniform:10,30", [0.0, 0.25, 1.0], [10, 15, 30]),
        ("constant:77", [0.1, 0.9], [77, 77]),
        ("bimodal:20,900,0.1", [0.0, 0.89, 0.91], [20, 20, 900]),
    ],
)
def test_quantiles(text, probabilities, tokens):
    assert parse(text).tokens(np.array(probabilities), 10_000) == pytest.approx(tokens, abs=0.5)


def test_tokens_are_whole_and_between_one_and_the_cap():
    tokens = parse("lognormal:2,3").tokens(np.linspace(0.001, 0.999, 999), 50)
    assert tokens.dtype == np.int64
    assert (tokens.min(), tokens.max()) == (1, 50)


def test_the_fit_for_16k_meets_the_papers_shares():
    """P(length > 8192) = 1 - Phi((ln 8192 - mu) / sigma): the share over 8K of the paper, and about 2.2% at the cap."""
    lengths = paper_numbers()["lengths"]
    fit = lengths["synthetic_fit"]["cap_16384"]
    quantile = parse(f"lognormal:{fit['mu']},{fit['sigma']}").quantile

    def over(tokens):
        return 1 - np.interp(tokens, quantile(np.linspace(0.5, 0.9999, 200_000)), np.linspace(0.5, 0.9999, 200_000))

    assert over(8192) == pytest.approx(lengths["share_over_8k"]["value"], abs=0.003)
    assert over(16384) == pytest.approx(0.022, abs=0.002)
    assert quantile(np.array([0.5]))[0] == pytest.approx(fit["median"], rel=0.02)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gamma:1,2", "lognormal"),
        ("lognormal:1", "mu,sigma"),
        ("uniform:a,b", "low,high"),
        ("lognormal:nan,1", "finite"),
        ("lognormal:7,-1", "sigma"),
        ("constant:inf", "finite"),
        ("constant:0", "tokens"),
        ("pareto:0,1", "smallest"),
        ("pareto:9,0", "alpha"),
        ("uniform:30,10", "high at least low"),
        ("bimodal:1,9,1.5", "long_share"),
        ("bimodal:9,1,0.5", "long at least short"),
    ],
)
def test_errors_tell_what_is_known(text, words):
    with pytest.raises(ValueError, match=words):
        parse(text)
