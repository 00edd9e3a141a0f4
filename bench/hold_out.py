"""The record of held-out points of the GPU grids: made where it is missing or of other grids, and read."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from bench.experiment import Experiment
from bench.profiles import aiconfigurator
from bench.profiles.hold_out import grid_errors

MARK = b"pat_hold_out"


def path_of(out: Path) -> Path:
    return out / "raw" / "hold-out.parquet"


def write_hold_out(out: Path, experiments: Iterable[Experiment]) -> None:
    """Measure the grids that predicted cells use, unless the record is of these grids already."""
    cells = {(e.model, e.cluster.gpu) for e in experiments if e.tier == "predicted"}
    wanted = sorted(cell for cell in cells if cell[1] in aiconfigurator.SYSTEMS)
    mark = repr((version(aiconfigurator.PACKAGE), aiconfigurator.BUILDER, wanted)).encode()
    path = path_of(out)
    if not wanted or (path.is_file() and mark_of(path) == mark):
        return
    table = pa.Table.from_pandas(pd.concat([grid_errors(*one) for one in wanted]), preserve_index=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pq.write_table(table.replace_schema_metadata({MARK: mark}), partial)
    partial.replace(path)


def read_hold_out(out: Path) -> pd.DataFrame | None:
    """Columns of :func:`bench.profiles.hold_out.grid_errors`; None where there is no record."""
    path = path_of(out)
    return pq.read_table(path).to_pandas() if path.is_file() and mark_of(path) else None


def mark_of(path: Path) -> bytes | None:
    """What the record is of; None where it is spoilt."""
    try:
        return pq.read_schema(path).metadata.get(MARK)
    except (OSError, ValueError, AttributeError):
        return None
