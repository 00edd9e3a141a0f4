"""Step profiles measured on the running engine: few rollouts, their steps timed inside the scheduler."""

from __future__ import annotations

import numpy as np
import pandas as pd

from bench.backends.adaptive_engine import REPORT_STEPS, AdaptiveRollouts
from pat.layout import Layout
from pat.policy import StaticPolicy
from pat.profile import StepProfile, TpGrid

STEPS_PER_BATCH = 6
FEWEST = 3
"""Steps of a batch below which it is left out."""
QUARTILE = 0.25


def falling_lengths(sequences: int) -> list[int]:
    """Response lengths with which the running batch falls through 3/4, 1/2, 3/8, ... of ``sequences`` to one, some
    steps at each."""
    batches, batch = [], float(sequences)
    while batch >= 1:
        batches += [int(batch), int(batch * 0.75)]
        batch /= 2
    levels = sorted({b for b in batches if b >= 1}, reverse=True)
    lengths, steps = [], 0
    for batch, after in zip(levels, [*levels[1:], 0], strict=True):
        steps += STEPS_PER_BATCH
        lengths += [1 + steps] * (batch - after)
    return lengths


def grid_of(tp: int, steps: pd.DataFrame, max_context_tokens: int) -> TpGrid:
    """The grid of one TP degree from logged steps (columns kind, batch, context_tokens, new_tokens, latency_s).

    Each batch gets a robust line over the context that does not fall; then no batch is faster than a smaller one.
    Prefill: such a line over the new tokens. ValueError where there are no decode steps.
    """
    decode = steps[steps.kind == "decode"].assign(context=lambda d: d.context_tokens / d.batch)
    contexts = np.array([1, max_context_tokens])
    rows = {}
    for batch, mine in decode.groupby("batch"):
        if len(mine) >= FEWEST:
            near, far = np.percentile(mine.context, [25, 75])
            rows[int(batch)] = line(mine.context.to_numpy(), mine.latency_s.to_numpy(), contexts, far - near > 8)
    if not rows:
        raise ValueError(f"live profile: no decode steps of TP{tp} were logged")
    batches = np.array(sorted(rows))
    decode_s = np.maximum.accumulate(np.array([rows[b] for b in batches]), axis=0)
    extend = steps[steps.kind == "extend"]
    tokens = np.array([1, max(2, int(extend.new_tokens.max()))])
    prefill_s = line(extend.new_tokens.to_numpy(float), extend.latency_s.to_numpy(), tokens, len(extend) > 2)
    return TpGrid(
        tp, batches, contexts, decode_s, tokens, prefill_s, (), 0.0, int(batches[-1]), int(decode.context.max())
    )


def line(x: np.ndarray, y: np.ndarray, at: np.ndarray, sloped: bool) -> np.ndarray:
    """Robust line through (x, y) at ``at``, by the lower quartiles of the lower and the upper half of x; flat unless
    ``sloped`` and rising. Quartiles, since other load on the machine only ever makes steps longer."""
    upper = x > np.median(x)
    if not sloped or not upper.any():
        return np.full(len(at), np.quantile(y, QUARTILE))
    x1, x2 = np.quantile(x[~upper], QUARTILE), np.quantile(x[upper], QUARTILE)
    y1, y2 = np.quantile(y[~upper], QUARTILE), np.quantile(y[upper], QUARTILE)
    slope = max(0.0, (y2 - y1) / (x2 - x1))
    centre = np.quantile(y, QUARTILE) - slope * np.quantile(x, QUARTILE)
    return np.maximum(centre + slope * at, 1e-6)


def measure(engine: AdaptiveRollouts, model: str, sequences: int, max_context_tokens: int, prompt: int) -> StepProfile:
    """Profile every layout of a running engine: two rollouts each, with prompts of ``prompt`` tokens and shorter ones.

    The times are those of whole scheduler steps, so the host term is in them. ``sequences`` of the whole rollout.
    """
    grids = {}
    for layout in engine.layouts:
        engine.policy = StaticPolicy(layout, REPORT_STEPS)
        logged = [run(engine, layout, sequences, tokens) for tokens in (max(4, prompt // 8), prompt)]
        grids[layout.tp] = grid_of(layout.tp, pd.concat(logged), max_context_tokens)
    return StepProfile(model, engine.arguments["device"], grids, provenance={"tier": "measured", "source": "step log"})


def run(engine: AdaptiveRollouts, layout: Layout, sequences: int, prompt: int) -> pd.DataFrame:
    """Steps of one rollout in which every replica's batch falls from its share of ``sequences`` to one."""
    lengths = [n for n in falling_lengths(-(-sequences // layout.dp)) for _ in range(layout.dp)]
    prompts = [[3 + (17 * i + 7 * j + i * j) % 240 for j in range(prompt)] for i in range(len(lengths))]
    return engine.rollout(prompts, lengths).steps
