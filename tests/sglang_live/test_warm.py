"""Engines whose processes are forked from a server that has SGLang loaded."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from bench.tiny_models import PRESETS, materialise
from pat.layout import Layout
from pat.sglang.guard import EngineDied
from tests.sglang_live.conftest import adaptive_engine, generate, run

pytestmark = pytest.mark.engine

PARENT = """
import json, os, sys, time
from tests.sglang_live.conftest import adaptive_engine
from pat.layout import Layout

if __name__ == "__main__":
    with adaptive_engine(sys.argv[1], (Layout(1, 2), Layout(2, 1))) as engine:
        print(json.dumps(list(engine.pids.values())), flush=True)
        time.sleep(60)
"""


def server_of(pid: int) -> psutil.Process:
    return psutil.Process(pid).parent()


def test_processes_are_forked_with_the_environment_of_their_engine(tmp_path) -> None:
    path = materialise(PRESETS["tiny-llama"])
    servers = []
    for name in ("one", "two"):
        (steps := tmp_path / name).mkdir()
        with adaptive_engine(path, (Layout(1, 2), Layout(2, 1)), {"PAT_STEP_LOG": str(steps)}) as engine:
            assert len(run(engine, generate(engine, [[5, 6]], [3]))[0]["output_ids"]) == 3
            servers += [server_of(pid) for pid in engine.pids.values()]
            assert list(steps.iterdir())
    assert len(set(servers)) == 1
    assert servers[0].ppid() == os.getpid()
    assert servers[0].num_threads() == 1


def test_another_environment_at_load_is_spawned() -> None:
    path = materialise(PRESETS["tiny-llama"])
    with adaptive_engine(path, (Layout(1, 1),), {"OMP_NUM_THREADS": "2"}) as engine:
        schedulers = [p for p in psutil.Process().children() if "scheduler" in p.name()]
        assert len(schedulers) == 1
        assert len(run(engine, generate(engine, [[5, 6]], [3]))[0]["output_ids"]) == 3


def test_a_failing_process_is_announced_to_the_engines_owner() -> None:
    path = materialise(PRESETS["tiny-llama"])
    with adaptive_engine(path, (Layout(1, 2), Layout(2, 1))) as engine:
        os.kill(server_of(engine.pids[0]).pid, signal.SIGQUIT)
        with pytest.raises(EngineDied):
            run(engine, generate(engine, [[5, 6]], [2000]))


def test_processes_end_with_the_engines_owner(tmp_path) -> None:
    path = materialise(PRESETS["tiny-llama"])
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, script, path],
        stdout=subprocess.PIPE,
        cwd=os.getcwd(),
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    pids = json.loads(next(line for line in parent.stdout if line.startswith(b"[")))
    processes = [psutil.Process(pid) for pid in pids]
    assert all(p.is_running() for p in processes)
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
