"""Host term: CPU time of the scheduler per decode step. Data parallelism divides it, tensor parallelism does not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class HostTerm:
    """``base_s + per_sequence_s * batch`` (+ ``broadcast_s`` where TP > 1) a decode step of one replica.

    ``overlapped``: the host prepares step i + 1 while the device runs step i, so a step takes the longer of the two;
    otherwise it takes their sum.
    """

    name: str
    base_s: float
    per_sequence_s: float
    overlapped: bool
    broadcast_s: float = 0.0
    source: str = ""

    def step_s(self, tp: int, batch: np.ndarray | float) -> np.ndarray | float:
        """Host seconds of one decode step of ``batch`` sequences."""
        return self.base_s + self.per_sequence_s * batch + (self.broadcast_s if tp > 1 else 0.0)

    def combine(self, host_s: np.ndarray, device_s: np.ndarray) -> np.ndarray:
        """Seconds of a whole step from its host and device parts (arrays that broadcast)."""
        return np.maximum(host_s, device_s) if self.overlapped else host_s + device_s


NO_HOST = HostTerm("none", 0.0, 0.0, overlapped=False)
