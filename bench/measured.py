"""The measured tier on this machine: arms interleaved on real SGLang, lengths forced by a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from bench.backends.sglang_engine import EngineRollout, StaticEngine
from bench.experiment import Experiment
from bench.records import RolloutSummary
from bench.stats import weighted_percentiles
from bench.workloads.trace import LengthTrace
from pat.layout import Layout


@dataclass(frozen=True, eq=False)
class Job:
    """One measured rollout: an arm on the trace and prompts of a seed."""

    experiment: Experiment
    layout: Layout
    seed: int
    prompts: list[list[int]]
    trace: LengthTrace

    @property
    def arm(self) -> str:
        return f"static-{self.layout}"


def interleaved(seeds: Sequence[int], layouts: Sequence[Layout]) -> list[tuple[int, Layout]]:
    """Every (seed, layout): the order of the arms turns with each seed, so that drift of the machine cancels and the
    engine of one seed's last arm serves the next seed's first."""
    return [(seed, a) for i, seed in enumerate(seeds) for a in (layouts if i % 2 == 0 else layouts[::-1])]


def run_jobs(
    jobs: Sequence[Job], model_path: str, device: str, progress: Callable[[Job, int, int], None]
) -> Iterator[tuple[Job, EngineRollout]]:
    """Run the jobs in order; an engine lives as long as consecutive jobs use its layout, a warm-up is discarded."""
    engine: StaticEngine | None = None
    try:
        for job in jobs:
            sequences = len(job.prompts)
            if engine is None or engine.layout != job.layout:
                if engine is not None:
                    engine.stop()
                longest = max(len(p) for p in job.prompts) + job.experiment.max_response_tokens + 8
                budget = longest * sequences // job.experiment.cluster.world if device == "cpu" else None
                engine = StaticEngine.of(model_path, job.layout, device, sequences=sequences, kv_tokens_per_rank=budget)
                engine.start()
            response = job.trace.response_tokens.tolist()
            yield job, engine.rollout(job.prompts, response, job.seed, lambda done, of, j=job: progress(j, done, of))
    finally:
        if engine is not None:
            engine.stop()


def summarise(job: Job, rollout: EngineRollout) -> RolloutSummary:
    """The record of one measured rollout; percentiles over decode steps of all replicas."""
    decode = rollout.steps[rollout.steps.kind == "decode"]
    latency_ms = 1e3 * decode.latency_s.to_numpy()
    p50, p90, p99 = weighted_percentiles(latency_ms, np.ones(len(latency_ms)), (50, 90, 99))
    response = int(job.trace.response_tokens.sum())
    return RolloutSummary(
        experiment=job.experiment.name,
        arm=job.arm,
        tier="measured",
        batch=len(job.prompts),
        host_term="real",
        seed=job.seed,
        layouts=[(0.0, str(job.layout))],
        rollout_s=rollout.seconds,
        prompt_tokens=sum(map(len, job.prompts)),
        response_tokens=response,
        tokens_per_s=response / rollout.seconds,
        decode_p50_ms=p50,
        decode_p90_ms=p90,
        decode_p99_ms=p99,
        trace_sha256=job.trace.sha256,
    )


def step_rows(steps: pd.DataFrame) -> pd.DataFrame:
    """Steps of a measured rollout in the columns of the simulated tier: a row is one step, time_s its start."""
    return pd.DataFrame(
        {
            "time_s": steps.time_s - steps.latency_s,
            "replica": steps.replica,
            "tp": steps.tp,
            "kind": steps.kind,
            "steps": 1,
            "batch": steps.batch,
            "context_tokens": steps.context_tokens / steps.batch,
            "seconds": steps.latency_s,
        }
    )
