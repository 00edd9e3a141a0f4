"""Backend of the measured tier with a layout that changes: rollouts on AdaptiveEngine under a policy."""

from __future__ import annotations

from dataclasses import replace

from bench.backends.sglang_engine import EngineRollout, StaticEngine
from pat.layout import Layout
from pat.policy import Policy, StaticPolicy

REPORT_STEPS = 4
"""Decode steps between two reports of a replica; a policy is asked on each."""


class AdaptiveRollouts(StaticEngine):
    """As :class:`StaticEngine`, except that ``policy``, which can be set between rollouts, decides on the layout.

    A rollout begins in the layout that the policy wants to begin in; getting there is not counted.
    """

    def __init__(self, layouts: tuple[Layout, ...], arguments: dict, environment: dict[str, str]) -> None:
        super().__init__(min(layouts), arguments, environment)
        self.layouts = tuple(sorted(layouts))
        self.policy: Policy = StaticPolicy(self.layouts[0], REPORT_STEPS)

    @classmethod
    def over(cls, model_path: str, layouts: tuple[Layout, ...], device: str = "cpu", **sizes) -> AdaptiveRollouts:
        """An engine with a seat for each layout; ``sizes`` as in :func:`engine_arguments`, for the lowest TP."""
        static = StaticEngine.of(model_path, min(layouts), device, **sizes)
        return cls(layouts, static.arguments, static.environment)

    def _launch(self):
        from pat.sglang.engine import AdaptiveEngine

        arguments = {name: v for name, v in self.arguments.items() if name not in ("tp_size", "dp_size")}
        return AdaptiveEngine(layouts=self.layouts, policy=self.policy, **arguments)

    def _warm_up(self) -> None:
        """A short rollout in every layout, up and down: the first switches and steps compile and map memory."""
        for layout in (*self.layouts, *self.layouts[::-1]):
            self.policy = StaticPolicy(layout, REPORT_STEPS)
            self.rollout([[5 + i, 6, 7, 8] for i in range(2 * layout.world)], [6] * (2 * layout.world))

    def stop(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
        super().stop()

    def rollout(self, prompts, response_tokens, seed=0, progress=None) -> EngineRollout:
        """As :meth:`StaticEngine.rollout`, with the switches that the policy made."""
        engine = self.engine
        engine.controller.policy = self.policy
        with engine.rollout([len(prompt) for prompt in prompts]):
            self.layout, before = engine.layout, len(engine.records)
            found = super().rollout(prompts, response_tokens, seed, progress)
        return replace(found, switches=tuple(engine.records[before:]))
