"""The measured tier's pure parts: order of the arms, layouts of a rollout."""

import numpy as np
import pandas as pd

from bench.experiment import load_experiment
from bench.measured import arms_of, interleaved, layouts_of


def test_arms_turn_with_every_seed():
    experiment = load_experiment("cpu-llama")
    arms = arms_of(experiment)
    assert arms == ["static-TP1xDP2", "static-TP2xDP1", "pat-live", "pat-forced"]
    order = interleaved((0, 1, 2), arms)
    assert order == [(0, a) for a in arms] + [(1, a) for a in arms[::-1]] + [(2, a) for a in arms]


def test_layouts_of_a_rollout_begin_with_its_steps():
    steps = pd.DataFrame({"time_s": [1.0, 1.5, 2.0, 3.0], "latency_s": [1.0, 0.5, 0.5, 0.25], "tp": [1, 1, 1, 2]})
    shuffled = steps.iloc[np.array([3, 0, 2, 1])]
    assert layouts_of(shuffled, 4) == [(0.0, "TP1xDP4"), (2.75, "TP2xDP2")]
