"""Backend of the measured tier: rollouts on a real SGLang engine in a static layout, lengths forced by a trace."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from bench.backends.engine_arguments import EngineError, check_launch, engine_arguments, engine_environment
from bench.backends.processes import (
    child_processes,
    close_contexts,
    end_processes,
    lives,
    quiet_resource_tracker,
    socket_contexts,
)
from pat.layout import Layout
from pat.sglang import warm
from pat.sglang.step_log import read_steps

WATCH_S = 0.5
"""How often a rollout looks whether the engine's processes live."""

SETTLE_S = 0.3
"""After the leaders have said that caches are empty: their followers may still be at it."""


@dataclass(frozen=True, slots=True)
class EngineRollout:
    """What one rollout gave.

    seconds      from the first request's submission to the last one's answer
    output_ids   response tokens of each sequence, in the order of the prompts
    steps        one row a scheduler step, see :func:`pat.sglang.step_log.read_steps`; time_s from the submission
    switches     switches of the layout during it, each a :class:`pat.sglang.record.SwitchRecord`
    """

    seconds: float
    output_ids: list[list[int]]
    steps: pd.DataFrame
    switches: tuple = ()


class StaticEngine:
    """A running engine, as a context manager: its processes are gone when the block is left, whatever happened.

    ``arguments`` and ``environment`` as from :func:`engine_arguments` and :func:`engine_environment`; the environment
    must have PAT_STEP_LOG. Of the main thread only (SGLang installs signal handlers). Set between rollouts:
    ``temperature`` (0: greedy), ``stream`` (tokens are sent as they come, not at a response's end).
    """

    def __init__(self, layout: Layout, arguments: dict, environment: dict[str, str]) -> None:
        check_launch(arguments["model_path"], layout, arguments["device"])
        self.layout, self.arguments, self.environment = layout, arguments, environment
        self.log_directory = Path(environment["PAT_STEP_LOG"])
        self.engine, self.loop, self.processes, self.saved = None, None, [], {}
        self.kept_contexts: list = []
        self.temperature, self.stream = 0.0, False

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
        warm.start()
        before, self.kept_contexts = child_processes(), socket_contexts()
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        try:
            logging.getLogger("sglang.srt.entrypoints.engine").addFilter(not_of_sigquit)
            with warnings.catch_warnings(action="ignore"):
                self.engine = self._launch()
            atexit.unregister(self.engine.shutdown)  # it kills every child of this process, also those not its own
            atexit.register(self.stop)
            manager = self.engine.tokenizer_manager
            manager.signal_handler_class = lambda manager: Signals(self)
            self.max_tokens = min(manager.model_config.context_len, self.arguments.get("max_total_tokens", 1 << 60))
            self.processes = [process for process in child_processes() if process not in before]
            self._warm_up()
        except BaseException as error:
            self.processes = [process for process in child_processes() if process not in before]
            self.stop()
            if isinstance(error, (EngineError, KeyboardInterrupt)):
                raise
            raise EngineError(f"the engine {self.layout} did not start: {error!r}; see the messages above") from error

    def _launch(self):
        import sglang

        return sglang.Engine(**self.arguments, custom_sigquit_handler=fail_launch)

    def _warm_up(self) -> None:
        self.rollout([[5 + i, 6, 7, 8] for i in range(2 * self.layout.dp)], [6] * (2 * self.layout.dp))

    def stop(self) -> None:
        """End the engine's processes and restore the environment; harmless when called again."""
        if self.engine is not None:
            watchdog = getattr(self.engine.tokenizer_manager, "_subprocess_watchdog", None)
            if watchdog is not None:
                watchdog.stop()
            self.engine = None
        end_processes(self.processes)
        self.processes = []
        if self.loop is not None:
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=1))
            close_contexts([context for context in socket_contexts() if context not in self.kept_contexts])
            self.loop.close()
            asyncio.set_event_loop(None)  # the next engine of this process would take the closed one
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
                input_ids=prompts[i], sampling_params=parameters[i], routed_dp_rank=replica, stream=self.stream
            )
            if self.stream:
                answer = [chunk async for chunk in answer][-1]
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
