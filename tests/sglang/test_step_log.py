"""The step log's writer and reader, without an engine."""

import time
from pathlib import Path

import pytest

from pat.sglang.step_log import StepLog, read_steps


def step(log: StepLog, kind: str, batch: int, forward_s: float = 0.0) -> None:
    log.begin(1, 2, kind, batch, 10 * batch, batch)
    log.add_forward(forward_s)
    log.end()


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    log, start_s = StepLog(tmp_path), time.time() - 1
    for kind, batch in (("extend", 3), ("decode", 3), ("decode", 2)):
        step(log, kind, batch, forward_s=0.25)
    log.idle()
    steps = read_steps(tmp_path, start_s)
    assert steps.step.tolist() == [0, 1, 2]
    assert steps.kind.tolist() == ["extend", "decode", "decode"]
    assert steps.context_tokens.tolist() == [30, 30, 20]
    assert set(steps.replica) == {1}
    assert set(steps.tp) == {2}
    assert set(steps.forward_s) == {0.25}
    assert (steps.time_s >= 1).all()


def test_idleness_is_no_latency(tmp_path: Path) -> None:
    log = StepLog(tmp_path)
    step(log, "decode", 1)
    log.idle()
    log.idle()
    time.sleep(0.05)
    between_s = time.time()
    step(log, "decode", 1)
    log.idle()
    steps = read_steps(tmp_path)
    assert (steps.latency_s < 0.04).all()
    assert len(read_steps(tmp_path, between_s)) == len(read_steps(tmp_path, end_s=between_s)) == 1


def test_overlapped_steps_pair_up_in_order(tmp_path: Path) -> None:
    """Overlap scheduling launches a step before it ends the one before."""
    log = StepLog(tmp_path)
    log.begin(0, 1, "extend", 4, 40, 40)
    log.add_forward(1.0)
    log.begin(0, 1, "decode", 4, 44, 4)
    log.add_forward(2.0)
    log.end()
    log.idle()  # a step is under way: not idle
    log.end()
    log.end()  # nothing to end
    log.idle()
    steps = read_steps(tmp_path)
    assert steps.kind.tolist() == ["extend", "decode"]
    assert steps.forward_s.tolist() == [1.0, 2.0]


def test_reader_waits_for_idleness(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "none").empty
    log = StepLog(tmp_path)
    assert read_steps(tmp_path).empty
    step(log, "decode", 1)
    with pytest.raises(TimeoutError, match=r"still being written after 0\.05 s"):
        read_steps(tmp_path, wait_s=0.05)
    log.idle()
    assert len(read_steps(tmp_path)) == 1
