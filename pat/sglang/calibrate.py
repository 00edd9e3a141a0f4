"""Measures on a running engine what the choice between migrating and recomputing KV cache is made by."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import nnls

from pat.layout import Layout
from pat.reshard.kv import KvCosts
from pat.sglang.record import SwitchRecord

if TYPE_CHECKING:
    from pat.sglang.engine import AdaptiveEngine

RESPONSE_TOKENS = 256
"""Of a response that switches interrupt. SGLang sets KV room aside for it: a longer one could have to wait."""
Shapes = tuple[tuple[int, int], ...]
SHAPES: Shapes = ((1, 64), (4, 32), (4, 192))
"""(sequences in flight, tokens of each prompt)."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A switch with sequences in flight, and the seconds from its end until all of them had their next token."""

    record: SwitchRecord
    resumed_s: float

    @property
    def measured_s(self) -> float:
        """What the prediction is to be compared with: of the migration if there was one, else of the recomputation."""
        return self.record.kv_s if self.record.migrated else self.resumed_s

    @property
    def predicted_s(self) -> float:
        return self.record.predicted_migrate_s if self.record.migrated else self.record.predicted_recompute_s


def fit_costs(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """[K] rates, none below zero, of the least squares of relative errors: seconds [N] ~ terms [N, K] @ rates."""
    terms, seconds = np.asarray(terms, dtype=float), np.asarray(seconds, dtype=float)
    weighted = terms / seconds[:, None]
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-300)
    return (nnls(weighted / scale, np.ones(len(seconds)))[0] / scale).tolist()


def fitted(costs: KvCosts, trials: Sequence[Trial]) -> KvCosts:
    """``costs`` with the rates of migration, and of recomputation, as trials towards one layout have turned out.

    Rates of which there is no trial are left as they are.
    """
    migrations = [t for t in trials if t.record.migrated]
    recomputations = [t for t in trials if not t.record.migrated and t.record.recomputed]
    if migrations:
        terms = [(1, *t.record.migrated_most) for t in migrations]
        exchange_s, sequence_s, byte_s = fit_costs(terms, [t.measured_s for t in migrations])
        costs = replace(costs, exchange_s=exchange_s, sequence_s=sequence_s, bytes_per_s=1.0 / max(byte_s, 1e-15))
    if recomputations:
        terms = [(1, *t.record.recomputed_most) for t in recomputations]
        fixed_s, sequence_s, token_s = fit_costs(terms, [t.measured_s for t in recomputations])
        costs = replace(
            costs,
            prefill_fixed_s=fixed_s,
            prefill_sequence_s=sequence_s,
            prefill_token_s=token_s,
            prefill_token2_s=0.0,
        )
    return costs


async def measure_costs(
    engine: AdaptiveEngine, shapes: Shapes = SHAPES, rounds: int = 2, recompute: bool = True
) -> dict[Layout, KvCosts]:
    """Measured rates of switches to each of the engine's layouts; its switches are real.

    The sequences of each of ``shapes``, and 256 more tokens each, must fit the KV pools together. ``recompute``: of
    recomputation too. Run it in the engine's loop, on an idle engine; the layout is the lowest afterwards. Sets
    nothing: assign the result to ``engine.costs``.
    """
    round_trip = [*engine.settings.layouts[1:], engine.settings.layouts[0]]
    kinds = ["migrate"] * (rounds + 1) + ["recompute"] * (rounds if recompute else 0)
    trials: list[Trial] = []
    for sequences, tokens in shapes:
        found = await run_trials(engine, sequences, tokens, [(a, kv) for kv in kinds for a in round_trip])
        trials += found[len(round_trip) :]  # the first round maps memory
    return {a: fitted(engine.costs[a], [t for t in trials if t.record.new == a]) for a in engine.settings.layouts}


async def run_trials(
    engine: AdaptiveEngine, sequences: int, tokens: int, ways: Sequence[tuple[Layout, str]]
) -> list[Trial]:
    """Switch to each (layout, KV mode) in turn, from the lowest, with prompts of ``tokens`` tokens in flight."""
    if engine.layout != engine.settings.layouts[0]:
        await engine.async_switch(engine.settings.layouts[0])
    streams = [Stream(engine, tokens) for _ in range(sequences)]
    trials = []
    try:
        await asyncio.gather(*(stream.grown(2) for stream in streams))
        for layout, kv in ways:
            record = await engine.async_switch(layout, kv=kv)
            start_s = time.perf_counter()
            await asyncio.gather(*(stream.grown(1) for stream in streams))
            trials.append(Trial(record, time.perf_counter() - start_s))
    finally:
        engine.abort(all_requests=True)
        await asyncio.gather(*(stream.task for stream in streams))
    return trials


class Stream:
    """A request whose tokens are watched as they come. No two prompts share a prefix, so nothing is in a cache."""

    numbers = itertools.count()

    def __init__(self, engine: AdaptiveEngine, tokens: int) -> None:
        number = next(self.numbers)
        self.engine = engine
        self.prompt = [3 + (17 * number + 7 * i + i * i * (number + 1)) % 240 for i in range(tokens)]
        self.count, self.over, self.news = 0, False, asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": RESPONSE_TOKENS}
        request = {"input_ids": self.prompt, "sampling_params": sampling, "stream": True}
        try:
            async for chunk in await self.engine.async_generate(**request):
                self.count = len(chunk["output_ids"])
                self.news.set()
        finally:
            self.over = True
            self.news.set()

    async def grown(self, tokens: int) -> None:
        """Wait until there are so many tokens more than now; a response that has ended, or failed, counts as grown."""
        wanted = self.count + tokens
        while self.count < wanted and not self.over:
            self.news.clear()
            await self.news.wait()
