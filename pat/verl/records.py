"""What the rollout server writes down, in the directory ``records`` of its settings."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RolloutRecord:
    """One rollout, as the server saw it.

    iteration       VeRL's global step
    begin_s, end_s  time.time() from the first request's arrival to the last one's answer
    gather_s        of it, until all requests had arrived and the policy had chosen the first layout
    start, end      layouts it began and ended in
    places          [n] each request's place in the batch; the others in the same order
    prompt_tokens, response_tokens   [n]
    prompts         [n] a hash of each prompt's tokens, the same for its samples and in later iterations
    switches        those of the rollout itself, as :meth:`pat.sglang.record.SwitchRecord.as_row`
    decisions       each question to the policy: time_s (since the rollout's begin), layout, alive, decide_s, answer
    reports_s       of the rollout, spent on reports of running sequences, by the replica that spent most
    expected_s      what the planner expected of the rollout as it began; None for other policies
    lengths_known   earlier responses that the length model was fitted to
    error           what failed in the policy or a switch, with the rollout going on in its layout
    """

    iteration: int
    begin_s: float
    end_s: float
    gather_s: float
    start: str
    end: str
    places: list[int]
    prompt_tokens: list[int]
    response_tokens: list[int]
    prompts: list[str]
    switches: list[dict[str, Any]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    reports_s: float = 0.0
    expected_s: float | None = None
    lengths_known: int = 0
    error: str | None = None


@dataclass(frozen=True)
class SyncRecord:
    """One weight sync: buckets and bytes that came in ``seconds``, while the engine was in ``before``; then it went to
    ``after``, in ``return_s`` (0 where it was there already)."""

    iteration: int
    end_s: float
    seconds: float
    buckets: int
    bytes: int
    before: str
    after: str
    return_s: float


class RecordFiles:
    """Appends records to files of a directory; None: nowhere."""

    def __init__(self, directory: str | None) -> None:
        self.directory = Path(directory) if directory else None
        if self.directory:
            self.directory.mkdir(parents=True, exist_ok=True)

    def engine(self, facts: dict[str, Any]) -> None:
        if self.directory:
            (self.directory / "engine.json").write_text(json.dumps(facts, indent=1, default=str))

    def rollout(self, record: RolloutRecord) -> None:
        self._append("rollouts.jsonl", record)

    def sync(self, record: SyncRecord) -> None:
        self._append("syncs.jsonl", record)

    def _append(self, name: str, record: RolloutRecord | SyncRecord) -> None:
        if self.directory:
            with (self.directory / name).open("a") as file:
                file.write(json.dumps(asdict(record), default=str) + "\n")
