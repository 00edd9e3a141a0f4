"""The measured tier's pure parts: grids from logged steps, order of the arms, layouts of a rollout."""

import numpy as np
import pandas as pd
import pytest

from bench.experiment import load_experiment
from bench.measured import arms_of, interleaved, layouts_of
from bench.profiles.live import falling_lengths, grid_of


def logged(step_s, batches=(1, 2, 4), contexts=range(10, 110, 2)) -> pd.DataFrame:
    rows = [("decode", b, b * c, b, step_s(b, c)) for b in batches for c in contexts]
    rows += [("extend", 1, n, n, 0.001 + 1e-5 * n) for n in (10, 20, 30, 40)]
    return pd.DataFrame(rows, columns=["kind", "batch", "context_tokens", "new_tokens", "latency_s"])


def test_a_linear_law_is_found_again():
    """Steps of 10 ms + 2 ms a sequence + 0.1 ms a sequence and token of context: lines, so exact."""
    grid = grid_of(2, logged(lambda b, c: 0.010 + 0.002 * b + 1e-4 * b * c), 500)
    assert grid.batches.tolist() == [1, 2, 4]
    for i, b in enumerate((1, 2, 4)):
        assert grid.decode_s[i] == pytest.approx([0.010 + 0.002 * b + 1e-4 * b * c for c in (1, 500)], rel=1e-9)
    assert grid.prefill_time_s(25) == pytest.approx(0.001 + 25e-5, rel=1e-9)
    assert (grid.measured_batch, grid.measured_context_tokens) == (4, 108)


def test_outliers_do_not_move_it():
    steps = logged(lambda b, c: 0.010 * b)
    steps.loc[[3, 30, 60, 120], "latency_s"] = 9.9
    assert grid_of(1, steps, 100).decode_s[:, 0] == pytest.approx([0.010, 0.020, 0.040])


def test_no_batch_is_faster_than_a_smaller_one():
    grid = grid_of(1, logged(lambda b, c: {1: 0.02, 2: 0.015, 4: 0.03}[b]), 100)
    assert grid.decode_s[:, 0] == pytest.approx([0.02, 0.02, 0.03])


def test_without_decode_steps_there_is_no_profile():
    with pytest.raises(ValueError, match="no decode steps of TP2"):
        grid_of(2, logged(lambda b, c: 1.0).query("kind == 'extend'"), 100)


@pytest.mark.parametrize("sequences", [1, 2, 7, 16, 33])
def test_falling_lengths_pass_every_level(sequences):
    """All start together; some steps are made at each level, the last of them alone."""
    lengths = falling_lengths(sequences)
    assert len(lengths) == sequences
    running = [sum(n > step for n in lengths) for step in range(1, max(lengths))]
    assert running[0] == sequences
    assert running[-1] == 1
    counts = pd.Series(running).value_counts()
    assert counts.min() >= 6


def test_arms_turn_with_every_pair_of_seeds():
    experiment = load_experiment("cpu-llama")
    arms = arms_of(experiment)
    assert arms == ["static-TP1xDP2", "static-TP2xDP1", "pat-live", "pat-forced"]
    order = interleaved((0, 1, 2), arms)
    assert order == [(s, a) for a in arms for s in (0, 1)] + [(2, a) for a in arms[::-1]]


def test_layouts_of_a_rollout_begin_with_its_steps():
    steps = pd.DataFrame({"time_s": [1.0, 1.5, 2.0, 3.0], "latency_s": [1.0, 0.5, 0.5, 0.25], "tp": [1, 1, 1, 2]})
    shuffled = steps.iloc[np.array([3, 0, 2, 1])]
    assert layouts_of(shuffled, 4) == [(0.0, "TP1xDP4"), (2.75, "TP2xDP2")]
