"""The sampling step at the end of a decode step, which kernel tables leave out."""

from __future__ import annotations

import numpy as np

LOGIT_BYTES = 4
PASSES = 15.5
"""Reads and writes of the whole [batch, vocab] float32 matrix when SGLang 0.5.23 samples at temperature 1, top-p 1:
cast from bf16 1.5, temperature 2, softmax 3, its copy 2, Gumbel-max, its default (noise 1, clamp 2, quotient 3,
argmax 1). Counted in its code, not measured."""
KERNELS = 8
KERNEL_S = 3e-6
"""Least time of a small kernel (aiconfigurator's ``mem_empirical_constant_latency``)."""


def sampling_s(batch: np.ndarray, vocab: int, bytes_per_s: float) -> np.ndarray:
    """Device seconds to sample ``batch`` [N] tokens: KERNELS x KERNEL_S + PASSES x batch x vocab x 4 / bytes_per_s.

    Every TP rank samples all sequences of its replica.
    """
    return KERNELS * KERNEL_S + PASSES * LOGIT_BYTES * np.asarray(batch) * vocab / bytes_per_s
