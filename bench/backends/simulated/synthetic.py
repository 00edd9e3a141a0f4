"""A machine in closed form: step times by formula, for tests and micro-benchmarks that must not need a profile."""

from __future__ import annotations

import numpy as np

from bench.backends.simulated.rollout import System
from pat.host import NO_HOST, HostTerm
from pat.layout import Layout
from pat.links import Links
from pat.model import ModelShape
from pat.planner import Planner
from pat.profile import StepProfile, TpGrid
from pat.switch_cost import SwitchModel, SwitchParts

LLAMA_8B = ModelShape("LLaMA3.1-8B", "LlamaForCausalLM", 32, 4096, 14336, 32, 8, 128, 128256)
NVLINK = Links(200e9, 25e9, 1e-5, 1e12)
SEATS = SwitchParts("seats", 0.03, 0.0, 0.0, 0.0, 0.02)
CONTEXTS_TOKENS = np.array([0, 1024, 4096, 16384, 32768])
BATCHES = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024])


def constant_profile(
    step_s: dict[int, float], prefill_token_s: float = 0.0, prefill_fixed_s: float = 0.0, host: HostTerm = NO_HOST
) -> StepProfile:
    """A decode step takes ``step_s[tp]`` whatever the batch and context; n prefill tokens: fixed + n * token."""
    grids = {
        tp: formula_grid(tp, lambda b, c, s=s: s + 0 * b * c, prefill_token_s, prefill_fixed_s)
        for tp, s in step_s.items()
    }
    return StepProfile("constant", "none", grids, host)


def roofline_profile(tps: tuple[int, ...] = (1, 2, 4, 8), host: HostTerm = NO_HOST) -> StepProfile:
    """About LLaMA3.1-8B on one H100 node: weights and KV cache read at 2.6 TB/s a GPU, 9 us an all-reduce hop."""

    def step_s(tp: int):
        all_reduce_s = 64 * 9e-6 * np.log2(tp)
        return lambda b, c: (16e9 + 131072 * b * c) / (2.6e12 * tp) + all_reduce_s + 2e-5 * b / tp

    grids = {tp: formula_grid(tp, step_s(tp), 2.5e-5 / tp, 2e-3) for tp in tps}
    return StepProfile("LLaMA3.1-8B", "roofline", grids, host)


def formula_grid(tp: int, step_s, prefill_token_s: float, prefill_fixed_s: float) -> TpGrid:
    """The grid of ``step_s(batch, context)``, exact wherever that is linear between the knots."""
    decode_s = step_s(BATCHES[:, None], CONTEXTS_TOKENS[None, :]) * np.ones((len(BATCHES), len(CONTEXTS_TOKENS)))
    tokens = np.array([0, 1 << 15])
    return TpGrid(tp, BATCHES, CONTEXTS_TOKENS, decode_s, tokens, prefill_fixed_s + prefill_token_s * tokens)


def make_system(
    profile: StepProfile,
    capacity_tokens: dict[Layout, int],
    parts: SwitchParts = SEATS,
    links: Links = NVLINK,
    node: int = 8,
    kv: str = "cheaper",
    **options,
) -> tuple[System, Planner]:
    """A system and the planner for it, over the layouts that ``capacity_tokens`` names."""
    switches = SwitchModel(LLAMA_8B, profile, links, parts, node, kv)
    system = System(profile, switches, capacity_tokens, **options)
    return system, Planner(profile, switches, tuple(capacity_tokens), capacity_tokens)
