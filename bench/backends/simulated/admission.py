"""SGLang's KV admission: who may start, and who must go back, under a budget of KV tokens.

Rules and constants are those of SGLang 0.5.23 (managers/schedule_policy.py, PrefillAdder.add_one_req;
managers/scheduler_components/new_token_ratio_tracker.py; managers/schedule_batch.py, retract_decode).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CLIP_NEW_TOKENS = 4096
INITIAL_RATIO, LOWEST_RATIO, DECAY_STEPS = 0.7, 0.7 * 0.14, 600
RETRACT_STEPS = 20


@dataclass(slots=True)
class Admission:
    """The KV budget of one replica. ``max_response_tokens`` is the cap every request asks for."""

    capacity_tokens: int
    max_response_tokens: int
    max_running: int = 1 << 20
    chunk_tokens: int = 8192
    ratio: float = INITIAL_RATIO

    def _left(self, generated: np.ndarray) -> np.ndarray:
        return np.minimum(self.max_response_tokens - generated, CLIP_NEW_TOKENS)

    def admit(
        self, context: np.ndarray, generated: np.ndarray, running_context: np.ndarray, running_generated: np.ndarray
    ) -> int:
        """How many from the head of the queue ([q] context and response tokens so far) start beside the running [n].

        A running request reserves its clipped remaining cap times the new-token ratio, one that starts the whole of
        it. Where nothing runs, one always starts.
        """
        free = self.capacity_tokens - running_context.sum() - self.ratio * self._left(running_generated).sum()
        need = np.cumsum(context + self._left(generated))
        count = int(np.searchsorted(need, free, side="left"))
        count = min(count, self.max_running - len(running_context))
        return max(count, 1) if len(running_context) == 0 else max(count, 0)

    def fits_next_step(self, context: np.ndarray, batch: int) -> bool:
        return int(context.sum()) + batch <= self.capacity_tokens

    def kept(self, context: np.ndarray) -> int:
        """How many of the running, best kept first ([n] context tokens), stay after a retraction: fewer than n, so
        that the next step fits; at least one."""
        fits = np.cumsum(context + 1) <= self.capacity_tokens
        return max(1, min(int(fits.sum()), len(context) - 1))

    def decoded(self, steps: int) -> None:
        """The new-token ratio decays with every decode step."""
        self.ratio = max(LOWEST_RATIO, self.ratio - steps * (INITIAL_RATIO - LOWEST_RATIO) / DECAY_STEPS)

    def retracted(self, generated: np.ndarray) -> None:
        """After a retraction the ratio is estimated anew from the requests that stay."""
        asked = len(generated) * self.max_response_tokens + 1
        self.ratio = min(1.0, (int(generated.sum()) + RETRACT_STEPS * len(generated)) / asked)
