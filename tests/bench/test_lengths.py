"""Length distributions: quantiles in closed form, and the fits that paper.yaml gives."""

import numpy as np
import pytest
from scipy.stats import norm

from bench.experiment import known_experiments, load_experiment
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


@pytest.mark.parametrize("cap", [16384, 24576])
def test_the_fits_meet_the_papers_shares(cap):
    """P(length > t) = Phi((mu - ln t) / sigma): the paper's share over 8K, and about 2.2% at the cap."""
    lengths = paper_numbers()["lengths"]
    fit = lengths["synthetic_fit"][f"cap_{cap}"]
    over_8k, at_cap = norm.cdf((fit["mu"] - np.log([8192, cap])) / fit["sigma"])
    assert over_8k == pytest.approx(lengths["share_over_8k"]["value"], abs=0.003)
    assert at_cap == pytest.approx(0.022, abs=0.001)
    found = parse(f"lognormal:{fit['mu']},{fit['sigma']}").tokens(1 - np.array([0.5, over_8k, at_cap]), 1 << 40)
    assert found == pytest.approx([np.exp(fit["mu"]), 8192, cap], abs=1)
    assert np.exp(fit["mu"]) == pytest.approx(fit["median"], rel=0.02)


@pytest.mark.parametrize("cap", [6144, 8192, 16384, 24576])
def test_experiments_run_a_fit_of_the_paper(cap):
    fits = {
        f"lognormal:{f['mu']},{f['sigma']}"
        for k, f in paper_numbers()["lengths"]["synthetic_fit"].items()
        if k != "note"
    }
    names = [name for name in known_experiments() if name.endswith(f"-{cap // 1024}k")]
    assert len(names) == 6
    assert {load_experiment(name).lengths for name in names} <= fits


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
