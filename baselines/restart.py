"""Naive reconfiguration: stop the engine, start it in the new layout, prefill prompts and what was generated again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pat.layout import Layout


@dataclass(frozen=True, slots=True)
class RestartRecord:
    """What a restart cost.

    stop_s     aborting the running requests and ending the processes
    start_s    from there until the new engine is ready: processes, imports, communicators, weights from disk, graphs
    prefill_s  from there until every request has its next token
    """

    old: Layout
    new: Layout
    stop_s: float
    start_s: float
    prefill_s: float
    requests: int
    tokens: int

    @property
    def total_s(self) -> float:
        return self.stop_s + self.start_s + self.prefill_s


@dataclass
class Response:
    """A request's prompt and the tokens it has so far, of ``wanted``."""

    prompt: list[int]
    wanted: int
    generated: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.generated) >= self.wanted


def rollout_with_restart(
    start: Callable[[Layout], Any],
    old: Layout,
    new: Layout,
    prompts: list[list[int]],
    response_tokens: list[int],
    restart_after_tokens: int,
) -> tuple[list[list[int]], RestartRecord]:
    """Generate greedily in ``old`` until that many tokens exist in all, restart in ``new``, and finish there.

    ``start`` gives a ready :class:`pat.sglang.engine.AdaptiveEngine` of one layout. Returns the responses and the
    record. Call it outside of any event loop.
    """
    responses = [Response(prompt, wanted) for prompt, wanted in zip(prompts, response_tokens, strict=True)]
    engine = start(old)
    try:
        begin_s = engine.loop.run_until_complete(_generate(engine, responses, stop_after=restart_after_tokens))
    finally:
        engine.shutdown()
    stopped_s = time.monotonic()
    engine = start(new)
    try:
        ready_s = time.monotonic()
        alive = [response for response in responses if not response.done]
        tokens = sum(len(response.prompt) + len(response.generated) for response in alive)
        resumed_s = engine.loop.run_until_complete(_generate(engine, alive))
    finally:
        engine.shutdown()
    record = RestartRecord(old, new, stopped_s - begin_s, ready_s - stopped_s, resumed_s - ready_s, len(alive), tokens)
    return [response.generated for response in responses], record


async def _generate(engine: Any, responses: list[Response], stop_after: int | None = None) -> float:
    """Extend all responses to the end, or until ``stop_after`` tokens exist in all; then the rest is aborted.

    Returns the time (monotonic) of that moment; without ``stop_after``, of the last response's first new token.
    """
    moment_s = time.monotonic()

    async def one(response: Response) -> None:
        nonlocal moment_s
        before = list(response.generated)
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": response.wanted - len(before)}
        chunks = await engine.async_generate(input_ids=response.prompt + before, sampling_params=sampling, stream=True)
        async for chunk in chunks:
            first = len(response.generated) == len(before)
            response.generated = before + list(chunk["output_ids"])
            if stop_after is None and first:
                moment_s = time.monotonic()
            elif (
                stop_after is not None
                and not stopped.is_set()
                and sum(len(r.generated) for r in responses) >= stop_after
            ):
                moment_s = time.monotonic()
                stopped.set()
                engine.abort(all_requests=True)

    stopped = asyncio.Event()
    await asyncio.gather(*(one(response) for response in responses))
    return moment_s
