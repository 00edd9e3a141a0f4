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
    """The KV budget of one replica. ``max_response_tokens`` is the cap every request asks for.

    A running sequence of c context tokens holds the KV of c - 1: its last token's is written by its next step.
    """

    capacity_tokens: int
    max_response_tokens: int
    max_running: int = 1 << 20
    chunk_tokens: int = 8192
    ratio: float = INITIAL_RATIO

    def _left(self, generated: np.ndarray) -> np.ndarray:
        return np.minimum(self.max_response_tokens - generated, CLIP_NEW_TOKENS)

    def admit(
        self, context: np.ndarray, generated: np.ndarray, running_context: np.ndarray, running_generated: np.ndarray
    ) -> tuple[int, bool]:
        """One prefill pass: how many from the head of the queue ([q] context and response tokens so far) start beside
        the running [n], and whether the KV budget (not the pass's tokens) turned the next one away.

        A running request reserves its clipped remaining cap times the new-token ratio; one that starts must find room
        for the whole of it, and then holds its whole clipped cap for the rest of the pass. A pass takes what the
        prefill budget holds, at least one; where nothing runs, one always starts.
        """
        used = int(running_context.sum()) - len(running_context) + self.ratio * int(self._left(running_generated).sum())
        first = min(self.max_response_tokens - int(generated[0]), CLIP_NEW_TOKENS) + int(context[0]) + 1
        if len(running_context) and used + first >= self.capacity_tokens:
            return 0, True
        holds = context + 1 + min(self.max_response_tokens, CLIP_NEW_TOKENS)
        before = np.cumsum(holds) - holds
        fits = used + before + context + 1 + self._left(generated) < self.capacity_tokens
        fits &= np.arange(len(context)) < self.max_running - len(running_context)
        fits[0] |= len(running_context) == 0
        count = len(fits) if fits.all() else int(fits.argmin())
        in_pass = max(1, int(np.searchsorted(np.cumsum(context), self.chunk_tokens, side="right")))
        return min(count, in_pass), count < min(len(context), in_pass)

    def fits_next_step(self, context: np.ndarray) -> bool:
        return int(context.sum()) <= self.capacity_tokens

    def room_steps(self, context_sum: np.ndarray, batch: np.ndarray) -> np.ndarray:
        """Decode steps of ``batch`` sequences that the KV cache has room for, from their sum of context tokens on."""
        return (self.capacity_tokens - context_sum) // batch + 1

    def kept(self, context: np.ndarray) -> int:
        """How many of the running, best kept first ([n] context tokens), stay after a retraction: fewer than n, so
        that the next step fits; at least one."""
        fits = np.cumsum(context) <= self.capacity_tokens
        return max(1, min(int(fits.sum()), len(context) - 1))

    def decoded(self, steps: int) -> None:
        """The new-token ratio decays with every decode step."""
        self.ratio = max(LOWEST_RATIO, self.ratio - steps * (INITIAL_RATIO - LOWEST_RATIO) / DECAY_STEPS)

    def retracted(self, generated: np.ndarray) -> None:
        """After a retraction the ratio is estimated anew from the requests that stay."""
        asked = len(generated) * self.max_response_tokens + 1
        self.ratio = min(1.0, (int(generated.sum()) + RETRACT_STEPS * len(generated)) / asked)
