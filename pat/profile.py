"""Step profile: how long decode and prefill steps take, by TP degree, batch and context."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pat.host import NO_HOST, HostTerm
from pat.step_table import StepTable


@dataclass(frozen=True, eq=False)
class TpGrid:
    """Device times of one TP degree on a grid; the host term is not in them.

    batches            [B] sequences in one replica's step, ascending
    contexts_tokens    [C] mean context of the batch, ascending
    decode_s           [B, C] one decode step
    prefill_tokens     [P] tokens of one prefill step, ascending
    prefill_s          [P]
    graph_batches      batch sizes of CUDA graphs: a smaller batch is padded up to the next; () = never padded
    eager_extra_s      added to a step whose batch is above the largest graph (launches, the slower all-reduce)
    measured_batch, measured_context_tokens, measured_tokens
                       the largest batch, context and product of both that rest on measurement; beyond, extrapolated
    half_interval      half of the 90% interval around a decode step, as a share of it; 0 where it is not known
    """

    tp: int
    batches: np.ndarray
    contexts_tokens: np.ndarray
    decode_s: np.ndarray
    prefill_tokens: np.ndarray
    prefill_s: np.ndarray
    graph_batches: tuple[int, ...] = ()
    eager_extra_s: float = 0.0
    measured_batch: int = 1 << 30
    measured_context_tokens: int = 1 << 30
    measured_tokens: int = 1 << 60
    half_interval: float = 0.0

    def padded(self, batch: np.ndarray) -> np.ndarray:
        """The batch a step really runs: rounded up to its CUDA graph; unchanged above the largest."""
        graphs = np.asarray(self.graph_batches)
        if graphs.size == 0:
            return batch
        index = np.searchsorted(graphs, batch)
        return np.where(index < graphs.size, graphs[np.minimum(index, graphs.size - 1)], batch)

    def device_s(self, batch: np.ndarray) -> np.ndarray:
        """[N, C] device seconds of a decode step of each of ``batch`` [N], at every context of the grid."""
        run = self.padded(batch)
        rows = interpolate(self.batches, self.decode_s, run)
        eager = (run > max(self.graph_batches)) if self.graph_batches else np.zeros_like(run, dtype=bool)
        return rows + np.where(eager, self.eager_extra_s, 0.0)[:, None]

    def prefill_time_s(self, tokens: np.ndarray | float) -> np.ndarray:
        """Seconds to prefill ``tokens`` in one step (0 for none); linear between and beyond the grid's points."""
        tokens = np.asarray(tokens, dtype=float)
        time_s = interpolate(self.prefill_tokens, self.prefill_s[:, None], np.atleast_1d(tokens))[:, 0]
        return np.where(tokens > 0, np.maximum(time_s, 0.0).reshape(tokens.shape), 0.0)

    @cached_property
    def _prefill_points(self) -> tuple[list[float], list[float]]:
        return self.prefill_tokens.tolist(), self.prefill_s.tolist()

    def one_prefill_time_s(self, tokens: int) -> float:
        """:meth:`prefill_time_s` of one number of tokens, without numpy's overhead."""
        if tokens <= 0:
            return 0.0
        knots, values = self._prefill_points
        if len(knots) == 1:
            return max(values[0], 0.0)
        low = min(max(bisect_right(knots, tokens) - 1, 0), len(knots) - 2)
        weight = max((tokens - knots[low]) / (knots[low + 1] - knots[low]), 0.0)
        return max(values[low] * (1 - weight) + values[low + 1] * weight, 0.0)


def interpolate(knots: np.ndarray, values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Rows of ``values`` [K, C] at ``at`` [N], linear between knots, first row below, last slope beyond: [N, C]."""
    if len(knots) == 1:
        return np.repeat(values, len(at), axis=0)
    low = np.minimum(np.maximum(np.searchsorted(knots, at, side="right") - 1, 0), len(knots) - 2)
    weight = np.maximum((at - knots[low]) / (knots[low + 1] - knots[low]), 0.0)[:, None]
    return values[low] * (1 - weight) + values[low + 1] * weight


@dataclass(frozen=True, eq=False)
class StepProfile:
    """The grids of one model on one device, with the host term of the engine that runs it."""

    model: str
    device: str
    grids: dict[int, TpGrid]
    host: HostTerm = NO_HOST
    provenance: dict = field(default_factory=dict)

    @property
    def tps(self) -> tuple[int, ...]:
        return tuple(sorted(self.grids))

    def with_host(self, host: HostTerm) -> StepProfile:
        return replace(self, host=host)

    @cache  # noqa: B019  (a profile lives as long as the process; its tables are small)
    def table(self, tp: int, max_batch: int) -> StepTable:
        """Step times of one TP degree for every batch of 0 .. at least ``max_batch``, host term included."""
        size = 1 << max(0, (max_batch - 1).bit_length())
        if size != max_batch:
            return self.table(tp, size)
        if tp not in self.grids:
            raise ValueError(f"profile of {self.model} on {self.device} has no TP{tp}, only {list(self.tps)}")
        grid, batch = self.grids[tp], np.arange(1, max_batch + 1)
        step_s = self.host.combine(self.host.step_s(tp, batch)[:, None], grid.device_s(batch))
        return StepTable(grid.contexts_tokens, np.vstack([np.zeros(step_s.shape[1]), step_s]))

    def decode_s(self, tp: int, batch: float, context_tokens: float) -> float:
        """Seconds of one decode step of ``batch`` sequences whose mean context is ``context_tokens``."""
        return self.table(tp, int(batch)).one_step_s(int(batch), context_tokens)

    def decode_interval_s(self, tp: int, batch: float, context_tokens: float) -> tuple[float, float]:
        """(low, high) that hold nine of ten measured points, by the profile's hold-out errors."""
        step_s, half = self.decode_s(tp, batch, context_tokens), self.grids[tp].half_interval
        return step_s * (1.0 - half), step_s * (1.0 + half)

    def one_prefill_s(self, tp: int, tokens: int) -> float:
        """:meth:`prefill_s` of one number of tokens, without numpy's overhead."""
        return self.grids[tp].one_prefill_time_s(tokens)

    def prefill_s(self, tp: int, tokens: np.ndarray | float) -> np.ndarray:
        """Seconds to prefill ``tokens`` in one step."""
        return self.grids[tp].prefill_time_s(tokens)

    def extrapolated(self, tp: int, batch: int, context_tokens: float) -> bool:
        """Whether this point lies outside what was measured."""
        grid = self.grids[tp]
        inside = batch <= grid.measured_batch and context_tokens <= grid.measured_context_tokens
        return not inside or batch * context_tokens > grid.measured_tokens

    def save(self, path: Path) -> None:
        """One Parquet file: a row a point (kind, tp, batch, tokens, seconds), the rest as JSON in its metadata."""
        rows, meta = [], {}
        for tp, grid in self.grids.items():
            for b, line in zip(grid.batches.tolist(), grid.decode_s.tolist(), strict=True):
                rows += [("decode", tp, b, c, s) for c, s in zip(grid.contexts_tokens.tolist(), line, strict=True)]
            points = zip(grid.prefill_tokens.tolist(), grid.prefill_s.tolist(), strict=True)
            rows += [("prefill", tp, 1, n, s) for n, s in points]
            meta[tp] = {
                "graph_batches": list(grid.graph_batches),
                "eager_extra_s": grid.eager_extra_s,
                "measured_batch": grid.measured_batch,
                "measured_context_tokens": grid.measured_context_tokens,
                "measured_tokens": grid.measured_tokens,
                "half_interval": grid.half_interval,
            }
        columns = dict(
            zip(("kind", "tp", "batch", "tokens", "seconds"), map(list, zip(*rows, strict=True)), strict=True)
        )
        host = {name: getattr(self.host, name) for name in HostTerm.__dataclass_fields__}
        head = {"model": self.model, "device": self.device, "host": host, "provenance": self.provenance, "grids": meta}
        table = pa.table(columns).replace_schema_metadata({"pat_profile": json.dumps(head, sort_keys=True)})
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        pq.write_table(table, partial, write_page_checksum=True)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> StepProfile:
        """Read what :meth:`save` wrote; ValueError names the file where it is not a step profile."""
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            head = json.loads(table.schema.metadata[b"pat_profile"])
            column = {name: table[name].to_numpy() for name in ("kind", "tp", "batch", "tokens", "seconds")}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"profile: {path} is not a step profile ({error}); make one anew") from None
        decode, grids = column["kind"] == "decode", {}
        for tp, meta in ((int(k), v) for k, v in head["grids"].items()):
            points, prefill = np.flatnonzero((column["tp"] == tp) & decode), (column["tp"] == tp) & ~decode
            points = points[np.lexsort((column["tokens"][points], column["batch"][points]))]
            batches, contexts = np.unique(column["batch"][points]), np.unique(column["tokens"][points])
            grids[tp] = TpGrid(
                tp,
                batches,
                contexts,
                column["seconds"][points].reshape(len(batches), len(contexts)),
                column["tokens"][prefill],
                column["seconds"][prefill],
                **{**meta, "graph_batches": tuple(meta["graph_batches"])},
            )
        return cls(head["model"], head["device"], grids, HostTerm(**head["host"]), head["provenance"])
