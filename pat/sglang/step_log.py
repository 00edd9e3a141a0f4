"""Step log: the time of every scheduler step, taken inside the scheduler.

On by ``PAT_STEP_LOG=DIRECTORY``. The leader (tp rank 0) of each replica writes ``steps-PID.csv`` there, one row a step:

    time_s      time.time() when the step was complete
    replica     data-parallel rank
    tp          TP degree of the layout the step ran in
    kind        ``decode``, ``extend`` (prefill; a mixed batch counts as extend), or a mark: ``busy`` and ``idle``
    batch       sequences in the step
    context_tokens   sum of their lengths, the tokens of this step included
    new_tokens  tokens computed in the step: batch for a decode step, uncached prompt tokens for an extend
    latency_s   since the step before was complete, or since this one began after idleness
    forward_s   of it, in the model's forward pass (without sampling). With overlap scheduling: its launch only

Rows stay in the file's buffer until the scheduler is idle: 10 to 20 us a step. A file that ends in an ``idle`` mark is
complete; :func:`read_steps` waits for that.
"""

from __future__ import annotations

import atexit
import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("time_s", "replica", "tp", "kind", "batch", "context_tokens", "new_tokens", "latency_s", "forward_s")
BUFFER_BYTES = 1 << 20


class StepLog:
    """Writer of one scheduler process. ``begin`` and ``end`` calls pair up in order, also where they overlap."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.file = (directory / f"steps-{os.getpid()}.csv").open("w", buffering=BUFFER_BYTES)
        self.file.write(",".join(COLUMNS) + "\n")
        self.file.flush()
        self.open_steps: deque[list] = deque()
        self.last_s: float | None = None

    def begin(self, replica: int, tp: int, kind: str, batch: int, context_tokens: int, new_tokens: int) -> None:
        if self.last_s is None:
            self.mark("busy")
            self.last_s = time.perf_counter()
        self.open_steps.append([replica, tp, kind, batch, context_tokens, new_tokens, 0.0])

    def add_forward(self, seconds: float) -> None:
        """Count ``seconds`` as forward pass of the step begun last."""
        if self.open_steps:
            self.open_steps[-1][-1] += seconds

    def end(self) -> None:
        if not self.open_steps:
            return
        now_s = time.perf_counter()
        replica, tp, kind, batch, context, new, forward_s = self.open_steps.popleft()
        latency_s, self.last_s = now_s - self.last_s, now_s
        self.file.write(
            f"{time.time():.6f},{replica},{tp},{kind},{batch},{context},{new},{latency_s:.7f},{forward_s:.7f}\n"
        )

    def idle(self) -> None:
        """The scheduler has nothing to run: what comes next is not a step's latency. Cheap when called again."""
        if self.last_s is not None and not self.open_steps:
            self.last_s = None
            self.mark("idle")

    def mark(self, kind: str) -> None:
        self.file.write(f"{time.time():.6f},0,0,{kind},0,0,0,0,0\n")
        self.file.flush()


def kind_of(batch) -> str | None:
    """``decode``, ``extend``, or None for a batch that computes nothing (of an SGLang ScheduleBatch)."""
    mode = batch.forward_mode
    if mode.is_decode():
        return "decode"
    return "extend" if mode.is_extend() else None


def context_of(batch) -> int:
    """Sum of the lengths of a ScheduleBatch's sequences, the tokens of this step included."""
    lengths = batch.seq_lens_cpu
    return int(lengths.sum()) if lengths is not None else sum(req.seqlen for req in batch.reqs)


def register() -> None:
    """Hook the scheduler of this process, writing to the directory that ``PAT_STEP_LOG`` names."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    log: StepLog | None = None  # made on the first step: only schedulers that lead a replica write a file

    def run_batch(original, scheduler, batch, *args, **kwargs):
        nonlocal log
        from sglang.srt.runtime_context import get_parallel

        parallel, kind = get_parallel(), kind_of(batch)
        leads = kind is not None and parallel.tp_rank == 0
        if leads:
            if log is None:
                log = StepLog(Path(os.environ["PAT_STEP_LOG"]))
                atexit.register(log.file.flush)
            size = len(batch.reqs)
            new_tokens = size if kind == "decode" else batch.extend_num_tokens
            log.begin(parallel.dp_rank or 0, parallel.tp_size, kind, size, context_of(batch), new_tokens)
        elif log is not None:  # it led a replica in an earlier layout
            log.idle()
        return original(scheduler, batch, *args, **kwargs)

    def forward(original, *args, **kwargs):
        start_s = time.perf_counter()
        result = original(*args, **kwargs)
        if log is not None:
            log.add_forward(time.perf_counter() - start_s)
        return result

    def after_result(_result, _scheduler, batch, *args, **kwargs):
        if log is not None and kind_of(batch) is not None:
            log.end()

    def before_idle(*args, **kwargs):
        if log is not None:
            log.idle()

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.run_batch", run_batch, HookType.AROUND)
    HookRegistry.register(f"{scheduler}.process_batch_result", after_result, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.on_idle", before_idle, HookType.BEFORE)  # it may sleep
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", forward, HookType.AROUND)


def read_steps(directory: Path, start_s: float = 0.0, end_s: float = float("inf"), wait_s: float = 5.0) -> pd.DataFrame:
    """Steps complete in ``start_s .. end_s`` (time.time()), in order of time.

    Columns: ``step`` (number in its replica, from 0), then those of the file; ``time_s`` counts from ``start_s``.
    Waits until every file ends in an ``idle`` mark; TimeoutError after ``wait_s``.
    """
    import pandas as pd  # for readers only: a scheduler does without

    deadline_s = time.monotonic() + wait_s
    while busy := [path for path in Path(directory).glob("steps-*.csv") if not complete(path)]:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"step log: {busy[0]} is still being written after {wait_s} s; is the engine busy?")
        time.sleep(0.005)
    frames = [pd.read_csv(path) for path in sorted(Path(directory).glob("steps-*.csv"))]
    steps = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(COLUMNS))
    steps = steps[steps.kind.isin(["decode", "extend"]) & steps.time_s.between(start_s, end_s)]
    steps = steps.sort_values("time_s", kind="stable").reset_index(drop=True)
    steps.insert(0, "step", steps.groupby("replica").cumcount())
    return steps.assign(time_s=steps.time_s - start_s)


def complete(path: Path) -> bool:
    """Whether a log holds only its heading or ends in an ``idle`` mark."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 200))
        lines = file.read().splitlines()
    return bool(lines) and (b",idle," in lines[-1] or lines[-1].startswith(b"time_s"))
