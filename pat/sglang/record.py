"""What one switch did and cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pat.layout import Layout
from pat.reshard.kv import Placement

PARTS = ("pause", "groups", "weights", "kv", "graphs", "resume")


@dataclass(frozen=True, slots=True)
class SwitchRecord:
    """One switch of a running engine, as the engine's process and world rank 0 saw it.

    total_s          from the order to routing to the new layout
    pause_s          until every rank is at a step boundary and knows the plan: transport, drain, meetings, packing
    groups_s         entering the other communicators, which exist already, and emptying its seat
    weights_s        handing weights over; 0 where seats hold views
    weight_wire_bytes, weight_local_bytes, weight_extra_bytes
                     over all ranks: taken from others, and copied on the same rank; the most that a rank's weights took
                     meanwhile beyond the larger of what they take before and after. 0 where seats hold views
    kv_s             moving KV cache
    graphs_s         capturing CUDA graphs again; 0 where each seat keeps its own
    resume_s         rebuilding the running batch, exchanging requests, the last meeting, the answer, routing
    kv_wire_bytes, kv_local_bytes  over all ranks: sent to others, and kept on the same rank
    peak_extra_bytes the most that the exchange of KV cache took on a rank beside the pools
    migrated, recomputed, queued   running requests by the way their KV took; queued: meant to migrate, found no room
    waiting          requests that had no KV
    predicted_migrate_s, predicted_recompute_s   of the migrated and of the other sequences
    migrated_most, recomputed_most   what they follow from: (sequences, KV bytes) of the busiest rank, (sequences,
                     tokens) of the busiest replica
    groups_created   communicators built since the start: no switch adds any
    placements       the choice for each sequence, with both predictions
    """

    number: int
    old: Layout
    new: Layout
    total_s: float
    pause_s: float
    groups_s: float
    weights_s: float
    kv_s: float
    graphs_s: float
    resume_s: float
    kv_wire_bytes: int
    kv_local_bytes: int
    weight_wire_bytes: int
    weight_local_bytes: int
    weight_extra_bytes: int
    peak_extra_bytes: int
    migrated: int
    recomputed: int
    queued: int
    waiting: int
    predicted_migrate_s: float
    predicted_recompute_s: float
    migrated_most: tuple[int, int]
    recomputed_most: tuple[int, int]
    groups_created: int
    placements: tuple[Placement, ...] = ()

    @property
    def unattributed_s(self) -> float:
        return self.total_s - sum(getattr(self, f"{part}_s") for part in PARTS)

    def as_row(self) -> dict[str, Any]:
        """Flat, for a table or a JSON record; without the placements."""
        row = asdict(self) | {"old": str(self.old), "new": str(self.new), "unattributed_s": self.unattributed_s}
        del row["placements"]
        return row

    @classmethod
    def of(cls, number: int, facts: dict[str, Any], total_s: float, answer_s: float) -> SwitchRecord:
        """From world rank 0's facts; ``answer_s``: from its answer to routing, in the engine's process."""
        fields = dict(facts)
        parts = fields.pop("parts")
        return cls(
            number=number,
            total_s=total_s,
            pause_s=sum(parts[name] for name in ("drain", "meet", "settle", "plan")),
            groups_s=parts["groups"],
            weights_s=parts["weights"],
            kv_s=parts["kv"],
            graphs_s=parts["graphs"],
            resume_s=parts["requests"] + parts["resume"] + answer_s,
            **fields,
        )
