"""Launches of real VeRL that go wrong: one clear error, no process left, what was measured kept.

Each takes the start of a launch, half a minute and more: they run where PAT_SLOW_TESTS is set.
"""

import os
import subprocess
from dataclasses import replace

import pytest

from bench.e2e.iterations import parse
from bench.e2e.launch import launch, marked
from bench.errors import UserError
from tests.verl.test_exact import grpo

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not os.environ.get("PAT_SLOW_TESTS"), reason="slow: set PAT_SLOW_TESTS=1 to run them"),
    pytest.mark.timeout(400),
]
STATIC = {"layouts": ["TP2xDP1"]}


def test_ctrl_c_ends_ray_and_all_children_and_keeps_the_iterations(tmp_path):
    def interrupted(iterations: int) -> None:
        if iterations:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(grpo(tmp_path, STATIC), tmp_path, 300, interrupted)
    assert marked() == []
    assert [one.iteration for one in parse(tmp_path, "e", "static", 0, "mark")] == [1]


def test_a_ray_cluster_that_does_not_answer(tmp_path):
    with pytest.raises(UserError, match=r"--ray-address 127\.0\.0\.1:1: no cluster answers.*ray start"):
        launch(replace(grpo(tmp_path, STATIC), ray_address="127.0.0.1:1"), tmp_path, 300)
    assert marked() == []


def test_no_space_for_checkpoints(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    try:
        run = replace(grpo(tmp_path, STATIC), checkpoint_directory=str(small / "checkpoints"))
        with pytest.raises(UserError, match=r"(?s)code 1; see .*No space left for checkpoints.* MB are free"):
            launch(run, tmp_path, 300)
    finally:
        subprocess.run(["umount", "-l", small], check=True)
    assert marked() == []
    assert parse(tmp_path, "e", "static", 0, "mark")
