"""The policy of a rollout server, from its settings: static, by thresholds, or the planner's."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from pat.correction import Correction
from pat.layout import Layout
from pat.lengths import LengthModel
from pat.links import Links
from pat.model import ModelShape
from pat.planner import Planner
from pat.policy import AdaptivePolicy, Keep, LengthForesight, Policy, RolloutState, StaticPolicy, Switch
from pat.profile import StepProfile
from pat.reshard.kv import KvCosts
from pat.switch_cost import SwitchModel, SwitchParts
from pat.verl.settings import PatSettings


@dataclass(frozen=True)
class ThresholdPolicy:
    """Switches when fewer sequences than a threshold are alive: for tests, and for switches that must happen.

    ``thresholds``: [(alive, layout)], the lowest that holds counts.
    """

    start: Layout
    thresholds: tuple[tuple[int, Layout], ...]
    interval_steps: int = 4

    def first_layout(self, prompt_tokens: np.ndarray) -> Layout:
        return self.start

    def decide(self, state: RolloutState) -> Keep | Switch:
        alive = state.running + state.waiting
        for threshold, layout in sorted(self.thresholds):
            if alive < threshold:
                return Keep("below the threshold") if layout == state.layout else Switch(layout, 0.0, 0.0, "threshold")
        return Keep("above all thresholds")

    def switched(self, predicted_s: float, observed_s: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class SwitchCosts:
    """What measurements of an engine say of its switches: links, fixed parts, and KV rates by the layout to go to."""

    links: Links
    parts: SwitchParts
    kv: dict[Layout, KvCosts]


def save_switch_costs(path: Path, costs: SwitchCosts) -> None:
    """As JSON, for option ``switch_costs``."""
    kv = {str(layout): asdict(rates) for layout, rates in costs.kv.items()}
    path.write_text(json.dumps({"links": asdict(costs.links), "parts": asdict(costs.parts), "kv": kv}, indent=1))


def load_switch_costs(path: Path) -> SwitchCosts:
    """ValueError names a file that :func:`save_switch_costs` has not written."""
    try:
        found = json.loads(path.read_text())
        kv = {Layout.parse(name): KvCosts(**rates) for name, rates in found["kv"].items()}
        return SwitchCosts(Links(**found["links"]), SwitchParts(**found["parts"]), kv)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"switch_costs: {path} holds no switch costs ({error}); measure them anew") from None


class PolicyChoice:
    """The policy for each rollout. An adaptive one learns: it is fitted to the lengths of the rollouts so far, and the
    biases of its predictions are kept.

    ``costs``: KV rates for the engine. ``lengths_known``: responses that the present policy was fitted to.
    """

    def __init__(self, settings: PatSettings, model_path: str, capacity: dict[Layout, int], cap_tokens: int) -> None:
        self.settings, self.cap_tokens = settings, cap_tokens
        self.given: list[int] = json.loads(Path(settings.lengths).read_text()) if settings.lengths else []
        self.seen: deque[list[int]] = deque(maxlen=settings.remember)
        self.planner: Planner | None = None
        self.costs: dict[Layout, KvCosts] | KvCosts = KvCosts()
        self.lengths_known = 0
        self.correction = Correction()
        if settings.policy == "adaptive":
            shape, profile = ModelShape.load(Path(model_path)), StepProfile.load(Path(settings.profile))
            costs = load_switch_costs(Path(settings.switch_costs))
            switches = SwitchModel(shape, profile, costs.links, costs.parts, settings.home.world)
            self.planner = Planner(profile, switches, settings.all_layouts, capacity, admission_reserve_tokens=0.0)
            self.costs = costs.kv

    @property
    def interval_steps(self) -> int | None:
        return None if self.settings.policy == "static" else self.settings.interval_steps

    def next(self) -> Policy:
        """The policy of the next rollout."""
        settings = self.settings
        if settings.policy == "static":
            return StaticPolicy(settings.home)
        if settings.policy == "thresholds":
            named = tuple((alive, Layout.parse(name)) for alive, name in settings.thresholds)
            return ThresholdPolicy(settings.home, named, settings.interval_steps)
        earlier = [length for rollout in self.seen for length in rollout] or self.given
        self.lengths_known = len(earlier)
        if not earlier:
            return StaticPolicy(settings.home, settings.interval_steps)
        return AdaptivePolicy(
            self.planner,
            LengthForesight(LengthModel.fit(np.array(earlier), self.cap_tokens)),
            start=settings.home if settings.start is not None else None,
            max_hops=settings.max_hops,
            margin=settings.margin,
            interval_steps=settings.interval_steps,
            correction=self.correction,
        )

    def expected_s(self, policy: Policy, layout: Layout, prompt_tokens: np.ndarray) -> float | None:
        """Seconds that the planner, corrected by earlier rollouts, expects of one that begins in ``layout``, prefill
        included."""
        if not isinstance(policy, AdaptivePolicy):
            return None
        planner = self.correction.applied_to(self.planner)
        plans = planner.plans(policy.foresight.at_start(prompt_tokens), policy.max_hops, fresh=True)
        prefill_s = float(planner.profile.prefill_s(layout.tp, prompt_tokens.sum() / layout.dp))
        return prefill_s + plans[layout].best_s

    def learn(self, response_tokens: list[int]) -> None:
        """A rollout has ended with these lengths."""
        self.seen.append(list(response_tokens))
