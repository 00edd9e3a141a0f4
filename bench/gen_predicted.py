"""Running the predicted cells of bench-gen, in parallel over cores."""

from __future__ import annotations

import numpy as np
import pandas as pd

from bench.errors import UserError
from bench.experiment import Experiment
from bench.machine import machine_of
from bench.parallel import parallel
from bench.predicted import Cell, run_cell, trace_of
from bench.provenance import provenance
from bench.records import RecordStore, RolloutSummary, fingerprint_of
from bench.tracking import MAX_PREDICTED_STEPS, step_metrics, summary_metrics
from bench.workloads.prompts import chosen, estimated_tokens
from bench.workloads.trace import LengthTrace

Result = list[tuple[RolloutSummary, pd.DataFrame | None]]


def run_predicted(experiments: list[Experiment], workload, options, tracker, progress) -> None:
    """Simulate every cell that is not kept; records are written as each experiment's cells end."""
    if not experiments:
        return
    work, traces, marks = [], {}, {}
    for experiment in experiments:
        for host in experiment.host_terms:  # builds the step grids, once, and refuses what cannot run
            machine_of(experiment, host)
        for cell in cells_of(experiment):
            trace = cell_trace(cell, workload)
            traces.setdefault(experiment.name, {})[cell.batch, cell.seed] = trace
            mark = fingerprint_of(experiment.model_dump_json(), cell.batch, cell.host_term, cell.seed, trace.sha256)
            marks.setdefault(experiment.name, []).append(mark)
            work.append((cell, trace, mark))
    tracker.start("predicted", {"experiments": [e.name for e in experiments]})
    task = progress.add_task("predicted cells", total=len(work))
    stores = {e.name: RecordStore(options.out, e.name) for e in experiments}
    for experiment in experiments:
        made = made_of(experiment, traces[experiment.name], marks[experiment.name])
        stores[experiment.name].write_made(made)
    kept = {name: {} if options.fresh else store.read() for name, store in stores.items()}

    def finished(result: Result) -> None:
        store = stores[result[0][0].experiment]
        logged = {}
        for record, steps in result:
            trace = traces[record.experiment][record.batch, record.seed]
            if steps is not None:
                store.write_steps(record, steps)
            metrics = step_metrics(steps, MAX_PREDICTED_STEPS) if steps is not None else pd.DataFrame()
            name = f"{record.experiment}/{record.arm}/{record.batch}/{record.host_term}/{record.seed}"
            logged[name] = metrics, summary_metrics(record, trace)
        tracker.rollouts(logged)
        store.append([record for record, _ in result])
        progress.advance(task)

    pending = []
    for cell, trace, mark in work:
        if any(r.fingerprint == mark for r in kept[cell.experiment.name].values()):
            progress.advance(task)
        else:
            pending.append((cell, trace, mark))
    for _, result in parallel(run_one, pending, alone=True):
        finished(result)
    for store in stores.values():
        store.tidy()
    for trace in {t.sha256: t for by_cell in traces.values() for t in by_cell.values()}.values():
        trace.write(options.out / "raw" / "traces" / f"{trace.sha256[:12]}.jsonl")
    tracker.finish()


def cells_of(experiment: Experiment) -> list[Cell]:
    return [
        Cell(experiment, batch, host, seed)
        for batch in experiment.batches
        for host in experiment.host_terms
        for seed in experiment.seeds
    ]


def cell_trace(cell: Cell, workload) -> LengthTrace:
    """The trace of a cell: replayed where one is given, else synthetic; with the dataset's prompts where asked."""
    experiment = cell.experiment
    trace = workload.trace or trace_of(experiment, cell.batch, cell.seed)
    if trace.response_tokens.max() < 2:
        raise UserError(f"experiment {experiment.name}: no response has a second token to decode; give longer lengths")
    if workload.problems is None:
        return trace
    samples = experiment.samples_per_prompt
    problems = chosen(workload.problems, cell.batch // samples, cell.seed)
    tokens = [estimated_tokens(p, experiment.max_prompt_tokens) for p in problems]
    ids = [p.problem_id for p in problems]
    return trace.with_prompts(np.repeat(ids, samples).tolist(), np.repeat(tokens, samples).tolist())


def made_of(experiment: Experiment, traces: dict[tuple[int, int], LengthTrace], marks: list[str]) -> dict:
    """How an experiment's records are made: its fields, its traces, the fingerprints of its rollouts, provenance."""
    rows = [
        {"experiment": experiment.name, "batch": batch, "seed": seed} | trace.summary()
        for (batch, seed), trace in sorted(traces.items())
    ]
    return {
        "experiment": experiment.model_dump(mode="json"),
        "traces": rows,
        "fingerprints": marks,
        "provenance": provenance(),
    }


def run_one(work: tuple[Cell, LengthTrace, str]) -> Result:
    """One cell in a worker process; steps of the first batch, host term and seed alone are kept."""
    cell, trace, mark = work
    e = cell.experiment
    shown = (cell.batch, cell.host_term, cell.seed) == (e.batches[0], e.host_terms[0], e.seeds[0])
    return [
        (record.model_copy(update={"fingerprint": mark}), pd.DataFrame(rollout.segments) if shown else None)
        for record, rollout in run_cell(cell, trace)
    ]
