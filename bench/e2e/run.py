"""bench e2e: GRPO iterations of real VeRL, arm after arm on the same prompts and seeds; records, report."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from bench.backends.engine_arguments import EngineError
from bench.e2e import reward
from bench.e2e.adaptive import adaptive_files
from bench.e2e.data import write_data, write_trace
from bench.e2e.experiment import E2eExperiment, load_e2e
from bench.e2e.iterations import Iteration, IterationStore, parse
from bench.e2e.launch import command, launch
from bench.e2e.warm_model import WARM_MODELS, train_missing, warm_model
from bench.errors import UserError
from bench.gen import console, progress_bar
from bench.gen_measured import HUB_NAMES
from bench.gpus import local_devices, serves
from bench.measured import interleaved, step_rows
from bench.provenance import load_average, provenance
from bench.records import fingerprint_of
from bench.tracking import make_tracker, step_metrics
from pat.layout import Layout
from pat.sglang.step_log import read_steps
from pat.verl.overrides import GrpoRun, environment
from pat.verl.settings import PatSettings

DEFAULT = ("cpu-llama-e2e", "cpu-qwen3-e2e")
CPU_LIMIT_S = 900.0
AGREE = 1e-4
"""Most that probabilities of rollout and trainer may differ in float32; 1e-5 is usual."""
NO_GAIN = 1e9
"""A margin, in multiples of a switch's cost, that no switch saves."""


@dataclass(frozen=True)
class Options:
    """The command line of ``bench e2e``; see its help."""

    experiments: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()
    iterations: int | None = None
    seed: int | None = None
    dataset: str | None = None
    model: str | None = None
    ray_address: str | None = None
    tracker: str = "wandb"
    out: Path = Path("results")
    dry_run: bool = False
    fresh: bool = False


def run(options: Options) -> None:
    """All of it. UserError for bad input, before anything runs; an arm that fails leaves the others' records."""
    experiments = [adjusted(load_e2e(name), options) for name in options.experiments or DEFAULT]
    if options.out.exists() and not options.out.is_dir():
        raise UserError(f"--out {options.out}: is not a folder; give one, or a name that is free")
    if options.dry_run:
        for experiment in experiments:
            print(describe(experiment, options))
        return
    for experiment in experiments:
        check_machine(experiment, options.ray_address)
    tracker = make_tracker(options.tracker, options.out)
    if warm := sorted({e.model for e in experiments if e.model in WARM_MODELS} if options.model is None else ()):
        console.print(f"{', '.join(warm)}: trained for about a minute where not in the cache")
        train_missing(warm)
    failed = []
    try:
        with progress_bar() as progress:
            for experiment in experiments:
                failed += run_experiment(experiment, options, tracker, progress)
    finally:
        tracker.finish()
    from bench.report.e2e import render_e2e

    console.print(f"report: {render_e2e(options.out)}")
    if failed:
        raise UserError("\n".join(failed))


def adjusted(experiment: E2eExperiment, options: Options) -> E2eExperiment:
    """The experiment with the command line's changes."""
    unknown = [arm for arm in options.arms if arm not in experiment.arm_names]
    if unknown:
        raise UserError(f"--arm {unknown[0]}: {experiment.name} has {', '.join(experiment.arm_names)}")
    changes = {"iterations": options.iterations, "seeds": None if options.seed is None else (options.seed,)}
    found = experiment.model_copy(update={name: value for name, value in changes.items() if value is not None})
    if found.iterations < 2:
        raise UserError("--iterations: the first is discarded as warm-up; give at least 2")
    return found


def check_machine(experiment: E2eExperiment, ray_address: str | None) -> None:
    """UserError where neither this machine nor a Ray cluster can run the experiment."""
    if experiment.device == "cpu" or ray_address is not None:
        return
    cluster = experiment.cluster
    if cluster.nodes > 1 or not serves(cluster.gpu, cluster.gpus_per_node, local_devices()):
        raise UserError(
            f"{experiment.name}: needs {cluster.nodes} node(s) of {cluster.gpus_per_node} {cluster.gpu}, unlike this "
            "machine; give --ray-address of a cluster, or --dry-run to see what would be launched"
        )


def run_experiment(experiment: E2eExperiment, options: Options, tracker, progress) -> list[str]:
    """Every launch (seed and arm) that has no kept records; returns what failed."""
    store = IterationStore(options.out, experiment.name)
    work = store.steps_folder.resolve()
    todo = interleaved(experiment.seeds, options.arms or experiment.arm_names)
    same = (experiment.model_dump_json(), options.dataset, options.model, harness_hash())
    marks = {one: fingerprint_of(*same, *one) for one in todo}
    kept = Counter() if options.fresh else Counter(record.fingerprint for record in store.read().values())
    whole = [one for one in todo if kept[marks[one]] == experiment.iterations]
    made = {"experiment": experiment.model_dump(mode="json"), "fingerprints": list(marks.values())}
    store.write_made(made | {"provenance": provenance()})
    task = progress.add_task(experiment.name, total=experiment.iterations * len(todo))
    progress.advance(task, experiment.iterations * len(whole))
    todo = [one for one in todo if one not in whole]
    if not todo:
        return []
    model_path = model_of(experiment, options.model)
    tracker.start(f"{experiment.name}", experiment.model_dump(mode="json"))
    failed = []
    for seed, arm in todo:
        files, done, taken = Files.of(experiment, work, arm, seed), [0], None
        folder = files.folder
        write_data(experiment, seed, options.dataset, files.data)
        if files.trace is not None:
            write_trace(experiment, seed, files.trace)

        def advanced(count: int, done=done) -> None:
            progress.advance(task, count - done[0])
            done[0] = count

        try:
            grpo = grpo_run(experiment, arm, seed, model_path, files, options)
            shutil.rmtree(folder / "records", ignore_errors=True)
            taken = launch(grpo, folder, CPU_LIMIT_S if experiment.device == "cpu" else float("inf"), advanced)
        except (UserError, EngineError) as error:
            failed.append(f"{experiment.name}, {arm}, seed {seed}: {error}")
        finally:  # Ctrl-C included: what was measured is kept
            seen = {"load_average": load_average(), "memory_bytes": taken}
            found = parse(folder, experiment.name, arm, seed, marks[seed, arm])
            if astray := disagreement(found) if experiment.device == "cpu" else None:
                failed.append(f"{experiment.name}, {arm}, seed {seed}: {astray}")
                found = [record.model_copy(update={"fingerprint": ""}) for record in found]
            store.append([record.model_copy(update=seen) for record in found])
        log_launch(tracker, f"{arm}/{seed}", found, folder)
    store.tidy()
    tracker.finish()
    return failed


def disagreement(found: list[Iteration]) -> str | None:
    """What is wrong where the rollout's log-probabilities are not the trainer's: such a launch proves nothing."""
    name = "training/rollout_probs_diff_max"
    worst = max(found, key=lambda record: record.metrics.get(name, 0.0), default=None)
    if worst is None or worst.metrics.get(name, 0.0) <= AGREE:
        return None
    return (
        f"iteration {worst.iteration}: probabilities of rollout and trainer differ by {worst.metrics[name]:.1e}, in "
        f"float32 at most {AGREE:g}; its records are set aside, run it again"
    )


def harness_hash() -> str:
    """Of the sources beside those of :func:`bench.records.code_hash` that decide what VeRL does."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def log_launch(tracker, name: str, found: list[Iteration], folder: Path) -> None:
    """VeRL's metrics, a row an iteration, and the latency of each decode step from the step log."""
    logged = {name: (metrics_of(found), {})}
    with suppress(TimeoutError, OSError, ValueError):  # an engine that was killed leaves no whole log
        logged[f"{name}/steps"] = step_metrics(step_rows(read_steps(folder / "records" / "steps", wait_s=0.0))), {}
    tracker.rollouts(logged)


def metrics_of(found: list[Iteration]) -> pd.DataFrame:
    """A row an iteration, VeRL's metric names."""
    return pd.DataFrame([record.metrics for record in found]).fillna(0.0)


def model_of(experiment: E2eExperiment, given: str | None) -> str:
    """A warm-started model made here, a directory, or the hub's name of the paper's models."""
    if given is not None:
        return given
    if experiment.model in WARM_MODELS:
        return str(warm_model(experiment.model))
    return HUB_NAMES.get(experiment.model, experiment.model)


def settings_of(experiment: E2eExperiment, arm: str, folder: Path, trace: Path | None, files: dict) -> PatSettings:
    """The rollout backend's options of an arm."""
    low, high = str(min(experiment.node_layouts)), str(max(experiment.node_layouts))
    every = tuple(map(str, experiment.node_layouts))
    common = {
        "records": str(folder / "records"),
        "sequences": experiment.sequences // experiment.cluster.nodes,
        "trace": str(trace) if trace else None,
    }
    if arm.startswith("static-"):
        layout = str(Layout.parse(arm.removeprefix("static-")))
        return PatSettings(layouts=(layout,), start=layout, policy="static", **common)
    if arm == "pat-forced":
        forced = ((experiment.forced_alive, high),)
        return PatSettings(layouts=every, start=low, policy="thresholds", thresholds=forced, **common)
    if arm == "pat-still":
        start = experiment.verl_default.removeprefix("static-")
        return PatSettings(layouts=every, start=start, policy="adaptive", margin=NO_GAIN, **files, **common)
    return PatSettings(layouts=every, policy="adaptive", **files, **common)


@dataclass(frozen=True)
class Files:
    """Where a launch has its own, the prompts of its seed, and the forced lengths of its seed, if there are any."""

    folder: Path
    data: Path
    trace: Path | None

    @classmethod
    def of(cls, experiment: E2eExperiment, work: Path, arm: str, seed: int) -> Files:
        trace = work / f"trace-{seed}.json" if experiment.lengths else None
        return cls(work / arm / f"seed-{seed}", work / f"train-{seed}.parquet", trace)


def grpo_run(
    experiment: E2eExperiment, arm: str, seed: int, model_path: str, files: Files, options: Options
) -> GrpoRun:
    """What VeRL is launched with for an arm and seed."""
    planned = arm in ("pat", "pat-still")
    plan = adaptive_files(experiment, model_path, files.folder, options.dry_run) if planned else {}
    return GrpoRun(
        model_path=model_path,
        train_files=(str(files.data),),
        ranks=experiment.cluster.gpus_per_node,
        nodes=experiment.cluster.nodes,
        settings=settings_of(experiment, arm, files.folder, files.trace, plan),
        reward=(str(Path(reward.__file__).resolve()), "compute_score"),
        prompts=experiment.prompts,
        samples=experiment.samples,
        max_prompt_tokens=experiment.max_prompt_tokens,
        max_response_tokens=experiment.max_response_tokens,
        steps=experiment.iterations,
        learning_rate=experiment.learning_rate,
        micro_batch=experiment.micro_batch,
        kl_coef=experiment.kl_coef,
        seed=seed,
        device=experiment.device,
        ray_address=options.ray_address,
        checkpoint_directory=str(files.folder / "checkpoints"),
        experiment=f"{experiment.name}-{arm}",
    )


def describe(experiment: E2eExperiment, options: Options) -> str:
    """Markdown: the command and environment of each arm, with the first seed."""
    work = IterationStore(options.out, experiment.name).steps_folder
    model = options.model or HUB_NAMES.get(experiment.model, experiment.model)
    seed = experiment.seeds[0]
    others = f"; seeds {', '.join(map(str, experiment.seeds))}, shown: {seed}" if len(experiment.seeds) > 1 else ""
    parts = [f"# {experiment.name}: {experiment.iterations} iterations a launch, the first discarded{others}"]
    for arm in options.arms or experiment.arm_names:
        files = Files.of(experiment, work, arm, seed)
        grpo = grpo_run(experiment, arm, seed, model, files, options)
        variables = " ".join(f"{k}='{v}'" for k, v in environment(grpo, files.folder / "metrics.jsonl").items())
        lines = " \\\n  ".join(
            ["python -m verl.trainer.main_ppo", *(f'"{override}"' for override in command(grpo)[3:])]
        )
        parts.append(f"## {arm}\n\n```\nexport {variables}\n{lines}\n```")
    return "\n\n".join(parts) + "\n"
