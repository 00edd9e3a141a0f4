"""The physical limit of a rollout: no layout policy can end before its longest sequence could, alone and at once."""

from __future__ import annotations

import numpy as np

from pat.profile import StepProfile


def physical_limit_s(profile: StepProfile, prompt_tokens: np.ndarray, response_tokens: np.ndarray) -> float:
    """Seconds of the slowest sequence [N], each alone in the fastest layout from its first token: its prefill, then
    one decode step for each further token."""
    limits = []
    for tp in profile.tps:
        decode_s = profile.table(tp, 1).run_s(1, prompt_tokens + 1, response_tokens - 1)
        limits.append(profile.prefill_s(tp, prompt_tokens) + decode_s)
    return float(np.min(limits, axis=0).max())
