"""The order to switch, as it travels to the schedulers inside SGLang's SetInternalStateReq (names to numbers only)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from pat.layout import Layout
from pat.reshard.kv import MODES, KvCosts

ORDER = "pat_order"
STAGES = ("none", "prepare", "commit", "after")
Stage = Literal["none", "prepare", "commit", "after"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure to stage in tests: world rank ``rank`` raises, or dies where ``kill``, in ``stage`` of the switch."""

    stage: Stage = "none"
    rank: int = 0
    kill: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """Switch number ``number`` of the engine, sent at ``sent_s`` (time.monotonic), to ``layout``."""

    number: int
    sent_s: float
    layout: Layout
    kv: str
    costs: KvCosts
    fault: Fault = Fault()

    def encode(self) -> dict[str, float]:
        costs = {f"pat_{name}": value for name, value in asdict(self.costs).items()}
        return costs | {
            ORDER: self.number,
            "pat_sent_s": self.sent_s,
            "pat_tp": self.layout.tp,
            "pat_dp": self.layout.dp,
            "pat_kv": MODES.index(self.kv),
            "pat_fault_stage": STAGES.index(self.fault.stage),
            "pat_fault_rank": self.fault.rank,
            "pat_fault_kill": int(self.fault.kill),
        }

    @classmethod
    def decode(cls, fields: dict[str, float]) -> Order:
        costs = KvCosts(**{name: fields[f"pat_{name}"] for name in KvCosts.__dataclass_fields__})
        stage = STAGES[int(fields["pat_fault_stage"])]
        fault = Fault(stage, int(fields["pat_fault_rank"]), bool(fields["pat_fault_kill"]))
        layout = Layout(int(fields["pat_tp"]), int(fields["pat_dp"]))
        kv = MODES[int(fields["pat_kv"])]
        return cls(int(fields[ORDER]), fields["pat_sent_s"], layout, kv, costs, fault)


def fields_of(message: object) -> dict[str, float] | None:
    """The fields of a message that carries an order; None for any other message."""
    fields = getattr(message, "server_args", None)
    return fields if isinstance(fields, dict) and ORDER in fields else None


@dataclass(frozen=True, slots=True)
class Route:
    """To the router, after a switch: replicas 0 .. ``replicas`` - 1 are the ones to send to."""

    replicas: int
