"""The outcomes of the studies, kept in ``OUT/raw/paper.jsonl``: those missing are simulated."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

from bench.files import write_whole
from bench.paper.studies import Outcome, Task, run_task, tasks
from bench.parallel import parallel
from bench.progress import progress_bar
from bench.provenance import ROOT, provenance
from bench.records import code_hash

END = "end"
"""Arm of the line that says a task is whole."""


def mark_of() -> str:
    """Of everything that decides an outcome: the code, the experiments, the paper's figures."""
    files = [ROOT / "bench/data/paper.yaml", *(ROOT / "bench/experiments").glob("*.yaml")]
    files += [ROOT / "bench" / name for name in ("paper/setting.py", "paper/studies.py", "launch_plan.py")]
    content = b"".join(path.read_bytes() for path in sorted(files))
    return sha256(code_hash().encode() + content).hexdigest()[:16]


def read(path: Path) -> list[Outcome]:
    """The outcomes of this code in a file; lines that are spoilt or of other code are left out."""
    out, mark = [], mark_of()
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            outcome = Outcome(**json.loads(line))
        except (ValueError, TypeError):
            continue
        if outcome.mark == mark:
            out.append(outcome)
    return out


def outcomes(out: Path) -> list[Outcome]:
    """All outcomes, those missing simulated and added to ``OUT/raw/paper.jsonl``, with progress on stderr.

    A task that was interrupted runs again; the others are kept.
    """
    path, wanted, mark = out / "raw" / "paper.jsonl", tasks(), mark_of()
    found = read(path)
    ended = {o.task for o in found if o.arm == END}
    found = [o for o in found if o.task in ended]
    if missing := [task for task in wanted if task not in ended]:
        write_whole(path, "".join(map(line, found)))
        path.with_name("paper.provenance.json").write_text(json.dumps(provenance(), indent=1, sort_keys=True) + "\n")
        with path.open("a") as file, progress_bar() as bar:
            progress = bar.add_task("paper.md", total=len(wanted), completed=len(ended))
            for index, rows in parallel(run_task, missing):
                task = missing[index]
                rows = [*rows, Outcome(task.study, task.cell, task.change, END, -1, {})]
                rows = [replace(row, mark=mark) for row in rows]
                file.writelines(map(line, rows))
                file.flush()
                found += rows
                bar.advance(progress)
        tidy(path, found, wanted)
    order = {task: i for i, task in enumerate(wanted)}
    return sorted((o for o in found if o.task in order and o.arm != END), key=lambda o: order[o.task])


def tidy(path: Path, found: list[Outcome], wanted: list[Task]) -> None:
    """Rewrite the file in the order of the tasks: the same outcomes give the same bytes."""
    order = {task: i for i, task in enumerate(wanted)}
    write_whole(path, "".join(map(line, sorted((o for o in found if o.task in order), key=lambda o: order[o.task]))))


def line(outcome: Outcome) -> str:
    return json.dumps(asdict(outcome), sort_keys=True) + "\n"
