"""The measured tier on this machine: arms interleaved on real SGLang, lengths forced by a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from bench.backends.sglang_engine import EngineRollout, StaticEngine
from bench.experiment import Experiment
from bench.live_arms import LIVE_ARMS, LiveArms
from bench.profiles.samples import Samples
from bench.records import RolloutSummary
from bench.stats import weighted_percentiles
from bench.workloads.trace import LengthTrace
from pat.layout import Layout


@dataclass(frozen=True, eq=False)
class Job:
    """One measured rollout: an arm on the trace and prompts of a seed."""

    experiment: Experiment
    arm: str
    seed: int
    prompts: list[list[int]]
    trace: LengthTrace

    @property
    def engine(self) -> str:
        """Which engine it runs on: static arms have one each, adaptive ones share theirs."""
        return "adaptive" if self.arm in LIVE_ARMS else self.arm


def arms_of(experiment: Experiment) -> list[str]:
    """The measured arms that an experiment asks for."""
    statics = [f"static-{layout}" for layout in experiment.layouts] if "static" in experiment.arms else []
    return statics + [arm for arm in experiment.arms if arm in LIVE_ARMS]


def interleaved(seeds: Sequence[int], arms: Sequence[str]) -> list[tuple[int, str]]:
    """Every (seed, arm), a seed after the other; the order of the arms turns with each, so that drift of the machine
    cancels and the engine of one seed's last arm serves the next one's first."""
    return [(seed, arm) for i, seed in enumerate(seeds) for arm in (arms if i % 2 == 0 else arms[::-1])]


class Engines:
    """The engines of an experiment, each started when first asked for. On CPUs all stay: an idle engine sleeps. GPU
    memory holds one at a time.

    ``given``: the step profile that adaptive arms plan with; None: cached, or measured on their engine. ``profiled`` is
    told which they have taken.
    """

    def __init__(
        self,
        model_path: str,
        device: str,
        given: Samples | None = None,
        profiled: Callable[[Samples], None] = lambda samples: None,
    ) -> None:
        self.model_path, self.device, self.given, self.profiled = model_path, device, given, profiled
        self.running: dict[str, StaticEngine | LiveArms] = {}

    def of(self, job: Job) -> StaticEngine | LiveArms:
        """The engine of a job, running."""
        if job.engine in self.running:
            return self.running[job.engine]
        if self.device != "cpu":
            self.stop()
        engine = self.running[job.engine] = start(job, self.model_path, self.device, self.given)
        if isinstance(engine, LiveArms):
            self.profiled(engine.samples)
        return engine

    def stop(self) -> None:
        """End all, the last one first: each leaves the process as it found it."""
        while self.running:
            self.running.popitem()[1].stop()


def run_jobs(
    jobs: Sequence[Job], engines: Engines, progress: Callable[[Job, int, int], None]
) -> Iterator[tuple[Job, EngineRollout]]:
    """Run the jobs in order; the engines end with the last."""
    try:
        for job in jobs:
            engine = engines.of(job)
            if isinstance(engine, LiveArms):
                engine.choose(job.arm, job.seed)
            response = job.trace.response_tokens.tolist()
            yield job, engine.rollout(job.prompts, response, job.seed, lambda done, of, j=job: progress(j, done, of))
    finally:
        engines.stop()


def start(job: Job, model_path: str, device: str, given: Samples | None = None) -> StaticEngine | LiveArms:
    """The engine of a job, running."""
    sequences, experiment = len(job.prompts), job.experiment
    sizes: dict = {"sequences": sequences}
    if device == "cpu":
        sizes["kv_tokens_per_rank"] = kv_tokens_per_rank(experiment, list(map(len, job.prompts)))
    if job.engine == "adaptive":
        engine = LiveArms(experiment, model_path, device, sizes, given)
    else:
        engine = StaticEngine.of(model_path, Layout.parse(job.arm.removeprefix("static-")), device, **sizes)
    engine.start()
    return engine


def kv_tokens_per_rank(experiment: Experiment, prompt_tokens: Sequence[int]) -> int:
    """On a CPU: room for a rank's share of the greatest rollout of these prompts."""
    longest = int(max(prompt_tokens)) + experiment.max_response_tokens + 8
    return longest * -(-len(prompt_tokens) // experiment.cluster.world)


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
        layouts=layouts_of(rollout.steps, job.experiment.cluster.world),
        rollout_s=rollout.seconds,
        prompt_tokens=sum(map(len, job.prompts)),
        response_tokens=response,
        tokens_per_s=response / rollout.seconds,
        decode_p50_ms=p50,
        decode_p90_ms=p90,
        decode_p99_ms=p99,
        switches=[switch.as_row() for switch in rollout.switches],
        trace_sha256=job.trace.sha256,
    )


def layouts_of(steps: pd.DataFrame, world: int) -> list[tuple[float, str]]:
    """(start of its first step, layout) of each layout that the steps ran in, in order."""
    ordered = (steps.time_s - steps.latency_s).sort_values()
    tps = steps.tp[ordered.index].to_numpy()
    first = np.flatnonzero(np.r_[True, tps[1:] != tps[:-1]])
    return [(float(ordered.iloc[i]), str(Layout.of(int(tps[i]), world))) for i in first]


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
