"""PAT: adaptive tensor parallelism for the rollout phase of synchronous RLHF.

The library under study. It imports nothing from ``bench`` or ``baselines``.
"""
