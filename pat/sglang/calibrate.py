"""Measures on a running engine what the choice between migrating and recomputing KV cache is made by."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pat.layout import Layout
from pat.reshard.kv import KvCosts
from pat.sglang.record import SwitchRecord

if TYPE_CHECKING:
    from pat.sglang.engine import AdaptiveEngine

SMALLEST_S = 1e-9
RESPONSE_TOKENS = 256
"""Of a response that two switches interrupt. SGLang sets KV room aside for it: a longer one could have to wait."""


def fit_line(at: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """(value at 0, slope) of the least-squares line of relative errors through points, neither below zero."""
    at, values = np.asarray(at, dtype=float), np.asarray(values, dtype=float)
    weights = 1.0 / np.maximum(values, SMALLEST_S)
    slope, fixed = np.polyfit(at, values, 1, w=weights)
    if slope < 0:
        return float(np.average(values, weights=weights**2)), 0.0
    if fixed < 0:
        return 0.0, float(np.sum(weights**2 * at * values) / np.sum((weights * at) ** 2))
    return float(fixed), float(slope)


def busiest_bytes(record: SwitchRecord, costs: KvCosts) -> float:
    """KV bytes of the busiest replica's ranks in a switch that was predicted by ``costs``."""
    return max(0.0, record.predicted_migrate_s - costs.exchange_s) * costs.bytes_per_s


def fit_migration(records: Sequence[SwitchRecord], costs: KvCosts) -> KvCosts:
    """``costs`` with the rates of migration as ``records``, predicted by ``costs``, have turned out.

    ValueError unless they are switches of at least two different sizes.
    """
    sizes = [busiest_bytes(record, costs) for record in records if record.migrated]
    if len(set(sizes)) < 2:
        raise ValueError("fit of migration: records of at least two sizes are needed")
    fixed_s, byte_s = fit_line(sizes, [record.kv_s for record in records if record.migrated])
    return replace(costs, exchange_s=fixed_s, bytes_per_s=1.0 / max(byte_s, 1e-15))


async def measure_costs(
    engine: AdaptiveEngine, prompt_tokens: Sequence[int] = (64, 256, 512), sequences: int = 4, rounds: int = 3
) -> KvCosts:
    """Measured rates for switches between the engine's lowest and highest layout; its switches are real.

    ``sequences`` of each of ``prompt_tokens`` and 256 more must fit the KV pools together. Run it in the engine's loop,
    on an idle engine; the layout is the lowest afterwards. Sets nothing: assign the result to ``engine.costs``.
    """
    low, high = engine.settings.layouts[0], engine.settings.layouts[-1]
    fresh = itertools.count()
    records, sizes, seconds = [], [], []
    await _go(engine, high)
    for tokens in (*prompt_tokens, *prompt_tokens * rounds):
        start_s = time.perf_counter()
        await engine.async_generate(input_ids=_prompt(tokens, next(fresh)), sampling_params=_sampling(1))
        sizes.append(tokens)
        seconds.append(time.perf_counter() - start_s)
    skip = len(prompt_tokens)  # the first of each size warms up
    fixed_s, token_s = fit_line(sizes[skip:], seconds[skip:])
    for tokens in (*prompt_tokens, *prompt_tokens * rounds):
        await _go(engine, low)
        begun = [asyncio.Event() for _ in range(sequences)]
        tasks = [asyncio.create_task(_run(engine, _prompt(tokens, next(fresh)), event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        records += [await engine.async_switch(layout, kv="migrate") for layout in (high, low)]
        engine.abort(all_requests=True)
        await asyncio.gather(*tasks)
    costs = fit_migration(records[2 * skip :], engine.costs)
    return replace(costs, prefill_fixed_s=fixed_s, prefill_token_s=token_s, prefill_token2_s=0.0)


async def _go(engine: AdaptiveEngine, layout: Layout) -> None:
    if engine.layout != layout:
        await engine.async_switch(layout)


async def _run(engine: AdaptiveEngine, prompt: list[int], begun: asyncio.Event) -> None:
    """A response, until it is aborted; ``begun`` is set at its second token."""
    sampling = _sampling(RESPONSE_TOKENS)
    async for chunk in await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True):
        if len(chunk["output_ids"]) > 1:
            begun.set()


def _sampling(tokens: int) -> dict:
    return {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}


def _prompt(tokens: int, number: int) -> list[int]:
    """Prompts that share no prefix, so that nothing is found in a cache."""
    return [3 + (17 * number + 7 * i + i * i * (number + 1)) % 240 for i in range(tokens)]
