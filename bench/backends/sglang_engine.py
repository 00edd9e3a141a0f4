"""Backend of the measured tier: rollouts on a real SGLang engine in a static layout, lengths forced by a trace."""

from __future__ import annotations

import asyncio
import atexit
import importlib.util
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from pat.layout import Layout
from pat.model import ModelShape
from pat.sglang.step_log import read_steps

WATCH_S = 0.5
"""How often a rollout looks whether the engine's processes live."""

SETTLE_S = 0.3
"""After the leaders have said that caches are empty: their followers may still be at it."""


class EngineError(ValueError):
    """An engine cannot be started or a rollout cannot be run; the message says what to do."""


@dataclass(frozen=True, slots=True)
class EngineRollout:
    """What one rollout gave.

    seconds      from the first request's submission to the last one's answer
    output_ids   response tokens of each sequence, in the order of the prompts
    steps        one row a scheduler step, see :func:`pat.sglang.step_log.read_steps`; time_s from the submission
    """

    seconds: float
    output_ids: list[list[int]]
    steps: pd.DataFrame


def engine_arguments(
    model_path: str,
    layout: Layout,
    device: str = "cpu",
    *,
    sequences: int = 128,
    kv_tokens_per_rank: int | None = None,
    mem_fraction: float | None = None,
    seed: int = 0,
) -> dict:
    """Arguments of ``sgl.Engine`` for a static layout. ``device``: ``cpu`` or ``cuda``.

    sequences            of the whole rollout: a replica runs at most its share at once
    kv_tokens_per_rank   KV budget of one rank, counted in tokens of *all* heads; a replica of tp ranks caches tp times
                         as many, so every layout has the same memory. On CUDA None lets SGLang fill the GPU.
    """
    arguments = {
        "model_path": str(model_path),
        "device": device,
        "tp_size": layout.tp,
        "dp_size": layout.dp,
        "load_balance_method": "round_robin",
        "max_running_requests": -(-sequences // layout.dp),
        "random_seed": seed,
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "log_level": "error",
    }
    if kv_tokens_per_rank is not None:
        arguments["max_total_tokens"] = kv_tokens_per_rank * layout.tp
    if device == "cuda":
        return arguments | {"dtype": "bfloat16"} | ({"mem_fraction_static": mem_fraction} if mem_fraction else {})
    arguments.setdefault("max_total_tokens", 16_384 * layout.tp)
    return arguments | {
        "dtype": "float32",  # bfloat16 on a CPU is not exact between layouts
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
    }


def engine_environment(
    layout: Layout, device: str, log_directory: Path, *, shm_allreduce: bool = True, pin: bool = True
) -> dict[str, str]:
    """Environment variables of the engine's processes: SGLang's CPU mode, and the parts of PAT's plugin to turn on."""
    environment = {"PAT_STEP_LOG": str(log_directory), "PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}
    if device == "cuda":
        return environment
    cores = os.cpu_count() or 1
    return environment | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(rank % cores) for rank in range(layout.world)),
        "OMP_NUM_THREADS": "1",
        "PAT_SHM_ALLREDUCE": "1" if shm_allreduce else "",
        "PAT_PIN": "1" if pin else "",
    }


def check_launch(model_path: str, layout: Layout, device: str) -> None:
    """EngineError, with a remedy, where an engine of this layout could not start."""
    if importlib.util.find_spec("sglang") is None:
        raise EngineError("sglang is not installed; run through tox, or `python bench/install.py VENV`")
    local = Path(model_path).is_dir()
    if not local and (device == "cpu" or Path(model_path).is_absolute() or str(model_path).startswith(".")):
        raise EngineError(f"no model directory at {model_path}; give one, or a preset of bench.tiny_models")
    if local:
        shape = ModelShape.load(Path(model_path))
        try:
            shape.check_tp(layout.tp)
        except ValueError as error:
            raise EngineError(f"{error}; choose a TP that divides the heads") from None


class StaticEngine:
    """A running engine, as a context manager: its processes are gone when the block is left, whatever happened.

    ``arguments`` and ``environment`` as from :func:`engine_arguments` and :func:`engine_environment`; the environment
    must have PAT_STEP_LOG. Of the main thread only (SGLang installs signal handlers).
    """

    def __init__(self, layout: Layout, arguments: dict, environment: dict[str, str]) -> None:
        check_launch(arguments["model_path"], layout, arguments["device"])
        self.layout, self.arguments, self.environment = layout, arguments, environment
        self.log_directory = Path(environment["PAT_STEP_LOG"])
        self.engine, self.loop, self.processes, self.saved = None, None, [], {}
        self.temperature = 0.0

    @classmethod
    def of(cls, model_path: str | Path, layout: Layout, device: str = "cpu", *, plain: bool = False, **sizes):
        """An engine with its step log in a directory of its own; ``plain``: gloo, not pinned. ``sizes``: as
        :func:`engine_arguments`."""
        log = Path(tempfile.mkdtemp(prefix="pat-steps-"))
        atexit.register(shutil.rmtree, log, ignore_errors=True)
        environment = engine_environment(layout, device, log, shm_allreduce=not plain, pin=not plain)
        return cls(layout, engine_arguments(str(model_path), layout, device, **sizes), environment)

    def __enter__(self) -> StaticEngine:
        self.start()
        return self

    def __exit__(self, *_exception) -> None:
        self.stop()

    def start(self) -> None:
        """Launch, then a short rollout that is discarded: the first steps compile kernels, for seconds."""
        self.saved = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        quiet_resource_tracker()
        before = child_processes()
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        try:
            with warnings.catch_warnings(action="ignore"):
                import sglang

            logging.getLogger("sglang.srt.entrypoints.engine").addFilter(not_of_sigquit)
            self.engine = sglang.Engine(**self.arguments, custom_sigquit_handler=fail_launch)
            atexit.unregister(self.engine.shutdown)  # it kills every child of this process, also those not its own
            atexit.register(self.stop)
            manager = self.engine.tokenizer_manager
            manager.signal_handler_class = lambda manager: Signals(self)
            self.max_tokens = min(manager.model_config.context_len, self.arguments.get("max_total_tokens", 1 << 60))
            self.processes = [process for process in child_processes() if process not in before]
            self.rollout([[5 + i, 6, 7, 8] for i in range(2 * self.layout.dp)], [6] * (2 * self.layout.dp))
        except BaseException as error:
            self.processes = [process for process in child_processes() if process not in before]
            self.stop()
            if isinstance(error, (EngineError, KeyboardInterrupt)):
                raise
            raise EngineError(f"the engine {self.layout} did not start: {error!r}; see the messages above") from error

    def stop(self) -> None:
        """End the engine's processes and restore the environment; harmless when called again."""
        if self.engine is not None:
            watchdog = getattr(self.engine.tokenizer_manager, "_subprocess_watchdog", None)
            if watchdog is not None:
                watchdog.stop()
            if self.engine.send_to_rpc is not None:
                self.engine.send_to_rpc.close(linger=0)
            self.engine = None
        end_processes(self.processes)
        self.processes = []
        if self.loop is not None:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
            self.loop.close()
            self.loop = None
        for name, value in self.saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.saved = {}
        atexit.unregister(self.stop)

    def rollout(
        self,
        prompts: list[list[int]],
        response_tokens: list[int],
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> EngineRollout:
        """Generate ``response_tokens[i]`` tokens after ``prompts[i]``, all submitted at once; sequence i goes to
        replica i mod dp. Caches are emptied before. ``progress(done, total)`` is called as sequences finish.

        EngineError where a sequence cannot fit, or a process of the engine ends.
        """
        for i, (prompt, new) in enumerate(zip(prompts, response_tokens, strict=True)):
            if not prompt or new < 1 or len(prompt) + new + 2 > self.max_tokens:
                raise EngineError(
                    f"sequence {i}: a prompt of {len(prompt)} and {new} response tokens do not fit "
                    f"{self.max_tokens} tokens; raise kv_tokens_per_rank or shorten the trace"
                )
        parameters = [
            {"temperature": self.temperature, "max_new_tokens": new, "ignore_eos": True}
            | ({"sampling_seed": seed + i} if self.temperature else {})
            for i, new in enumerate(response_tokens)
        ]
        return self.loop.run_until_complete(self._rollout(prompts, parameters, progress))

    async def _rollout(self, prompts, parameters, progress) -> EngineRollout:
        self.died = self.loop.create_future()
        watch = self.loop.create_task(self._watch())
        outputs: list[list[int]] = [[] for _ in prompts]
        done = 0

        async def one(i: int) -> None:
            nonlocal done
            replica = i % self.layout.dp if self.layout.dp > 1 else None
            answer = await self.engine.async_generate(
                input_ids=prompts[i], sampling_params=parameters[i], routed_dp_rank=replica
            )
            outputs[i] = list(answer["output_ids"])
            done += 1
            if progress:
                progress(done, len(prompts))

        async def every() -> tuple[float, float, float]:
            await self.engine.tokenizer_manager.flush_cache()
            await asyncio.sleep(SETTLE_S)
            begin_s, begin = time.time(), time.perf_counter()
            await asyncio.gather(*(one(i) for i in range(len(prompts))))
            return begin_s, time.time(), time.perf_counter() - begin

        work = self.loop.create_task(every())
        try:
            await asyncio.wait([work, self.died], return_when=asyncio.FIRST_COMPLETED)
            if self.died.done():
                raise EngineError(self.died.result())
            begin_s, end_s, seconds = work.result()
        finally:
            work.cancel()
            watch.cancel()
            self.died.cancel()
        wrong = [i for i, p in enumerate(parameters) if len(outputs[i]) != p["max_new_tokens"]]
        if wrong:
            raise EngineError(f"sequence {wrong[0]} ended after {len(outputs[wrong[0]])} tokens, before its trace says")
        return EngineRollout(seconds, outputs, read_steps(self.log_directory, begin_s, end_s + 1.0))

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            gone = [process for process in self.processes if not lives(process)]
            if gone:
                self.fail(f"process {gone[0].pid} of the engine {self.layout} ended; see the messages above")

    def fail(self, why: str) -> None:
        """Make the rollout in progress end with an EngineError."""
        if not self.died.done():
            self.died.set_result(why)


class Signals:
    """SGLang's handlers of SIGTERM and SIGQUIT while it runs; its own would kill this process and all its children."""

    def __init__(self, owner: StaticEngine) -> None:
        self.owner = owner

    def sigterm_handler(self, *_signal) -> None:
        self.owner.fail("SIGTERM")

    def running_phase_sigquit_handler(self, *_signal) -> None:
        self.owner.fail(f"a process of the engine {self.owner.layout} failed; see the messages above")


def not_of_sigquit(record: logging.LogRecord) -> bool:
    """Log filter: SGLang announces a custom handler of SIGQUIT as an error."""
    return "custom SIGQUIT" not in record.getMessage()


def fail_launch(*_signal) -> None:
    raise EngineError("a process of the engine failed while it started; see the messages above")


def child_processes() -> list:
    import psutil

    return psutil.Process().children(recursive=True)


def lives(process) -> bool:
    import psutil

    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def end_processes(processes: list) -> None:
    """Kill them and wait until they are gone."""
    import psutil

    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=20)


def quiet_resource_tracker() -> None:
    """Start Python's resource tracker without its stderr: at exit it reports SGLang's segments, which are in order."""
    from multiprocessing import resource_tracker

    if getattr(resource_tracker._resource_tracker, "_pid", None) is not None:
        return
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        resource_tracker.ensure_running()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
