"""What the end-to-end records say, as sentences of results/e2e.md."""

from __future__ import annotations

import numpy as np

from bench.report.e2e_launches import TRAINING, Launches, own_percent, reduction, series, stayed_as


def sentences(one: Launches) -> list[str]:
    """What a reader asks first, from the records."""
    name, found = one.experiment.name, []
    for arm in (arm for arm in one.arms if arm not in one.statics):
        if one.best_static is not None:
            found.append(
                f"{name}: {arm} takes {reduction(one, arm, one.best_static, 'step')} less time an iteration than the "
                f"best static layout ({one.best_static}), {reduction(one, arm, one.best_static, 'gen')} in generation "
                f"({reduction(one, arm, one.best_static, *TRAINING)} in training, which is the machine alone)."
            )
        if (own := own_percent(one, arm)) is not None:
            found.append(
                f"{name}: {arm}'s own work in a rollout (decisions, and reports of running sequences by the rank that "
                f"spends most on them) takes {own:.2f}% of an iteration."
            )
        if (same := stayed_as(one, arm)) is not None:
            found.append(
                f"{name}: {arm} stayed in the layout of {same} from the first step to the last, so that the difference "
                f"of {reduction(one, arm, same, 'gen')} in generation between the two is that of two launches alone: "
                "differences no larger prove nothing."
            )
    rewards = series(one.arms[next(iter(one.arms))], "critic/rewards/mean")[1]
    if third := len(rewards) // 3:
        found.append(
            f"{name}: mean reward is {np.mean(rewards[:third]):.3f} in the first {third} of {len(rewards)} iterations, "
            f"{np.mean(rewards[-third:]):.3f} in the last {third}."
        )
    return found
