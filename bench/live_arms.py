"""The adaptive arms of the measured tier: one engine with a seat for each layout, a policy by arm."""

from __future__ import annotations

from pathlib import Path

from bench.backends.adaptive_engine import REPORT_STEPS, AdaptiveRollouts
from bench.backends.sglang_engine import EngineRollout
from bench.experiment import Experiment
from bench.predicted import earlier_lengths
from bench.profiles import stored
from bench.profiles.live import measure
from bench.profiles.samples import Samples
from pat.layout import Layout
from pat.lengths import LengthModel
from pat.planner import Planner
from pat.policy import AdaptivePolicy, LengthForesight
from pat.switch_cost import SwitchModel

LIVE_ARMS = ("pat-live", "pat-forced")
"""``pat-live`` chooses the first layout too; ``pat-forced`` must begin in the lowest TP."""


class LiveArms:
    """Started once for several rollouts. ``samples``: the step profile it plans with, from ``given``, the cache, or
    measured as it starts."""

    def __init__(
        self, experiment: Experiment, model_path: str, device: str, sizes: dict, given: Samples | None = None
    ) -> None:
        self.experiment, self.sizes, self.samples = experiment, sizes, given
        self.model_path, self.device = Path(model_path), device
        self.engine = AdaptiveRollouts.over(model_path, experiment.layouts, device, **sizes)
        self.planner: Planner | None = None

    def start(self) -> None:
        self.engine.start()
        try:
            self.samples = self.samples or self._profile()
            self.engine.engine.costs = self.samples.kv_costs()
            capacity = capacities(self.engine.arguments["max_total_tokens"], self.engine.layouts)
            self.planner = planner_of(self.samples, capacity, self.experiment.cluster.gpus_per_node)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.engine.stop()

    def choose(self, arm: str, seed: int) -> None:
        """Set the policy of an arm; it has seen the response lengths of earlier rollouts."""
        self.engine.policy = policy_of(self.experiment, self.planner, arm, self.sizes["sequences"], seed)

    def rollout(self, prompts, response_tokens, seed=0, progress=None) -> EngineRollout:
        return self.engine.rollout(prompts, response_tokens, seed, progress)

    def _profile(self) -> Samples:
        """From the cache, else measured now and cached."""
        longest, sequences = longest_tokens(self.experiment), self.sizes["sequences"]
        of, layouts = stored.identity(self.model_path, self.device), self.engine.layouts

        def measured() -> Samples:
            return measure(self.engine, self.experiment.model, sequences, longest)

        return stored.cached_or(measured, of, layouts, sequences, longest)


def longest_tokens(experiment: Experiment) -> int:
    """Context of the longest sequence that an experiment allows."""
    return experiment.max_prompt_tokens + experiment.max_response_tokens


def capacities(tokens: int, layouts: tuple[Layout, ...]) -> dict[Layout, int]:
    """KV tokens of one replica: an engine's budget counts for its lowest TP, each rank's memory is the same in all."""
    return {layout: tokens * layout.tp // min(layouts).tp for layout in layouts}


def planner_of(samples: Samples, capacity: dict[Layout, int], node: int) -> Planner:
    """The planner of adaptive arms, from a profile alone. These engines fill with short requests: nothing is reserved
    for each."""
    profile = samples.profile()
    switches = SwitchModel(samples.shape, profile, samples.links(), samples.parts(), node)
    return Planner(profile, switches, tuple(capacity), capacity, admission_reserve_tokens=0.0)


def policy_of(experiment: Experiment, planner: Planner, arm: str, sequences: int, seed: int) -> AdaptivePolicy:
    """The policy of one of LIVE_ARMS."""
    earlier = earlier_lengths(experiment, sequences, seed)
    return AdaptivePolicy(
        planner,
        LengthForesight(LengthModel.fit(earlier, experiment.max_response_tokens)),
        start=min(planner.layouts) if arm == "pat-forced" else None,
        interval_steps=REPORT_STEPS,
    )
