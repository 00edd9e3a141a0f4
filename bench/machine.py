"""The machine and engine of a predicted cell: profile, links, KV capacity of each layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from baselines.switch_parts import SEAT_PARTS, paper_parts, restart_parts
from bench.backends.simulated.rollout import System
from bench.errors import UserError
from bench.experiment import Experiment
from bench.gpus import gpu
from bench.launch_plan import kv_capacity_tokens
from bench.models import model_shape
from bench.profiles import step_profile
from bench.profiles.links import links_of
from pat.layout import Layout
from pat.links import Links
from pat.model import ModelShape
from pat.planner import Planner
from pat.profile import StepProfile
from pat.switch_cost import SwitchModel, SwitchParts

PAPER = Path(__file__).parent / "data" / "paper.yaml"


@cache
def paper_numbers() -> dict:
    """The paper's figures, with confidence and source."""
    return yaml.safe_load(PAPER.read_text())


@dataclass(frozen=True, eq=False)
class Machine:
    """What the arms of one cell run on. ``capacity_tokens`` lacks the layouts that cannot hold the longest sequence."""

    shape: ModelShape
    profile: StepProfile
    links: Links
    node: int
    capacity_tokens: dict[Layout, int]
    seats: SwitchParts = SEAT_PARTS

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return tuple(self.capacity_tokens)

    def switches(self, parts: SwitchParts, kv: str = "cheaper") -> SwitchModel:
        return SwitchModel(self.shape, self.profile, self.links, parts, self.node, kv)

    def system(self, switches: SwitchModel) -> System:
        return System(self.profile, switches, self.capacity_tokens)

    def planner(self, switches: SwitchModel) -> Planner:
        return Planner(self.profile, switches, self.layouts, self.capacity_tokens)

    def parts(self, name: str) -> SwitchParts:
        """Fixed switch parts by name: seats, paper or restart."""
        overhead_s = paper_numbers()["switch_overhead_s"]
        if name == "paper":
            return paper_parts(overhead_s, self.links, links_of("a40"))
        return {"seats": self.seats, "restart": restart_parts(overhead_s)}[name]


def machine_of(experiment: Experiment, host_term: str) -> Machine:
    """The machine of a predicted experiment under a host term; UserError for unknown names, or where no layout fits."""
    cluster = experiment.cluster
    try:
        shape = model_shape(experiment.model)
        experiment.check_model(shape)
        board, links = gpu(cluster.gpu), links_of(cluster.gpu)
    except ValueError as error:
        raise UserError(f"experiment {experiment.name}: {error}") from None
    longest = experiment.max_prompt_tokens + experiment.max_response_tokens
    capacity = {a: kv_capacity_tokens(shape, board, a.tp) for a in experiment.layouts}
    fitting = {a: tokens for a, tokens in capacity.items() if tokens >= longest}
    if not fitting:
        raise UserError(
            f"experiment {experiment.name}: no layout holds {shape.name} and one sequence of {longest} tokens on "
            f"{board.title}; add a higher TP to tps or shorten max_response_tokens"
        )
    try:
        profile = step_profile(experiment.model, cluster.gpu, host_term)
    except ValueError as error:
        raise UserError(f"experiment {experiment.name}: {error}") from None
    return Machine(shape, profile, links, cluster.gpus_per_node, fitting)
