"""Length traces: how long every prompt and response of a rollout is. All arms of a comparison run the same one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.stats import norm

from bench.errors import UserError
from bench.files import write_whole
from bench.workloads.lengths import LengthDistribution

FIELDS = {"prompt_id": str, "sample": int, "prompt_tokens": int, "response_tokens": int, "truncated": bool}
PROMPT_MU, PROMPT_SIGMA, PROMPT_RANGE = 4.9, 0.5, (16, 1024)
"""Synthetic prompts: log-normal around 134 tokens, clipped: about that of competition problems in a chat template."""

MAX_TOKENS = 2**31 - 1
"""The largest number a row may hold."""


@dataclass(frozen=True, eq=False)
class LengthTrace:
    """One row a sequence, arrays [N]. ``truncated``: the response was cut at the cap."""

    prompt_id: np.ndarray
    sample: np.ndarray
    prompt_tokens: np.ndarray
    response_tokens: np.ndarray
    truncated: np.ndarray

    def __len__(self) -> int:
        return len(self.response_tokens)

    def rows(self) -> list[dict]:
        columns = [getattr(self, name).tolist() for name in FIELDS]
        return [dict(zip(FIELDS, row, strict=True)) for row in zip(*columns, strict=True)]

    def lines(self) -> str:
        return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in self.rows())

    @cached_property
    def sha256(self) -> str:
        """Of the rows as :meth:`write` writes them: equal traces have equal hashes."""
        return hashlib.sha256(self.lines().encode()).hexdigest()

    def write(self, path: Path) -> None:
        write_whole(path, self.lines())

    def summary(self) -> dict:
        """Statistics of the response lengths, tokens; shares of 1."""
        lengths = self.response_tokens
        return {
            "sequences": len(self),
            "sha256": self.sha256,
            "mean": float(lengths.mean()),
            "median": float(np.median(lengths)),
            "p90": float(np.percentile(lengths, 90)),
            "p99": float(np.percentile(lengths, 99)),
            "max": int(lengths.max()),
            "share_over_8192": float((lengths > 8192).mean()),
            "share_at_cap": float(self.truncated.mean()),
            "total_tokens": int(lengths.sum()),
        }

    def with_prompts(self, prompt_id: list[str], prompt_tokens: list[int]) -> LengthTrace:
        """The same responses to other prompts [N]."""
        ids, tokens = np.asarray(prompt_id, dtype=object), np.asarray(prompt_tokens, dtype=np.int64)
        return LengthTrace(ids, self.sample, tokens, self.response_tokens, self.truncated)

    @classmethod
    def of(cls, prompt_id, sample, prompt_tokens, response_tokens, cap_tokens: int) -> LengthTrace:
        """From sequences as a run recorded them; those at the cap count as truncated."""
        response = np.asarray(response_tokens, dtype=np.int64)
        return cls(
            np.asarray(prompt_id, dtype=object),
            np.asarray(sample, dtype=np.int64),
            np.asarray(prompt_tokens, dtype=np.int64),
            response,
            response >= cap_tokens,
        )


def read_trace(path: Path) -> LengthTrace:
    """A JSONL file of rows with exactly the fields of :class:`LengthTrace`; UserError names line and field."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"trace {path}: cannot be read ({error}); give a JSONL file of length rows") from None
    rows = [check_row(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise UserError(f"trace {path}: holds no rows; give one JSON object a line with {', '.join(FIELDS)}")
    columns = {name: [row[name] for row in rows] for name in FIELDS}
    return LengthTrace(
        np.asarray(columns["prompt_id"], dtype=object),
        *(np.asarray(columns[name], dtype=np.int64) for name in ("sample", "prompt_tokens", "response_tokens")),
        np.asarray(columns["truncated"], dtype=bool),
    )


def check_row(path: Path, number: int, line: str) -> dict:
    """One row, or a UserError that names the field."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"trace {path}, line {number}: not JSON ({error.msg})") from None
    if not isinstance(row, dict):
        raise UserError(f"trace {path}, line {number}: not an object with {', '.join(FIELDS)}")
    for name, kind in FIELDS.items():
        if name not in row:
            raise UserError(f"trace {path}, line {number}: lacks the field {name!r}")
        if type(row[name]) is not kind:
            raise UserError(f"trace {path}, line {number}: {name} must be {kind.__name__}, not {row[name]!r}")
    for name, least in (("sample", 0), ("prompt_tokens", 1), ("response_tokens", 1)):
        if row[name] < least:
            raise UserError(f"trace {path}, line {number}: {name} must be at least {least}, not {row[name]}")
        if row[name] > MAX_TOKENS:
            raise UserError(f"trace {path}, line {number}: {name} must be at most {MAX_TOKENS}, not {row[name]}")
    if unknown := set(row) - set(FIELDS):
        raise UserError(f"trace {path}, line {number}: unknown field {sorted(unknown)[0]!r}")
    return row


def synthetic_trace(
    distribution: LengthDistribution,
    prompts: int,
    samples: int,
    max_response_tokens: int,
    seed: int,
    prompt_share: float = 0.5,
) -> LengthTrace:
    """``samples`` responses to each of ``prompts`` prompts, N = prompts x samples, in the order of the prompts.

    Responses to one prompt are alike: a Gaussian copula gives the prompt ``prompt_share`` of the variance, so that
    each length alone still follows ``distribution`` exactly. The same seed gives the same trace.
    """
    if not 0 <= prompt_share <= 1:
        raise UserError(f"prompt_share must lie between 0 and 1, not {prompt_share}")
    rng = np.random.default_rng([seed, prompts, samples])
    shared, own = rng.standard_normal((prompts, 1)), rng.standard_normal((prompts, samples))
    score = np.sqrt(prompt_share) * shared + np.sqrt(1 - prompt_share) * own
    response = distribution.tokens(norm.cdf(score).ravel(), max_response_tokens)
    prompt = np.exp(PROMPT_MU + PROMPT_SIGMA * rng.standard_normal(prompts)).round().clip(*PROMPT_RANGE)
    return LengthTrace.of(
        np.repeat([f"synthetic-{i}" for i in range(prompts)], samples),
        np.tile(np.arange(samples), prompts),
        np.repeat(prompt, samples),
        response,
        max_response_tokens,
    )
