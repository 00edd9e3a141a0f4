"""bench-gen: run the rollouts of experiments, log them, keep what is finished, render the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.dry_run import describe, matching_cells
from bench.errors import UserError
from bench.experiment import Experiment, known_experiments, load_experiment
from bench.gen_measured import run_measured
from bench.gen_predicted import run_predicted
from bench.hold_out import write_hold_out
from bench.progress import console, progress_bar
from bench.report import sensitivity
from bench.report.gen import recorded, render
from bench.report.paper import render_paper
from bench.report.predictor import render_predictor
from bench.tracking import make_tracker
from bench.workloads.problems import Problem, load_problems
from bench.workloads.trace import LengthTrace, read_trace


@dataclass(frozen=True)
class Options:
    """The command line of ``bench gen``; see its help."""

    experiments: tuple[str, ...] = ()
    seeds: int | None = None
    dataset: str | None = None
    trace: Path | None = None
    tier: str | None = None
    model: str | None = None
    tracker: str = "wandb"
    out: Path = Path("results")
    dry_run: bool = False
    fresh: bool = False
    profile: Path | None = None
    force_profile: bool = False


@dataclass(frozen=True, eq=False)
class Workload:
    """What the command line fixes for all experiments: problems to draw prompts from, and a trace to replay."""

    problems: list[Problem] | None
    trace: LengthTrace | None
    source: str

    @classmethod
    def of(cls, options: Options) -> Workload:
        problems = load_problems(options.dataset) if options.dataset else None
        trace = read_trace(options.trace) if options.trace else None
        return cls(problems, trace, f"prompts {options.dataset or 'default'}")


def run(options: Options) -> None:
    """All of it. UserError for bad input, before anything runs."""
    experiments = [adjusted(load_experiment(name), options) for name in options.experiments or known_experiments()]
    if options.out.exists() and not options.out.is_dir():
        raise UserError(f"--out {options.out}: is not a folder; give one, or a name that is free")
    tracker = make_tracker(options.tracker, options.out)
    workload = Workload.of(options)
    for experiment in experiments:
        check_trace(experiment, workload.trace)
    if options.dry_run:
        for experiment in experiments:
            print(describe(experiment, options.model))
        return
    for line in matching_cells(known_experiments()):
        console.print(line)
    predicted = [e for e in experiments if e.tier == "predicted"]
    measured = [e for e in experiments if e.tier == "measured"]
    try:
        with progress_bar() as progress:
            run_predicted(predicted, workload, options, tracker, progress)
            run_measured(measured, workload, options, tracker, progress)
    finally:
        tracker.finish()
    path = render(options.out)
    write_hold_out(options.out, [one.experiment for one in recorded(options.out)])
    reports = [path, render_predictor(options.out)]
    section = None
    if not options.experiments:
        section = sensitivity.sensitivity_section(options.out)
        reports.append(sensitivity.write_page(options.out, section))
    paper = render_paper(options.out, section)
    reports += [paper] if paper else []
    console.print(f"reports: {', '.join(map(str, reports))}")
    if not paper:
        console.print("paper.md needs the records of all cells: run `python -m bench gen`")


def adjusted(experiment: Experiment, options: Options) -> Experiment:
    """The experiment with the command line's changes."""
    changes: dict = {}
    if options.seeds is not None:
        changes["seeds"] = tuple(range(options.seeds))
    if options.tier is not None:
        if options.tier not in ("predicted", "measured"):
            raise UserError(f"--tier must be predicted or measured, not {options.tier!r}")
        if experiment.cluster.gpu == "cpu" and options.tier == "predicted":
            raise UserError(f"experiment {experiment.name} has no step profile to predict from; leave --tier out")
        changes["tier"] = options.tier
    if options.trace is not None:
        trace = read_trace(options.trace)
        changes["batches"] = (len(trace),)
        changes["samples_per_prompt"] = len(trace) // len(set(trace.prompt_id)) if grouped(trace) else 1
    return experiment.model_copy(update=changes)


def grouped(trace: LengthTrace) -> bool:
    """Whether every prompt has as many responses as any other, and they stand together."""
    ids = trace.prompt_id
    samples = len(trace) // len(set(ids))
    starts = ids[::samples]
    return len(trace) % samples == 0 and len(set(starts)) == len(starts) and all(ids == starts.repeat(samples))


def check_trace(experiment: Experiment, trace: LengthTrace | None) -> None:
    """UserError where the trace to replay has prompts or responses beyond the experiment's caps."""
    for part in ("prompt", "response") if trace is not None else ():
        longest, cap = int(getattr(trace, f"{part}_tokens").max()), getattr(experiment, f"max_{part}_tokens")
        if longest > cap:
            raise UserError(
                f"--trace: a {part} of {longest} tokens exceeds max_{part}_tokens {cap} of {experiment.name}; "
                "choose an experiment with a higher cap"
            )
