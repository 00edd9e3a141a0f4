"""Tracking: names that VeRL's users know, few rows, nothing secret."""

import os
import socket
import subprocess
import sys

import pandas as pd
import pytest

from bench.errors import UserError
from bench.tracking import make_tracker, merged, step_metrics, summary_metrics
from bench.workloads.trace import LengthTrace
from tests.bench.test_records import summary

STEPS = pd.DataFrame(
    {"time_s": [0.0, 1.0, 3.0], "replica": 0, "tp": [2, 2, 8], "kind": ["extend", "decode", "decode"]}
    | {"steps": [1, 10, 5], "batch": [4, 4, 2], "seconds": [1.0, 2.0, 0.5]}
)


def test_step_metrics():
    """10 steps in 2 s are 200 ms each; 4 sequences then make 20 tokens/s."""
    found = step_metrics(STEPS)
    assert found["step/latency_ms"].tolist() == [200.0, 100.0]
    assert found["step/tokens_per_s"].tolist() == [20.0, 20.0]
    assert found["step/active_sequences"].tolist() == [4, 2]
    assert found["step/layout_tp"].tolist() == [2, 8]


def test_long_rollouts_are_thinned_evenly():
    many = pd.concat([STEPS.iloc[[1]]] * 999).assign(time_s=range(999))
    assert step_metrics(many, 3)["step/time_s"].tolist() == [0, 499, 998]


def test_summary_metrics_have_verls_names():
    trace = LengthTrace.of(["a", "a"], [0, 1], [5, 5], [10, 30], 30)
    assert summary_metrics(summary(rollout_s=4.0, tokens_per_s=10.0), trace) == {
        "timing_s/gen": 4.0,
        "response_length/mean": 20.0,
        "response_length/max": 30.0,
        "response_length/min": 10.0,
        "response_length/clip_ratio": 0.5,
        "perf/throughput": 10.0,
    }


def test_rollouts_are_merged_step_by_step():
    logged = {"a": (pd.DataFrame({"x": [1, 2]}), {"s": 3}), "b": (pd.DataFrame({"x": [4]}), {"s": 5})}
    assert merged(logged) == [{"a/x": 1, "b/x": 4}, {"a/x": 2}, {"a/s": 3, "b/s": 5}]


SCRIPT = """
import sys
from pathlib import Path
from bench.tracking import make_tracker, step_metrics
from tests.bench.test_tracking import STEPS

tracker = make_tracker("wandb", Path(sys.argv[1]))
tracker.start("run", {"seed": 1})
tracker.rollouts({"static": (step_metrics(STEPS), {"timing_s/gen": 4.0})})
tracker.finish()
"""


def test_wandb_offline_keeps_the_metrics_and_no_key(tmp_path):
    """In a process of its own: inside pytest wandb's writer keeps nothing but a header."""
    secret = "5" * 40
    environment = os.environ | {"WANDB_API_KEY": secret, "WANDB_MODE": "offline"}
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], env=environment, check=True, timeout=120)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert all(secret.encode() not in p.read_bytes() for p in files)
    content = next(p for p in files if p.suffix == ".wandb").read_bytes()
    host = socket.gethostname().encode()
    assert b"j\x06hidden" in content  # the run's host: its protobuf tag, length and text
    assert b"j" + bytes([len(host)]) + host not in content
    for name in (b"static/step/latency_ms", b"static/step/active_sequences", b"static/timing_s/gen"):
        assert name in content


def test_wandb_that_cannot_start_is_one_error_without_its_text(tmp_path, monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.errors.CommError("key 123 refused")

    monkeypatch.setattr(wandb, "init", refuse)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with pytest.raises(UserError, match="--tracker none") as caught:
        make_tracker("wandb", tmp_path).start("run", {})
    assert "123" not in str(caught.value)
    monkeypatch.setenv("WANDB_MODE", "bogus")
    with pytest.raises(UserError, match="WANDB_MODE='bogus'"):
        make_tracker("wandb", tmp_path).start("run", {})


def test_unknown_trackers_are_refused(tmp_path):
    with pytest.raises(UserError, match="known ones: wandb, none"):
        make_tracker("mlflow", tmp_path)
    make_tracker("none", tmp_path).rollouts({})
    assert os.listdir(tmp_path) == []
