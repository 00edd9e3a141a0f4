"""One launch of ``python -m verl.trainer.main_ppo`` as a child, and the end of everything that it started."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from bench.backends.processes import end_processes
from bench.e2e.iterations import read_lines
from bench.errors import UserError
from pat.verl.overrides import GrpoRun, environment, overrides

MARK = "PAT_E2E_LAUNCH"
"""Environment variable that every process of a launch inherits, Ray's daemons among them."""
POLL_S = 0.5
GRACE_S = 5.0
ANSWER_S = 5.0
"""A Ray cluster that does not accept a connection within it is taken not to be there."""


def command(run: GrpoRun) -> list[str]:
    return [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(run)]


def launch(run: GrpoRun, folder: Path, limit_s: float, progress: Callable[[int], None] = lambda done: None) -> int:
    """Run to the end; returns the memory of the host that was taken meanwhile, at most, in bytes (by whatever runs
    here). ``progress`` is told of finished iterations. Metrics go to ``folder``/metrics.jsonl, VeRL's
    output to ``folder``/verl.log. UserError with the end of the output where VeRL fails or takes more than
    ``limit_s``. However it ends, no process is left."""
    if run.ray_address is not None:
        check_answers(run.ray_address)
    folder.mkdir(parents=True, exist_ok=True)
    mark, metrics = uuid.uuid4().hex, folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    wanted = {**os.environ, **environment(run, metrics), MARK: mark, "HYDRA_FULL_ERROR": "1"}
    end_s, least = time.monotonic() + limit_s, (free := psutil.virtual_memory().available)
    with (folder / "verl.log").open("wb") as log:
        process = subprocess.Popen(
            command(run),
            env=wanted,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                least = min(least, psutil.virtual_memory().available)
                progress(len(read_lines(metrics)))
                if time.monotonic() > end_s:
                    raise UserError(f"VeRL has taken more than {limit_s:.0f} s; {tail(folder / 'verl.log')}")
                time.sleep(POLL_S)
            progress(len(read_lines(metrics)))
        finally:
            stop(process, mark)
    if process.returncode:
        said = tail(folder / "verl.log") + (short_of_space(run) or "")
        raise UserError(f"VeRL ended with code {process.returncode}; {said}")
    return free - least


def check_answers(ray_address: str) -> None:
    """UserError where nothing listens at host:port: Ray itself goes on asking, for minutes. ``auto``, which finds a
    cluster of this machine, is Ray's to refuse, at once."""
    host, _, port = ray_address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"--ray-address {ray_address}: no cluster answers there ({error}); start one with `ray start --head`, or "
            "leave the option out"
        ) from None


def short_of_space(run: GrpoRun) -> str | None:
    """A line where the checkpoints' disk has no room for the model's weights: who writes them does not say so."""
    place = next(p for p in (Path(run.checkpoint_directory), *Path(run.checkpoint_directory).parents) if p.exists())
    weights_bytes = sum(path.stat().st_size for path in Path(run.model_path).glob("*.safetensors"))
    free_bytes = shutil.disk_usage(place).free
    if free_bytes >= weights_bytes:
        return None
    return (
        f"\n  No space left for checkpoints in {run.checkpoint_directory}: {free_bytes / 1e6:.1f} MB are free, the "
        f"weights alone take {weights_bytes / 1e6:.1f} MB; free some, or give another --out"
    )


def stop(process: subprocess.Popen, mark: str) -> None:
    """Ask the child to end, then kill all that carry the mark."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    while left := marked(mark):
        end_processes(left)
    process.wait()


def marked(mark: str | None = None) -> list[psutil.Process]:
    """Living processes of a launch, or of any, wherever they hang in the process tree."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            its = process.environ().get(MARK) if process.status() != psutil.STATUS_ZOMBIE else None
            if its is not None and mark in (its, None):
                found.append(process)
    return found


def tail(log: Path, lines: int = 12) -> str:
    """The last error of a log, or its last lines, with where to read on."""
    text = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in text if "Error" in line or "No space left" in line]
    shown = errors[-3:] or text[-lines:]
    return f"see {log}:\n" + "\n".join(f"  {line[-300:]}" for line in shown)
