"""Length traces: exact marginals, round trips, and errors that name line and field."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, norm

from bench.errors import UserError
from bench.workloads.lengths import parse
from bench.workloads.trace import LengthTrace, read_trace, synthetic_trace

LOGNORMAL = parse("lognormal:7.25,1.41")
GOLDEN = "a607fada298fa718fd69480d5449894b245f75324d0821ec6fe884d492d64948"
"""Of 16 prompts x 8 samples, cap 24576, seed 0: made by this code on 2026-12-01, equal on every machine since."""


def test_the_same_seed_gives_the_same_trace():
    assert synthetic_trace(LOGNORMAL, 16, 8, 24576, 0).sha256 == GOLDEN
    assert synthetic_trace(LOGNORMAL, 16, 8, 24576, 1).sha256 != GOLDEN


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_each_length_follows_the_distribution_whatever_prompts_share(share):
    """First samples of 4,000 prompts are independent, so a Kolmogorov-Smirnov test applies."""
    trace = synthetic_trace(LOGNORMAL, 4000, 2, 1 << 40, 3, prompt_share=share)
    lengths = trace.response_tokens[trace.sample == 0]
    assert kstest((np.log(lengths) - 7.25) / 1.41, norm.cdf).pvalue > 0.01


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_is_of_one(share):
    with pytest.raises(UserError, match="prompt_share must lie between 0 and 1"):
        synthetic_trace(LOGNORMAL, 2, 2, 100, 0, prompt_share=share)


def test_a_line_separator_inside_text_ends_no_line(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD | {"prompt_id": "a\u2028b"}, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_trace(path).prompt_id.tolist() == ["a\u2028b"]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_samples_of_a_prompt_correlate_by_its_share(share):
    logs = np.log(synthetic_trace(LOGNORMAL, 4000, 2, 1 << 40, 5, prompt_share=share).response_tokens).reshape(-1, 2)
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(share, abs=0.04)


def test_summary():
    trace = LengthTrace.of(["a", "a", "b", "b"], [0, 1, 0, 1], [5, 5, 6, 6], [1, 9000, 3, 10_000], 10_000)
    found = trace.summary()
    assert (found["mean"], found["median"], found["max"], found["total_tokens"]) == (4751.0, 4501.5, 10_000, 19_004)
    assert (found["share_over_8192"], found["share_at_cap"]) == (0.5, 0.25)


ROWS = st.lists(st.tuples(st.text(min_size=1), *[st.integers(1, 10**6)] * 3), min_size=1, max_size=20)


@settings(deadline=None)
@given(ROWS)
def test_what_is_written_is_read(tmp_path_factory, rows):
    trace = LengthTrace.of(*zip(*rows, strict=True), cap_tokens=1000)
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    trace.write(path)
    assert read_trace(path).rows() == trace.rows()
    assert read_trace(path).sha256 == trace.sha256


GOOD = {"prompt_id": "p", "sample": 0, "prompt_tokens": 3, "response_tokens": 4, "truncated": False}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"response_tokens": 0}, "line 2: response_tokens must be at least 1"),
        ({"response_tokens": "4"}, "line 2: response_tokens must be int"),
        ({"response_tokens": 10**30}, "line 2: response_tokens must be at most 2147483647"),
        ({"sample": -1}, "line 2: sample must be at least 0"),
        ({"truncated": 1}, "line 2: truncated must be bool"),
        ({"colour": 1}, "line 2: unknown field 'colour'"),
    ],
)
def test_a_bad_row_names_line_and_field(tmp_path, change, words):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD | change) + "\n")
    with pytest.raises(UserError, match=words):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no rows"),
        ("{", "line 1: not JSON"),
        ("[]", "line 1: not an object"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "sample"}), "line 1: lacks the field 'sample'"),
    ],
)
def test_a_bad_file(tmp_path, text, words):
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        read_trace(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_trace(tmp_path / "absent.jsonl")
