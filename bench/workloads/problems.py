"""Math problems in DeepScaleR's schema: from the hub, from a file, or generated here."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from bench.errors import UserError
from bench.workloads.builtin import builtin_problems

HUB_DATASET = "agentica-org/DeepScaleR-Preview-Dataset"
SUFFIXES = (".json", ".jsonl", ".parquet")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Problem:
    """``answer`` as text, also where the source has a number."""

    problem: str
    answer: str

    @property
    def problem_id(self) -> str:
        """Stable from run to run and source to source: a hash of the text."""
        return hashlib.sha256(self.problem.encode()).hexdigest()[:12]


def load_problems(source: str) -> list[Problem]:
    """``builtin``, ``hub``, or a JSON, JSONL or Parquet file. UserError names file, index and field of a bad record.

    Records whose answer is null or empty, which DeepScaleR has too, are left out with a warning.
    """
    if source == "builtin":
        records, name = builtin_problems(count=2048, seed=0), "builtin"
    elif source == "hub":
        records, name = hub_records(), HUB_DATASET
    else:
        records, name = file_records(Path(source)), source
    problems = [checked(record, name, index) for index, record in enumerate(records)]
    unanswered = [index for index, problem in enumerate(problems) if not problem.answer]
    if unanswered:
        log.warning("dataset %s: records %s have an empty answer and are left out", name, unanswered)
    problems = [problem for problem in problems if problem.answer]
    if not problems:
        raise UserError(f"dataset {name}: holds no problems; give one with at least a record")
    return problems


def checked(record: object, name: str, index: int) -> Problem:
    """One record as a Problem, or a UserError."""
    where = f"dataset {name}, record {index}"
    if not isinstance(record, dict):
        raise UserError(f"{where}: not an object with the fields problem and answer")
    for field in ("problem", "answer"):
        if field not in record:
            raise UserError(f"{where}: lacks the field {field!r}; DeepScaleR's schema has problem and answer")
    problem, answer = record["problem"], record["answer"]
    if not isinstance(problem, str) or not problem.strip():
        raise UserError(f"{where}: problem must be text that is not empty, not {problem!r}")
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float, type(None))):
        raise UserError(f"{where}: answer must be text or a number, not {answer!r}")
    return Problem(problem, answer_text(answer))


def answer_text(answer: str | float | None) -> str:
    """``142.0`` -> ``"142"``: some files hold whole answers as floats. Empty where there is none."""
    if answer is None or answer != answer:
        return ""
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer).strip()


def file_records(path: Path) -> list:
    """The records of a file, unchecked."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"dataset {path}: must be builtin, hub, or a file ending in {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise UserError(f"dataset {path}: no such file")
    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path).to_dict("records")
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            return [json_line(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        records = json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"dataset {path}: cannot be read as {path.suffix[1:]} ({error})") from None
    if not isinstance(records, list):
        raise UserError(f"dataset {path}: must be a list of records")
    return records


def json_line(path: Path, number: int, line: str) -> object:
    """A line of a JSONL file, or a UserError that names it."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"dataset {path}, line {number}: not JSON ({error.msg}); give one object a line") from None


def hub_records() -> list[dict]:
    """DeepScaleR's preview set through Hugging Face's ``datasets``; UserError where the hub cannot be reached."""
    from datasets import load_dataset

    try:
        return load_dataset(HUB_DATASET, split="train").to_list()
    except Exception as error:
        raise UserError(
            f"dataset hub: {HUB_DATASET} cannot be loaded ({type(error).__name__}); "
            "check the network, or give --dataset a file of the same schema or builtin"
        ) from None
