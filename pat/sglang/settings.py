"""What the processes of one adaptive engine must agree on: JSON in the environment variable ``PAT_SWITCH``."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from pat.layout import Layout

VARIABLE = "PAT_SWITCH"


@dataclass(frozen=True)
class Settings:
    """
    layouts       layouts the engine can take; it starts in the first, which has the lowest TP
    port          where the world of all ranks meets, on this host
    reports       address of the engine's report socket (ZeroMQ)
    orders        address where the router takes the engine's orders
    wait_s        the most that any rank waits for another in a switch
    report_steps  decode steps between two reports of running sequences; 0: no reports
    staging_bytes the most memory that the exchange of KV cache takes on a rank, beyond one layer
    copied_share  the most that seats may add to the memory of weights by copies of merged layers (gate and up)
    tail_graph_batch   largest batch that CUDA graphs are captured for in layouts beyond the first
    seats         "all": every layout's weights are there, as views of the first one's; "one": only those of the
                  present layout, which a switch moves; for where copies of fused tensors do not fit
    """

    layouts: tuple[Layout, ...]
    port: int
    reports: str
    orders: str
    wait_s: float = 60.0
    report_steps: int = 0
    staging_bytes: int = 64 << 20
    copied_share: float = 0.25
    tail_graph_batch: int = 16
    seats: str = "all"

    def __post_init__(self) -> None:
        if list(self.layouts) != sorted(set(self.layouts)):
            raise ValueError("layouts: give each once, the lowest TP first")
        if any(layout.world != self.layouts[0].world for layout in self.layouts):
            raise ValueError(f"layouts: {', '.join(map(str, self.layouts))} are not of one number of GPUs")
        if self.seats not in ("all", "one"):
            raise ValueError(f"seats: {self.seats!r} is neither all nor one")
        if any(layout.tp % self.layouts[0].tp for layout in self.layouts):
            raise ValueError(f"layouts: every TP must be a multiple of the first, {self.layouts[0].tp}")

    @property
    def start(self) -> Layout:
        return self.layouts[0]

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"layouts": [str(layout) for layout in self.layouts]})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        fields = json.loads(text)
        return cls(**fields | {"layouts": tuple(Layout.parse(name) for name in fields["layouts"])})

    @classmethod
    def from_environment(cls) -> Settings:
        return cls.from_json(os.environ[VARIABLE])
