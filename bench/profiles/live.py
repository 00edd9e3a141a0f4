"""Step profiles measured on a running engine: the rollouts of a plan, their steps timed inside the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from bench.backends.adaptive_engine import REPORT_STEPS, AdaptiveRollouts
from bench.profiles.plan import Visit, visits
from bench.profiles.samples import COLUMNS, Samples
from pat.layout import Layout
from pat.model import ModelShape
from pat.policy import StaticPolicy
from pat.reshard.kv import KvCosts
from pat.sglang.calibrate import RESPONSE_TOKENS, measure_costs
from pat.sglang.record import SwitchRecord

IDLE_ROUNDS = 4
"""Times that an idle engine goes through its layouts, up and down; the first is a warm-up."""
KV_SHAPES = ((1, 32), (4, 32), (4, 96))
"""Of the switches that the rates of KV migration are fitted to: (sequences in flight, prompt tokens)."""
SAMPLED_TEMPERATURE = 1.0


def measure(
    engine: AdaptiveRollouts,
    model: str,
    sequences: int,
    max_context_tokens: int,
    repeats: int = 1,
    thorough: bool = False,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Samples:
    """Profile every layout of a running engine, and its switches; ``progress`` is told of visits.

    ``sequences`` of a whole rollout. The times are those of whole scheduler steps. ``thorough``: see
    :func:`bench.profiles.plan.visits`.
    """
    plan = visits(engine.layouts, sequences, max_context_tokens, repeats, thorough)
    frames: list[pd.DataFrame] = []
    for number, visit in enumerate(plan, start=1):
        if (steps := run(engine, visit)) is not None:
            frames.append(steps)
        progress(number, len(plan))
    switches = tuple(record.as_row() for record in idle_switches(engine))
    costs = kv_costs(engine)
    steps = pd.concat(frames, ignore_index=True)
    shape, device = ModelShape.load(Path(engine.arguments["model_path"])), engine.arguments["device"]
    made = {"repeats": repeats, "thorough": thorough}
    return Samples(model, shape, device, sequences, max_context_tokens, steps, switches, costs, made)


def kv_costs(engine: AdaptiveRollouts) -> dict[Layout, KvCosts]:
    """Measured rates of moving KV cache by the layout to go to; the engine's own where its KV pools are too small."""
    most = max(sequences * (tokens + RESPONSE_TOKENS) for sequences, tokens in KV_SHAPES)
    if most > engine.arguments.get("max_total_tokens", 1 << 60):
        return engine.engine.costs
    return engine.loop.run_until_complete(measure_costs(engine.engine, KV_SHAPES, rounds=1, recompute=False))


def run(engine: AdaptiveRollouts, visit: Visit) -> pd.DataFrame | None:
    """Steps of one visit in the columns of :class:`Samples`; None where it warms up."""
    engine.policy = StaticPolicy(visit.layout, REPORT_STEPS)
    engine.temperature = SAMPLED_TEMPERATURE if visit.variant == "sampled" else 0.0
    engine.stream = visit.variant == "streamed"
    try:
        steps = engine.rollout(visit.prompts(), visit.response_tokens()).steps
    finally:
        engine.temperature, engine.stream = 0.0, False
    if visit.repeat == 0:
        return None
    of = {name: getattr(visit, name) for name in ("variant", "prompt_tokens", "repeat")}
    steps = steps.assign(layout=str(visit.layout), **of, context_tokens=steps.context_tokens / steps.batch)
    return steps[list(COLUMNS)]


def idle_switches(engine: AdaptiveRollouts) -> list[SwitchRecord]:
    """Switches with nothing in flight, to every other layout and back; the engine is in its lowest one before."""
    live, tour = engine.engine, [*engine.layouts[1:], *engine.layouts[-2::-1]]
    if live.layout != engine.layouts[0]:
        live.switch(engine.layouts[0])
    return [live.switch(layout) for _ in range(IDLE_ROUNDS) for layout in tour][len(tour) :]
