"""The adaptive arms of the measured tier: one engine with a seat for each layout, a policy by arm."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.backends.adaptive_engine import REPORT_STEPS, AdaptiveRollouts
from bench.backends.sglang_engine import EngineRollout
from bench.experiment import Experiment
from bench.predicted import earlier_lengths
from bench.profiles.live import measure
from pat.layout import Layout
from pat.lengths import LengthModel
from pat.links import Links
from pat.model import ModelShape
from pat.planner import Planner
from pat.policy import AdaptivePolicy, LengthForesight
from pat.switch_cost import SwitchModel, SwitchParts

LIVE_ARMS = ("pat-live", "pat-forced")
"""``pat-live`` chooses the first layout too; ``pat-forced`` must begin in the lowest TP."""
COPY_BYTES_PER_S = 5e9


class LiveArms:
    """Started once for several rollouts: it first measures its own step profile and switches."""

    def __init__(self, experiment: Experiment, model_path: str, device: str, sizes: dict) -> None:
        self.experiment, self.sizes = experiment, sizes
        self.shape = ModelShape.load(Path(model_path))
        self.engine = AdaptiveRollouts.over(model_path, experiment.layouts, device, **sizes)
        self.planner: Planner | None = None

    def start(self) -> None:
        self.engine.start()
        try:
            self.planner = self._planner()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.engine.stop()

    def choose(self, arm: str, seed: int) -> None:
        """Set the policy of an arm; it has seen the response lengths of earlier rollouts."""
        experiment = self.experiment
        earlier = earlier_lengths(experiment, self.sizes["sequences"], seed)
        self.engine.policy = AdaptivePolicy(
            self.planner,
            LengthForesight(LengthModel.fit(earlier, experiment.max_response_tokens)),
            start=min(self.engine.layouts) if arm == "pat-forced" else None,
            interval_steps=REPORT_STEPS,
        )

    def rollout(self, prompts, response_tokens, seed=0, progress=None) -> EngineRollout:
        return self.engine.rollout(prompts, response_tokens, seed, progress)

    def _planner(self) -> Planner:
        experiment, engine = self.experiment, self.engine
        longest = experiment.max_prompt_tokens + experiment.max_response_tokens
        prompt = min(experiment.max_prompt_tokens, 96)
        profile = measure(engine, self.shape.name, self.sizes["sequences"], longest, prompt)
        costs = engine.engine.costs
        links = Links(costs.bytes_per_s, costs.bytes_per_s, costs.exchange_s, COPY_BYTES_PER_S, "this engine's rates")
        switches = SwitchModel(self.shape, profile, links, self._parts(), experiment.cluster.gpus_per_node)
        capacity = {a: capacity_tokens(engine, a) for a in engine.layouts}
        return Planner(profile, switches, engine.layouts, capacity, admission_reserve_tokens=0.0)

    def _parts(self) -> SwitchParts:
        """Medians over the switches of the warm-up and the profile, which moved next to no KV cache."""
        records = self.engine.engine.records[2:]

        def median_s(name: str) -> float:
            return float(np.median([getattr(record, name) for record in records]))

        names = ("pause_s", "groups_s", "weights_s", "graphs_s", "resume_s")
        return SwitchParts("measured", *(median_s(name) for name in names), source="this engine's switches, medians")


def capacity_tokens(engine: AdaptiveRollouts, layout: Layout) -> int:
    """KV tokens of one replica: the engine's budget counts for its lowest TP, each rank's memory is the same in all."""
    low = min(engine.layouts)
    return engine.arguments["max_total_tokens"] * layout.tp // low.tp
