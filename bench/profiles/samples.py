"""What `bench profile` measured: every scheduler step, and switches of an idle engine; and what follows from them."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.stats import theilslopes

from pat.host import HostTerm
from pat.layout import Layout
from pat.links import Links
from pat.model import ModelShape
from pat.profile import StepProfile, TpGrid
from pat.reshard.kv import KvCosts
from pat.step_model import half_interval, hold_out_errors, kept, monotone_fit, predicted_s
from pat.switch_cost import SwitchParts

COLUMNS = (
    "layout",
    "variant",
    "prompt_tokens",
    "repeat",
    "replica",
    "kind",
    "batch",
    "context_tokens",
    "new_tokens",
    "latency_s",
    "forward_s",
)
KEY = b"pat_samples"
PREFILL_KNOTS = 4
FIXED_PARTS = ("pause_s", "groups_s", "weights_s", "graphs_s", "resume_s")


@dataclass(frozen=True, eq=False)
class Samples:
    """One profiling run of one model on one machine.

    sequences, max_context_tokens   of a whole rollout, and of a sequence, that the plan covers
    steps        a row a scheduler step: COLUMNS; ``context_tokens`` is the mean of the batch's sequences
    switches     rows of :meth:`pat.sglang.record.SwitchRecord.as_row`, of an engine with nothing in flight
    costs        measured rates of KV cache by the layout to go to; those of its recomputation are not used
    provenance   what the samples are of, see :mod:`bench.profiles.stored`
    """

    model: str
    shape: ModelShape
    device: str
    sequences: int
    max_context_tokens: int
    steps: pd.DataFrame
    switches: tuple[dict, ...]
    costs: dict[Layout, KvCosts]
    provenance: dict

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(sorted(Layout.parse(name) for name in self.steps.layout.unique()))

    @cache  # noqa: B019  (few profiles live, as long as the process)
    def cells(self, variant: str = "greedy") -> pd.DataFrame:
        """Decode points: layout, prompt_tokens, batch, context_tokens, seconds, host_s, samples, outliers.

        A point is all steps of one batch after prompts of one length. Its seconds: the mean of each repeat without
        outliers, the median of these, so that a while of other load spoils one repeat at most.
        """
        decode = self.steps[(self.steps.kind == "decode") & (self.steps.variant == variant)]
        rows = []
        for (layout, prompt, batch), group in decode.groupby(["layout", "prompt_tokens", "batch"]):
            good = group.groupby("repeat").latency_s.transform(lambda times: kept(times.to_numpy())).to_numpy(bool)
            mine = group[good]
            seconds = float(mine.groupby("repeat").latency_s.mean().median())
            host_s = float((mine.latency_s - mine.forward_s).median())
            centre = (float(mine.context_tokens.mean()), seconds, host_s)
            rows.append((layout, prompt, int(batch), *centre, len(group), int((~good).sum())))
        names = ["layout", "prompt_tokens", "batch", "context_tokens", "seconds", "host_s", "samples", "outliers"]
        return pd.DataFrame(rows, columns=names)

    @cache  # noqa: B019  (few profiles live, as long as the process)
    def profile(self) -> StepProfile:
        """The step profile: fitted to all points; the host term is in its times."""
        cells, grids = self.cells(), {}
        for layout in self.layouts:
            mine = cells[cells.layout == str(layout)]
            if mine.empty:
                raise ValueError(f"profile of {self.model}: no decode steps of {layout} were logged; measure it anew")
            grids[layout.tp] = self._grid(layout, mine)
        source = {"tier": "measured", "source": f"{len(self.steps)} steps of the step log"}
        return StepProfile(self.model, self.device, grids, provenance=source | self.provenance)

    def _grid(self, layout: Layout, cells: pd.DataFrame) -> TpGrid:
        batch, context, seconds = arrays(cells)
        far, knots = self.max_context_tokens, np.unique(batch)
        values = np.maximum(monotone_fit(batch, context, seconds, knots, far), 1e-6)
        tokens, prefill_s = self._prefill(layout)
        return TpGrid(
            layout.tp,
            knots.astype(int),
            np.array([0, far]),
            values,
            tokens,
            prefill_s,
            measured_batch=int(knots[-1]),
            measured_context_tokens=int(context.max()),
            half_interval=half_interval(hold_out_errors(batch, context, seconds, np.arange(len(batch)), far)),
        )

    def _prefill(self, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [P], seconds [P]) of one prefill step; it does not fall."""
        mine = self.steps[(self.steps.kind == "extend") & (self.steps.layout == str(layout))]
        tokens, seconds = mine.new_tokens.to_numpy(float), mine.latency_s.to_numpy()
        knots = np.unique(np.quantile(tokens, np.linspace(0, 1, PREFILL_KNOTS)).round())
        if len(knots) == 1:
            knots = np.r_[knots, knots + 1]
        return knots.astype(int), monotone_fit(tokens, 0 * tokens, seconds, knots, 1.0)[:, 0]

    @cache  # noqa: B019  (few profiles live, as long as the process)
    def hold_out(self) -> pd.DataFrame:
        """The decode points with errors, predicted / measured - 1: ``fit_error`` of the fit to all points, ``error`` of
        one without this point, ``batch_error`` of one without any point of its batch (NaN at the ends)."""
        profile, parts = self.profile(), []
        for layout, mine in self.cells().groupby("layout"):
            batch, context, seconds = arrays(mine)
            grid = profile.grids[Layout.parse(layout).tp]
            fitted = predicted_s(grid.batches, grid.decode_s, self.max_context_tokens, batch, context)
            points = (batch, context, seconds)
            parts.append(
                mine.assign(
                    fit_error=fitted / seconds - 1.0,
                    error=hold_out_errors(*points, np.arange(len(batch)), self.max_context_tokens),
                    batch_error=hold_out_errors(*points, batch, self.max_context_tokens),
                )
            )
        return pd.concat(parts, ignore_index=True)

    @cache  # noqa: B019  (few profiles live, as long as the process)
    def repeat_errors(self) -> pd.DataFrame:
        """layout, error: mean of one repeat of a point / that of the others - 1. What no model can do better than."""
        decode = self.steps[(self.steps.kind == "decode") & (self.steps.variant == "greedy")]
        rows = []
        for (layout, _, _), group in decode.groupby(["layout", "prompt_tokens", "batch"]):
            means = group.groupby("repeat").latency_s.median().to_numpy()
            if len(means) > 1:
                others = (means.sum() - means) / (len(means) - 1)
                rows += [(layout, float(error)) for error in means / others - 1.0]
        return pd.DataFrame(rows, columns=["layout", "error"])

    def host_terms(self) -> dict[tuple[str, str], HostTerm]:
        """By (layout, variant): Theil-Sen line of step time less model forward over the sequences of a replica."""
        terms = {}
        for variant in self.steps.variant.unique():
            for layout, cells in self.cells(variant).groupby("layout"):
                if len(cells) > 2:
                    slope, base, _, _ = theilslopes(cells.host_s, cells.batch)
                    terms[layout, variant] = HostTerm(
                        variant, float(base), float(slope), overlapped=False, source="step time less model forward"
                    )
        return terms

    def parts(self) -> SwitchParts:
        """Medians over the idle switches, which moved no KV cache (nothing where there are none), and the fixed time of
        moving some."""

        def median_s(name: str) -> float:
            return float(np.median([switch[name] for switch in self.switches])) if self.switches else 0.0

        parts = SwitchParts("measured", *map(median_s, FIXED_PARTS), source="medians of switches of an idle engine")
        return replace(parts, resume_s=parts.resume_s + self.costs[max(self.costs)].exchange_s)

    def kv_costs(self) -> dict[Layout, KvCosts]:
        """Costs of KV cache by the layout to go to: migration as measured, recomputation as prefill of the profile."""
        profile, found = self.profile(), {}
        for layout, costs in self.costs.items():
            one_s, more_s = profile.prefill_s(layout.tp, [1.0, 65.0]).tolist()
            token_s = max(0.0, (more_s - one_s) / 64)
            found[layout] = replace(
                costs,
                prefill_fixed_s=max(0.0, one_s - token_s),
                prefill_sequence_s=0.0,
                prefill_token_s=token_s,
                prefill_token2_s=0.0,
            )
        return found

    def links(self) -> Links:
        """Through shared memory, KV cache that stays on its rank costs as much as what leaves it: one rate for both."""
        up = self.costs[max(self.costs)]
        return Links(math.inf, math.inf, up.sequence_s, up.bytes_per_s, "rates of going up, by switches with KV cache")

    def save(self, path: Path) -> None:
        """One Parquet file: the steps, the rest as JSON in its metadata. Written whole or not at all."""
        head = {
            "model": self.model,
            "shape": asdict(self.shape),
            "device": self.device,
            "sequences": self.sequences,
            "max_context_tokens": self.max_context_tokens,
            "switches": list(self.switches),
            "costs": {str(layout): asdict(costs) for layout, costs in self.costs.items()},
            "provenance": self.provenance,
        }
        table = pa.Table.from_pandas(self.steps[list(COLUMNS)], preserve_index=False)
        table = table.replace_schema_metadata({KEY: json.dumps(head, sort_keys=True)})
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        pq.write_table(table, partial, write_page_checksum=True)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Samples:
        """Read what :meth:`save` wrote; ValueError names the file where it is not a profile."""
        try:
            table = pq.read_table(path, page_checksum_verification=True)
            head = json.loads(table.schema.metadata[KEY])
            steps = table.to_pandas()[list(COLUMNS)]
            head["costs"] = {Layout.parse(name): KvCosts(**rates) for name, rates in head["costs"].items()}
            head["shape"] = ModelShape(**head["shape"])
            head["switches"] = tuple(head["switches"])
            return cls(steps=steps, **head)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = " ".join(str(error).split())
            raise ValueError(f"profile {path.name}: is not a step profile ({why}); measure it anew") from None


def arrays(cells: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(batch, context_tokens, seconds) [N] of points."""
    return tuple(cells[name].to_numpy(float) for name in ("batch", "context_tokens", "seconds"))
