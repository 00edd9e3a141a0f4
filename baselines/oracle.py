"""A clairvoyant: it knows the length of every response, which no policy can. It bounds what planning could reach."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pat.planner import Outlook, known_course
from pat.policy import RolloutState


@dataclass(frozen=True, eq=False)
class Clairvoyant:
    """Foresight with the true response lengths [N] of the rollout, by sequence index."""

    response_tokens: np.ndarray

    def at_start(self, prompt_tokens: np.ndarray) -> Outlook:
        return known_course(self.response_tokens, prompt_tokens)

    def during(self, state: RolloutState) -> Outlook:
        """Of the running sequences; those that wait are not in a state by name and are left out."""
        remaining = self.response_tokens[state.sequence_ids] - state.generated_tokens
        return known_course(np.maximum(remaining, 1), state.context_tokens)
