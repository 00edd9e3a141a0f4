"""The plots of e2e.md."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from bench.report.plots import save


def phase_bars(phases: dict[str, dict[str, float]], names: tuple[str, ...], title: str, path: Path) -> None:
    """Stacked bars, one an arm: mean seconds of each phase."""
    figure, axis = plt.subplots(figsize=(7, 0.5 * len(phases) + 1.6), layout="constrained")
    for y, seconds in enumerate(phases.values()):
        left = 0.0
        for k, name in enumerate(names):
            axis.barh(y, seconds[name], left=left, color=f"C{k}", label=name if y == 0 else None)
            left += seconds[name]
    axis.set_yticks(range(len(phases)), list(phases), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("mean of an iteration, s")
    axis.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncol=4, fontsize=8)
    save(figure, path)


def reward_curves(rewards: dict[str, tuple[list[int], list[float]]], title: str, path: Path) -> None:
    """Mean reward by iteration, one line an arm; arms that agree lie on each other."""
    figure, axis = plt.subplots(figsize=(6, 2.8), layout="constrained")
    for k, (arm, (iterations, values)) in enumerate(rewards.items()):
        axis.plot(iterations[: len(values)], values, marker="osD^v"[k % 5], markersize=8 - 1.5 * k, label=arm)
    axis.set_xlabel("iteration")
    axis.set_ylabel("mean reward")
    axis.set_title(title, fontsize=10)
    axis.legend(fontsize=8)
    save(figure, path)
