"""Held-out points of the GPU grids: what the package answers where a grid has no knot, beside the grid's answer."""

from __future__ import annotations

import numpy as np
import pandas as pd

from bench.models import model_directory, model_shape
from bench.profiles import aiconfigurator, step_profile
from bench.profiles.grid import CONTEXTS_TOKENS, LARGEST_BATCH

POINTS = 300
"""Of each (model, GPU, TP)."""


def grid_errors(model: str, gpu: str) -> pd.DataFrame:
    """Columns model, gpu, tp, batch, context_tokens, exact_s, predicted_s: decode steps at random points
    between the knots, half with a CUDA graph and half with batches above the largest; logarithmic in both axes."""
    shape, profile, random = model_shape(model), step_profile(model, gpu, "none"), np.random.default_rng(0)
    frames = []
    for tp, grid in profile.grids.items():
        largest = max(grid.graph_batches)
        with_graph = random.choice(grid.graph_batches, POINTS // 2)
        above = np.exp(random.uniform(np.log(largest + 1), np.log(LARGEST_BATCH), POINTS // 2)).astype(int)
        batch = np.r_[with_graph, above]
        context = np.exp(random.uniform(0, np.log(CONTEXTS_TOKENS[-1]), len(batch))).astype(int)
        held_out = ~(np.isin(context, CONTEXTS_TOKENS) & np.isin(batch, grid.batches))
        batch, context = batch[held_out], context[held_out]
        engine = aiconfigurator.compile_engine(model_directory(model), gpu, tp)
        asked = zip(batch.tolist(), context.tolist(), strict=True)
        exact_s = 1e-3 * np.array([engine.predict_decode_latency(b, c, 2) for b, c in asked])
        exact_s += aiconfigurator.added_s(shape, gpu, tp, batch) + np.where(batch > largest, grid.eager_extra_s, 0.0)
        frames.append(
            pd.DataFrame(
                {
                    "model": model,
                    "gpu": gpu,
                    "tp": tp,
                    "batch": batch,
                    "context_tokens": context,
                    "exact_s": exact_s,
                    "predicted_s": profile.table(tp, LARGEST_BATCH).step_s(batch, context),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)
