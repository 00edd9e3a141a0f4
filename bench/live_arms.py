"""The adaptive arms of the measured tier: one engine with a seat for each layout, a policy by arm."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.backends.adaptive_engine import REPORT_STEPS, AdaptiveRollouts
from bench.backends.sglang_engine import EngineRollout
from bench.experiment import Experiment
from bench.predicted import earlier_lengths
from bench.profiles import stored
from bench.profiles.live import measure
from pat.layout import Layout
from pat.lengths import LengthModel
from pat.links import Links
from pat.model import ModelShape
from pat.planner import Planner
from pat.policy import AdaptivePolicy, LengthForesight
from pat.profile import StepProfile
from pat.switch_cost import SwitchModel, SwitchParts

LIVE_ARMS = ("pat-live", "pat-forced")
"""``pat-live`` chooses the first layout too; ``pat-forced`` must begin in the lowest TP."""
COPY_BYTES_PER_S = 5e9


class LiveArms:
    """Started once for several rollouts: it first measures its own switches, and its step profile unless that is
    ``given`` or cached."""

    def __init__(
        self, experiment: Experiment, model_path: str, device: str, sizes: dict, given: StepProfile | None = None
    ) -> None:
        self.experiment, self.sizes, self.given = experiment, sizes, given
        self.model_path, self.device = Path(model_path), device
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
        profile = self.given or self._profile()
        costs = engine.engine.costs
        rates = "the rates that the engine itself plans with"
        links = Links(costs.bytes_per_s, costs.bytes_per_s, costs.exchange_s, COPY_BYTES_PER_S, rates)
        switches = SwitchModel(self.shape, profile, links, self._parts(), experiment.cluster.gpus_per_node)
        capacity = {a: capacity_tokens(engine, a) for a in engine.layouts}
        return Planner(profile, switches, engine.layouts, capacity, admission_reserve_tokens=0.0)

    def _profile(self) -> StepProfile:
        """From the cache, else measured now."""
        longest = self.experiment.max_prompt_tokens + self.experiment.max_response_tokens
        prompt, sequences = min(self.experiment.max_prompt_tokens, 96), self.sizes["sequences"]
        of, layouts = stored.identity(self.model_path, self.device), self.engine.layouts
        path = stored.cached_path(of, layouts, sequences, longest, prompt)
        profile = stored.load_cached(path, of, layouts)
        if profile is None:
            profile = stored.stamped(measure(self.engine, self.shape.name, sequences, longest, prompt), of)
            stored.keep(profile, path)
        return profile

    def _parts(self) -> SwitchParts:
        """Medians over the warm-up's switches, which moved next to no KV cache; nothing where there are none."""
        records = self.engine.calibration

        def median_s(name: str) -> float:
            return float(np.median([getattr(record, name) for record in records])) if records else 0.0

        names = ("pause_s", "groups_s", "weights_s", "graphs_s", "resume_s")
        return SwitchParts("measured", *(median_s(name) for name in names), source="this engine's switches, medians")


def capacity_tokens(engine: AdaptiveRollouts, layout: Layout) -> int:
    """KV tokens of one replica: the engine's budget counts for its lowest TP, each rank's memory is the same in all."""
    low = min(engine.layouts)
    return engine.arguments["max_total_tokens"] * layout.tp // low.tp
