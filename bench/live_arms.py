"""The adaptive arms of the measured tier: one engine with a seat for each layout, a policy by arm."""

from __future__ import annotations

import math
from dataclasses import replace
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
from pat.profile import StepProfile
from pat.reshard.kv import KvCosts
from pat.sglang.calibrate import measure_costs
from pat.switch_cost import SwitchModel, SwitchParts

LIVE_ARMS = ("pat-live", "pat-forced")
"""``pat-live`` chooses the first layout too; ``pat-forced`` must begin in the lowest TP."""
SHAPES = ((1, 32), (4, 32), (4, 96))
"""Of the switches that the rates of KV migration are measured by: (sequences in flight, prompt tokens)."""


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
        parts = self._parts()
        engine.engine.costs = self._kv_costs(profile)
        up = engine.engine.costs[max(engine.layouts)]
        # through shared memory, KV cache that stays on its rank costs as much as what leaves it: one rate for both
        links = Links(math.inf, math.inf, up.sequence_s, up.bytes_per_s, "this engine's rates of going up")
        parts = replace(parts, resume_s=parts.resume_s + up.exchange_s)
        switches = SwitchModel(self.shape, profile, links, parts, experiment.cluster.gpus_per_node)
        capacity = {a: capacity_tokens(engine, a) for a in engine.layouts}
        return Planner(profile, switches, engine.layouts, capacity, admission_reserve_tokens=0.0)

    def _kv_costs(self, profile: StepProfile) -> dict[Layout, KvCosts]:
        """Costs of KV cache by the layout to go to: migration measured by switches, prefill as in the profile."""
        work = measure_costs(self.engine.engine, SHAPES, rounds=1, recompute=False)
        measured = self.engine.loop.run_until_complete(work)
        found = {}
        for layout, costs in measured.items():
            one_s, more_s = profile.prefill_s(layout.tp, [1.0, 65.0]).tolist()
            token_s = max(0.0, (more_s - one_s) / 64)
            fixed_s = max(0.0, one_s - token_s)
            found[layout] = replace(
                costs, prefill_fixed_s=fixed_s, prefill_sequence_s=0.0, prefill_token_s=token_s, prefill_token2_s=0.0
            )
        return found

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
