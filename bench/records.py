"""Raw records: one line a finished rollout, one Parquet file for the steps of those that are plotted."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal, Self

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from bench.files import write_whole
from bench.provenance import ROOT

SCHEMA = 1
log = logging.getLogger(__name__)


class RolloutSummary(BaseModel):
    """One rollout of one arm. ``batch`` counts sequences; tokens_per_s = response tokens / rollout seconds, all GPUs;
    ``layouts``: (seconds from the start, layout) of the first layout and after each switch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experiment: str
    arm: str
    tier: Literal["predicted", "measured"]
    batch: int
    host_term: str
    seed: int
    layouts: list[tuple[float, str]]
    rollout_s: float = Field(gt=0)
    prompt_tokens: int
    response_tokens: int
    tokens_per_s: float
    decode_p50_ms: float
    decode_p90_ms: float
    decode_p99_ms: float
    switches: list[dict] = []
    retractions: int = 0
    trace_sha256: str
    physical_limit_s: float | None = None
    extrapolated: bool = False
    load_average: float | None = None
    fingerprint: str = ""

    @property
    def key(self) -> tuple:
        """What tells a rollout from the others of its experiment."""
        return (self.arm, self.batch, self.host_term, self.seed)


class RecordStore:
    """The records of one experiment under ``OUT/raw``: ``NAME.jsonl`` (a line a rollout, the last of a key counts),
    ``NAME.made.json`` (experiment, traces, provenance) and ``NAME.steps/*.parquet``. ``kind``: class of a record."""

    kind: type[BaseModel] = RolloutSummary

    def __init__(self, out: Path, experiment: str) -> None:
        self.folder = out / "raw"
        self.path = self.folder / f"{experiment}.jsonl"
        self.made_path = self.folder / f"{experiment}.made.json"
        self.steps_folder = self.folder / f"{experiment}.steps"

    @classmethod
    def all_of(cls, out: Path, experiment: type[BaseModel]) -> Iterator[tuple[Self, dict, BaseModel]]:
        """(store, ``made``, the experiment in it) of every one in ``out``; where ``made`` cannot be read, none, with a
        warning."""
        for path in sorted(cls(out, "").folder.glob("*.made.json")):
            store = cls(out, path.name.removesuffix(".made.json"))
            try:
                made = store.read_made()
                found = experiment.model_validate(made["experiment"])
            except (ValueError, KeyError) as error:
                log.warning("%s cannot be read and is left out: %s", path, error)
                continue
            yield store, made, found

    def read(self) -> dict[tuple, RolloutSummary]:
        """Every finished rollout by key. A line that is cut or spoilt is left out with a warning: it runs again."""
        found = {}
        lines = self.path.read_bytes().splitlines() if self.path.is_file() else []
        for number, line in enumerate(lines, start=1):
            try:
                record = self.kind.model_validate_json(line)
            except ValidationError:
                log.warning("%s, line %d is not a whole record and is left out", self.path, number)
                continue
            found[record.key] = record
        return found

    def append(self, records: list[RolloutSummary]) -> None:
        """Add finished rollouts; they are on disk when this returns."""
        self.folder.mkdir(parents=True, exist_ok=True)
        whole = not self.path.is_file() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a") as file:
            file.write(("" if whole else "\n") + "".join(r.model_dump_json() + "\n" for r in records))
            file.flush()
            os.fsync(file.fileno())

    def tidy(self) -> None:
        """Rewrite the file in the order of its keys, each once: the same records give the same bytes."""
        records = sorted(self.read().values(), key=lambda record: record.key)
        write_whole(self.path, "".join(record.model_dump_json() + "\n" for record in records))

    def current(self) -> list[RolloutSummary]:
        """The records of the last run: those that its ``made`` file lists by fingerprint."""
        wanted = set(self.read_made().get("fingerprints", ()))
        return [record for record in self.read().values() if record.fingerprint in wanted]

    def write_made(self, made: dict) -> None:
        write_whole(self.made_path, json.dumps(made, indent=1, sort_keys=True) + "\n")

    def read_made(self) -> dict:
        """What :meth:`write_made` wrote; empty, with a warning, where the file is spoilt."""
        try:
            return json.loads(self.made_path.read_text()) if self.made_path.is_file() else {}
        except ValueError:
            log.warning("%s is spoilt and counts as missing", self.made_path)
            return {}

    def steps_path(self, record: RolloutSummary) -> Path:
        return self.steps_folder / f"{record.arm}.{record.batch}.{record.host_term}.{record.seed}.parquet"

    def write_steps(self, record: RolloutSummary, steps: pd.DataFrame) -> None:
        path = self.steps_path(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        steps.to_parquet(partial, index=False)
        partial.replace(path)

    def read_steps(self, record: RolloutSummary) -> pd.DataFrame | None:
        """The steps of a rollout; None where none are kept and, with a warning, where the file is spoilt."""
        path = self.steps_path(record)
        try:
            return pd.read_parquet(path) if path.is_file() else None
        except (OSError, ValueError):
            log.warning("%s is spoilt and counts as missing", path)
            return None


def frame_of(records: list[RolloutSummary]) -> pd.DataFrame:
    """One row a rollout."""
    return pd.DataFrame([record.model_dump() for record in records])


def fingerprint_of(*parts: object) -> str:
    """Tells whether a kept rollout is still the one asked for: experiment, cell, trace, and the code that makes it."""
    text = json.dumps([SCHEMA, code_hash(), *map(str, parts)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def code_hash() -> str:
    """Of the sources that decide a rollout's numbers."""
    files = [
        p for part in ("pat", "baselines", "bench/backends", "bench/profiles") for p in (ROOT / part).rglob("*.py")
    ]
    files += [ROOT / "bench" / name for name in ("predicted.py", "measured.py", "machine.py", "live_arms.py")]
    content = b"".join(p.read_bytes() for p in sorted(files))
    return hashlib.sha256(content).hexdigest()
