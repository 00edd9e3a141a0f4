"""What a switch costs: seconds and bytes by part. KV cache is migrated or recomputed, per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pat.layout import Layout
from pat.links import Links
from pat.model import ModelShape
from pat.placement import shares_ranks
from pat.profile import StepProfile


@dataclass(frozen=True, slots=True)
class SwitchParts:
    """The parts of a switch that do not depend on the KV cache, seconds each."""

    name: str
    pause_s: float
    groups_s: float
    weights_s: float
    graphs_s: float
    resume_s: float
    source: str = ""

    @property
    def fixed_s(self) -> float:
        return self.pause_s + self.groups_s + self.weights_s + self.graphs_s + self.resume_s


@dataclass(frozen=True, slots=True)
class SwitchCost:
    """One switch: the fixed parts, the KV part, and how the sequences' KV got to its new owners."""

    fixed_s: float
    kv_s: float
    kv_bytes: int
    migrated: int
    recomputed: int

    @property
    def total_s(self) -> float:
        return self.fixed_s + self.kv_s


def wire_share(old: Layout, new: Layout) -> float:
    """Share of a sequence's KV bytes that leaves the rank it is on, when its new replica contains its old ranks or is
    contained in them: with nested shards the ranks common to both keep ``min / max`` of the heads."""
    if old.tp == new.tp:
        return 0.0
    return 1.0 - min(old.tp, new.tp) / max(old.tp, new.tp)


@dataclass(frozen=True, eq=False)
class SwitchModel:
    """Predicts switches of one model on one kind of GPUs.

    node: GPUs of a node. ``kv``: "cheaper" lets each sequence take the faster way; "migrate" or "recompute" force one.
    """

    shape: ModelShape
    profile: StepProfile
    links: Links
    parts: SwitchParts
    node: int
    kv: str = "cheaper"

    def __post_init__(self) -> None:
        if self.kv not in ("cheaper", "migrate", "recompute"):
            raise ValueError(f"switch model: kv must be cheaper, migrate or recompute, not {self.kv!r}")

    def migrate_s(self, old: Layout, context_tokens, share, across) -> np.ndarray:
        """Seconds that each sequence's KV keeps its old ranks' links busy: bytes / link speed, the ``old.tp`` ranks
        sending in parallel. ``share`` of it leaves its rank; ``across``: it changes node. The rest is copied locally.
        """
        speed = np.where(across, self.links.inter_node_bytes_per_s, self.links.intra_node_bytes_per_s)
        return self.moved_s(old.tp, context_tokens, share, speed)

    def moved_s(self, tp, context_tokens, share, wire_bytes_per_s):
        """Seconds to move a sequence's bytes from its ``tp`` ranks; arrays that broadcast."""
        rank_bytes = context_tokens * float(self.shape.kv_bytes_per_token()) / tp
        return self.links.latency_s + rank_bytes * (share / wire_bytes_per_s + 1.0 / self.links.local_copy_bytes_per_s)

    def recompute_s(self, new: Layout, context_tokens: np.ndarray) -> np.ndarray:
        """Seconds that each sequence's prefill takes its new replica."""
        return self.profile.prefill_s(new.tp, context_tokens)

    def cost(
        self,
        old: Layout,
        new: Layout,
        context_tokens: np.ndarray,
        from_replica: np.ndarray,
        to_replica: np.ndarray,
    ) -> SwitchCost:
        """The switch of the sequences [n] given, each from its old to its new replica.

        Transfers of different replicas run side by side, those of one replica in turn; so do prefills. The two ways
        use different resources but share the pause: the KV part is the longer of the two. The order of the sequences
        does not matter, to the last bit.
        """
        if old == new:
            return SwitchCost(0.0, 0.0, 0, 0, 0)
        if len(context_tokens) == 0:
            return SwitchCost(self.parts.fixed_s, 0.0, 0, 0, 0)
        order = np.lexsort((context_tokens, from_replica, to_replica))  # one order of summation, whoever asks
        context = np.asarray(context_tokens, dtype=float)[order]
        from_replica, to_replica = from_replica[order], to_replica[order]
        across = from_replica * old.tp // self.node != to_replica * new.tp // self.node
        share = np.where(shares_ranks(old, new, from_replica, to_replica, self.node), wire_share(old, new), 1.0)
        move_s, again_s = self.migrate_s(old, context, share, across), self.recompute_s(new, context)
        migrate = {"cheaper": move_s <= again_s, "migrate": again_s >= 0, "recompute": again_s < 0}[self.kv]
        sent = np.bincount(from_replica, weights=np.where(migrate, move_s, 0.0))
        redone = np.bincount(to_replica, weights=np.where(migrate, 0.0, again_s))
        moved_bytes = np.sum(np.where(migrate, context * share, 0.0)) * self.shape.kv_bytes_per_token()
        kv_s = max(float(sent.max(initial=0.0)), float(redone.max(initial=0.0)))
        return SwitchCost(self.parts.fixed_s, kv_s, int(moved_bytes), int(migrate.sum()), int((~migrate).sum()))

    def estimates_s(self, layouts: Sequence[Layout], alive: np.ndarray, context_tokens: np.ndarray) -> np.ndarray:
        """[L, L, K] seconds of a switch from each layout to each, 0 to itself, with ``alive`` [K] sequences of mean
        context [K], spread evenly over the replicas.

        None is taken to change node: every node keeps at least one replica, and so its own sequences.
        """
        context, axis = np.asarray(context_tokens, dtype=float), (len(layouts), 1, 1)
        tp, dp = (np.array([getattr(a, name) for a in layouts]).reshape(axis) for name in ("tp", "dp"))
        share = np.array([[wire_share(a, b) for b in layouts] for a in layouts])[:, :, None]
        one = self.moved_s(tp, context, share, self.links.intra_node_bytes_per_s)
        again = np.stack([self.recompute_s(b, context) for b in layouts])
        each = np.ceil(alive / dp)  # sequences of a replica [L, 1, K]
        move_s, redo_s = each * one, (each[:, 0] * again)[None]
        kv_s = {"cheaper": np.where(one <= again, move_s, redo_s), "migrate": move_s, "recompute": redo_s}[self.kv]
        other = np.array([[a != b for b in layouts] for a in layouts])[:, :, None]
        return (self.parts.fixed_s + kv_s) * other
