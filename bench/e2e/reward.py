"""Verifiable reward for VeRL's ``custom_reward_function``: 1 where math-verify finds the answer right, else 0.

VeRL loads this file by its path, in processes of its own: it imports nothing of this project.
"""

from __future__ import annotations

import logging

LAST_CHARACTERS = 512
"""Of a response, looked at: the final answer stands at the end, and parsing is slow on long noise."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_options) -> dict[str, float]:
    """VeRL's signature. A response that the checker fails on scores 0 and counts in ``reward_failed``; nothing is
    raised, so that one odd response does not end an iteration."""
    try:
        right, failed = answered(str(solution_str), str(ground_truth)), 0.0
    except Exception as error:
        print(f"reward: {type(error).__name__} on a response of {len(str(solution_str))} characters; it scores 0")
        right, failed = False, 1.0
    return {"score": float(right), "acc": float(right), "reward_failed": failed}


def answered(solution: str, truth: str) -> bool:
    """Whether the last boxed answer of ``solution`` equals ``truth``. No timeouts: they need signals, which only a
    main thread has, and VeRL scores in others."""
    if "\\boxed" not in solution[-LAST_CHARACTERS:]:
        return False
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of each call without a timeout
    found = parse(solution[-LAST_CHARACTERS:], parsing_timeout=None)
    return bool(found) and bool(verify(parse(f"${truth}$", parsing_timeout=None), found, timeout_seconds=None))
