"""Two layouts side by side for a whole rollout: a few wide replicas for the "
"longest sequences, narrow ones for the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bench.backends.simulated.rollout import System, simulate
from bench.workloads.trace import LengthTrace
from pat.layout import Layout
from pat.policy import StaticPolicy


@dataclass(frozen=True, slots=True)
class Mix:
    """``wide`` replicas for the sequences expected to be the longest, ``narrow`` ones for the others."""

    wide: Layout
    narrow: Layout

    def __str__(self) -> str:
        return f"TP{self.wide.tp} x {self.wide.dp} + TP{self.narrow.tp} x {self.narrow.dp}"


def mixes(world: int, node: int, tps: tuple[int, ...]) -> list[Mix]:
    """Every division of each node into two halves of different TP, the TP of both among ``tps``."""
    half, nodes = node // 2, world // node
    pairs = [(a, b) for a in tps for b in tps if a > b and half % a == 0]
    return [Mix(Layout(a, half // a * nodes), Layout(b, half // b * nodes)) for a, b in pairs]


def mixed_s(
    system: System, capacity_tokens: dict[int, int], mix: Mix, trace: LengthTrace, estimate: np.ndarray, count: int, cap
) -> float:
    """Seconds of a rollout in which the ``count`` sequences of greatest ``estimate`` [N] run in the wide replicas.

    capacity_tokens: KV tokens of a replica by TP. The halves do not help each other.
    """
    order = np.argsort(-estimate, kind="stable")
    times = [0.0]
    for layout, ids in ((mix.wide, order[:count]), (mix.narrow, order[count:])):
        if len(ids):
            part = replace(system, capacity_tokens={layout: capacity_tokens[layout.tp]})
            rollout = simulate(part, StaticPolicy(layout), trace.prompt_tokens[ids], trace.response_tokens[ids], cap)
            times.append(rollout.rollout_s)
    return max(times)


def best_count(sizes: np.ndarray, seconds) -> int:
    """The count of ``sizes`` [k] for which ``seconds(count)`` is least."""
    return int(min(sizes, key=lambda count: seconds(int(count))))
