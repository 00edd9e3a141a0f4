"""The paper's comparison on one cell, VeRL's default beside PAT, with its assumptions open to change one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bench.backends.simulated.rollout import Rollout, simulate
from bench.experiment import Experiment
from bench.machine import Machine, machine_of
from bench.predicted import earlier_lengths, trace_of
from bench.profiles.a40 import all_reduce_s
from bench.workloads.trace import LengthTrace
from pat.layout import Layout
from pat.lengths import LengthModel
from pat.model import ModelShape
from pat.policy import AdaptivePolicy, LengthForesight, StaticPolicy
from pat.profile import StepProfile
from pat.switch_cost import SwitchModel

BATCH = 128
"""Sequences of the paper's rollouts (bench/data/paper.yaml, setup)."""


@dataclass(frozen=True)
class Setting:
    """What decides both arms. As it stands: VeRL's default layout, and PAT from there with one switch at the paper's
    cost.

    start_tp           layout of VeRL, in which PAT starts; None: the experiment's default
    kv_share           share of the KV capacity that is left to the engine
    link_factor        link speed for KV migration, as a multiple
    all_reduce_factor  time of an all-reduce as a multiple; A40 alone, whose profile is a sum of known parts
    step_factor        device time of every decode and prefill step, as a multiple
    host_base_s        added to the host term's base
    """

    experiment: Experiment
    batch: int = BATCH
    host: str = "paper-era"
    start_tp: int | None = None
    max_hops: int = 1
    choose_first: bool = False
    parts: str = "paper"
    kv_share: float = 1.0
    link_factor: float = 1.0
    all_reduce_factor: float = 1.0
    step_factor: float = 1.0
    host_base_s: float = 0.0

    def with_experiment(self, **fields) -> Setting:
        return replace(self, experiment=self.experiment.model_copy(update=fields))

    @property
    def start(self) -> Layout:
        return Layout.of(self.start_tp or self.experiment.verl_default_tp, self.experiment.cluster.world)

    def machine(self) -> Machine:
        """The experiment's machine with the changes."""
        machine = machine_of(self.experiment, self.host)
        longest = self.experiment.max_prompt_tokens + self.experiment.max_response_tokens
        capacity = {a: int(self.kv_share * tokens) for a, tokens in machine.capacity_tokens.items()}
        links = replace(
            machine.links,
            intra_node_bytes_per_s=machine.links.intra_node_bytes_per_s * self.link_factor,
            inter_node_bytes_per_s=machine.links.inter_node_bytes_per_s * self.link_factor,
        )
        profile = machine.profile
        if self.all_reduce_factor != 1:
            profile = with_all_reduce(profile, machine.shape, self.all_reduce_factor)
        if self.step_factor != 1:
            profile = with_steps(profile, self.step_factor)
        if self.host_base_s:
            profile = profile.with_host(replace(profile.host, base_s=profile.host.base_s + self.host_base_s))
        fitting = {a: tokens for a, tokens in capacity.items() if tokens >= longest}
        return replace(machine, profile=profile, links=links, capacity_tokens=fitting)


def with_all_reduce(profile: StepProfile, shape: ModelShape, factor: float) -> StepProfile:
    """An A40 profile whose all-reduces (two a layer, the embedding's) take ``factor`` times as long when decoding."""
    grids = {}
    for tp, grid in profile.grids.items():
        message_bytes = grid.batches * shape.hidden * shape.dtype_bytes
        extra_s = (factor - 1) * (2 * shape.layers + 1) * all_reduce_s(tp, message_bytes)
        grids[tp] = replace(grid, decode_s=grid.decode_s + extra_s[:, None])
    return replace(profile, grids=grids)


def with_steps(profile: StepProfile, factor: float) -> StepProfile:
    """A profile of a device on which every step takes ``factor`` times as long."""
    grids = {
        tp: replace(
            grid,
            decode_s=grid.decode_s * factor,
            prefill_s=grid.prefill_s * factor,
            eager_extra_s=grid.eager_extra_s * factor,
        )
        for tp, grid in profile.grids.items()
    }
    return replace(profile, grids=grids)


@dataclass(frozen=True, eq=False)
class Bench:
    """A setting made ready: its machine, and the rollouts of a seed on it."""

    setting: Setting
    machine: Machine

    @classmethod
    def of(cls, setting: Setting) -> Bench:
        return cls(setting, setting.machine())

    def trace(self, seed: int) -> LengthTrace:
        return trace_of(self.setting.experiment, self.setting.batch, seed)

    def switches(self) -> SwitchModel:
        parts = self.setting.parts
        return self.machine.switches(self.machine.parts(parts), "recompute" if parts == "restart" else "cheaper")

    def static(self, trace: LengthTrace, layout: Layout | None = None) -> Rollout:
        return self._run(trace, StaticPolicy(layout or self.setting.start))

    def pat(self, trace: LengthTrace, seed: int) -> Rollout:
        """PAT, which has seen earlier rollouts of the same law."""
        setting, cap = self.setting, self.setting.experiment.max_response_tokens
        lengths = LengthModel.fit(earlier_lengths(setting.experiment, setting.batch, seed), cap)
        policy = AdaptivePolicy(
            self.machine.planner(self.switches()),
            LengthForesight(lengths),
            start=None if setting.choose_first else setting.start,
            max_hops=setting.max_hops,
        )
        return self._run(trace, policy)

    def _run(self, trace: LengthTrace, policy) -> Rollout:
        system = self.machine.system(self.switches())
        cap = self.setting.experiment.max_response_tokens
        return simulate(system, policy, trace.prompt_tokens, trace.response_tokens, cap)


@dataclass(frozen=True)
class Swap:
    """One assumption replaced by another; ``applies``: to which cells."""

    group: str
    name: str
    change: Callable[[Setting], Setting]
    applies: Callable[[Setting], bool] = lambda setting: True


def other_law(setting: Setting) -> Setting:
    """The length law fitted to the other cap (bench/data/paper.yaml, lengths.synthetic_fit)."""
    laws = ("lognormal:7.907,0.894", "lognormal:7.25,1.41")
    return setting.with_experiment(lengths=laws[setting.experiment.lengths == laws[0]])


def a40(setting: Setting) -> bool:
    return setting.experiment.cluster.gpu == "a40"


def slow_restart(setting: Setting) -> Setting:
    """For the paper's overhead table, which is of A40."""
    return replace(setting, parts="restart", step_factor=1.5)


def shorter(setting: Setting, factor: float) -> Setting:
    """The log-normal law with its median multiplied."""
    mu, sigma = map(float, setting.experiment.lengths.removeprefix("lognormal:").split(","))
    return setting.with_experiment(lengths=f"lognormal:{mu + np.log(factor):.6g},{sigma:g}")


AS_IS, RESTART = "as it stands", "a restart as the switch"
SWAPS = (
    Swap("none", AS_IS, lambda s: s),
    Swap("host term", "host term sglang-0.5 (overlapped)", lambda s: replace(s, host="sglang-0.5")),
    Swap("host term", "no host term", lambda s: replace(s, host="none")),
    Swap("host term", "paper-era fitted without rows above 96", lambda s: replace(s, host="paper-era-96")),
    Swap("host term", "the same without the launch", lambda s: replace(s, host="paper-era-96-no-launch")),
    Swap("host term", "5 ms more host time a step", lambda s: replace(s, host_base_s=5e-3)),
    Swap("length law", "the length law of the other cap", other_law),
    Swap("length law", "responses of a prompt independent", lambda s: s.with_experiment(prompt_share=0.0)),
    Swap("length law", "all responses half as long (median)", lambda s: shorter(s, 0.5)),
    Swap("memory", "half of the KV cache", lambda s: replace(s, kv_share=0.5)),
    Swap("memory", "a quarter of the KV cache", lambda s: replace(s, kv_share=0.25)),
    Swap("hops", "up to three switches", lambda s: replace(s, max_hops=3)),
    Swap("hops", "up to three switches, first layout chosen", lambda s: replace(s, max_hops=3, choose_first=True)),
    Swap("switch", "this project's switch (seats)", lambda s: replace(s, parts="seats")),
    Swap("switch", RESTART, lambda s: replace(s, parts="restart")),
    Swap("switch", f"{RESTART}, device steps 1.5 times as long", slow_restart, a40),
    Swap("link speed", "links four times as fast", lambda s: replace(s, link_factor=4.0)),
    Swap("link speed", "links a quarter as fast", lambda s: replace(s, link_factor=0.25)),
    Swap("link speed", "all-reduce in half the time", lambda s: replace(s, all_reduce_factor=0.5), a40),
    Swap("link speed", "all-reduce in twice the time", lambda s: replace(s, all_reduce_factor=2.0), a40),
    Swap("device", "device steps 1.5 times as long", lambda s: replace(s, step_factor=1.5)),
    Swap("baseline", "VeRL and PAT start in TP1", lambda s: replace(s, start_tp=1)),
    Swap("baseline", "VeRL and PAT start in TP4", lambda s: replace(s, start_tp=4)),
    Swap("batch", "256 sequences", lambda s: replace(s, batch=256)),
    Swap("batch", "512 sequences", lambda s: replace(s, batch=512)),
)
