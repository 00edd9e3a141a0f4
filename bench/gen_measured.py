"""Running the measured experiments of bench-gen, one rollout at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bench.errors import UserError
from bench.experiment import Experiment
from bench.gen_predicted import made_of
from bench.gpus import local_devices, serves
from bench.measured import Engines, Job, arms_of, interleaved, run_jobs, step_rows, summarise
from bench.predicted import trace_of
from bench.profiles.stored import identity, load_given, recorded_path
from bench.provenance import load_average
from bench.records import RecordStore, fingerprint_of
from bench.tiny_models import PRESETS, materialise
from bench.tracking import step_metrics, summary_metrics
from bench.workloads.problems import load_problems
from bench.workloads.prompts import Prompt, chosen, encode
from bench.workloads.trace import LengthTrace

HUB_NAMES = {"LLaMA3.1-8B": "meta-llama/Llama-3.1-8B-Instruct", "Qwen3-14B": "Qwen/Qwen3-14B"}


def run_measured(experiments: list[Experiment], workload, options, tracker, progress) -> None:
    """Run every arm and seed of each experiment that is not kept; each record is written as its rollout ends."""
    for experiment in experiments:
        run_experiment(experiment, workload, options, tracker, progress)


def run_experiment(experiment: Experiment, workload, options, tracker, progress) -> None:
    """One experiment on this machine."""
    if experiment.cluster.nodes > 1:
        raise UserError(f"{experiment.name}: the measured tier runs on one node; start it on each node through VeRL")
    device = "cpu" if experiment.cluster.gpu == "cpu" else "cuda"
    if device == "cuda" and not serves(experiment.cluster.gpu, experiment.cluster.gpus_per_node, local_devices()):
        raise UserError(
            f"{experiment.name}: --tier measured needs {experiment.cluster.gpus_per_node} GPUs of kind "
            f"{experiment.cluster.gpu}, which this machine lacks; --dry-run shows what would be launched"
        )
    model_path = model_of(experiment, options.model)
    given = None
    if options.profile is not None:
        of = identity(Path(model_path), device)
        given = load_given(options.profile, of, experiment.layouts, options.force_profile)
    tokenizer = tokenizer_of(model_path)
    plans_by = [] if given is None else [given.provenance, options.force_profile]
    jobs, marks, traces = [], {}, {}
    for batch in experiment.batches:
        for seed, arm in interleaved(experiment.seeds, arms_of(experiment)):
            prompts, trace = inputs_of(experiment, batch, seed, workload, tokenizer)
            traces[batch, seed] = trace
            job = Job(experiment, arm, seed, [list(p.token_ids) for p in prompts], trace)
            jobs.append(job)
            marks[job] = fingerprint_of(
                experiment.model_dump_json(), model_path, job.arm, batch, seed, trace.sha256, *plans_by
            )
    store = RecordStore(options.out, experiment.name)
    kept = {} if options.fresh else {r.fingerprint for r in store.read().values()}
    store.write_made(made_of(experiment, traces, list(marks.values())))
    todo = [job for job in jobs if marks[job] not in kept]
    task = progress.add_task(f"{experiment.name}, measured", total=sum(len(j.prompts) for j in jobs))
    progress.advance(task, sum(len(j.prompts) for j in jobs if j not in todo))
    if not todo:
        return
    tracker.start(experiment.name, experiment.model_dump(mode="json"))
    record_profile = recorded_path(options.out, experiment.model)
    engines = Engines(model_path, device, given, lambda samples: samples.save(record_profile))
    for job, rollout in run_jobs(todo, engines, lambda *_: progress.advance(task)):
        record = summarise(job, rollout).model_copy(update={"fingerprint": marks[job], "load_average": load_average()})
        steps = step_rows(rollout.steps)
        store.write_steps(record, steps)
        store.append([record])
        name = f"{record.arm}/{record.batch}/{record.seed}"
        tracker.rollouts({name: (step_metrics(steps), summary_metrics(record, job.trace))})
        job.trace.write(options.out / "raw" / "traces" / f"{job.trace.sha256[:12]}.jsonl")
    store.tidy()
    tracker.finish()


def model_of(experiment: Experiment, given: str | None) -> str:
    """Where the weights are: a random model made here, or a hub name or directory."""
    if experiment.model in PRESETS:
        return str(materialise(experiment.model))
    path = given or HUB_NAMES.get(experiment.model)
    if path is None:
        raise UserError(f"{experiment.name}: no weights are known for {experiment.model}; give --model")
    return path


def tokenizer_of(model_path: str):
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_path)
    except OSError as error:
        raise UserError(f"model {model_path}: no tokenizer ({error}); give --model a directory or hub name") from None


def inputs_of(experiment: Experiment, batch: int, seed: int, workload, tokenizer) -> tuple[list[Prompt], LengthTrace]:
    """The prompts of a rollout [N], each problem ``samples_per_prompt`` times, and its trace with their lengths."""
    samples = experiment.samples_per_prompt
    trace = workload.trace or trace_of(experiment, batch, seed)
    problems = chosen(workload.problems or load_problems("builtin"), len(trace) // samples, seed)
    prompts = [encode(p, tokenizer, experiment.max_prompt_tokens) for p in problems]
    prompts = [prompts[i] for i in np.repeat(np.arange(len(prompts)), samples)]
    return prompts, trace.with_prompts([p.prompt_id for p in prompts], [len(p.token_ids) for p in prompts])
