"""What VeRL trains on: Parquet in its schema, and the forced response lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from bench.e2e.experiment import E2eExperiment
from bench.workloads.builtin import addition_problems
from bench.workloads.lengths import parse as parse_lengths
from bench.workloads.problems import Problem, load_problems
from bench.workloads.prompts import chosen, prompt_text
from bench.workloads.trace import synthetic_trace

DATA_SOURCE = "pat"


def problems_of(experiment: E2eExperiment, seed: int, dataset: str | None) -> list[tuple[str, str]]:
    """(prompt text, answer) of every distinct prompt of a launch. Without a dataset: sums for the warm-started models,
    the built-in problems for others. UserError where there are fewer than needed."""
    count = experiment.problems or experiment.prompts * experiment.iterations
    if dataset is None and experiment.device == "cpu":
        return [(p["problem"], str(p["answer"])) for p in addition_problems(count, seed)]
    problems: list[Problem] = load_problems(dataset or "builtin")
    return [(prompt_text(p), p.answer) for p in chosen(problems, count, seed)]


def write_data(experiment: E2eExperiment, seed: int, dataset: str | None, path: Path) -> Path:
    """VeRL's schema: data_source, prompt (chat messages), reward_model (ground_truth), extra_info."""
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index, "split": "train"},
        }
        for index, (text, answer) in enumerate(problems_of(experiment, seed, dataset))
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(path, index=False)
    return path


def write_trace(experiment: E2eExperiment, seed: int, path: Path) -> Path | None:
    """Forced lengths by iteration, the same for every arm; None where responses end by themselves."""
    if experiment.lengths is None:
        return None
    law = parse_lengths(experiment.lengths)
    rows = [
        synthetic_trace(
            law,
            prompts=experiment.prompts,
            samples=experiment.samples,
            max_response_tokens=experiment.max_response_tokens,
            seed=1009 * seed + iteration,
            prompt_share=0.5,
        ).response_tokens.tolist()
        for iteration in range(experiment.iterations)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"lengths": rows}))
    return path
