"""What an end-to-end run compares, validated from YAML: GRPO iterations of VeRL, one launch for each arm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from bench.errors import UserError
from bench.experiment import Cluster, Strict, names_in, read_fields
from bench.workloads.lengths import parse as parse_lengths
from pat.layout import Layout, layouts

FOLDER = Path(__file__).parent.parent / "experiments" / "e2e"
ARMS = ("static", "verl-default", "pat", "pat-forced", "pat-still")
"""``static``: every static layout, VeRL's default among them; ``verl-default``: that one alone. ``pat``: the planner.
``pat-forced``: begins in the lowest TP and goes to the highest when fewer than ``forced_alive`` sequences are left,
whether that pays or not. ``pat-still``: the planner in VeRL's default layout, which it is never let out of: what PAT
costs where it does nothing."""

Count = Annotated[int, Field(ge=1)]


class E2eExperiment(Strict):
    """``iterations`` of a launch include the first, discarded as warm-up. ``cell``: the predicted experiment of
    bench/experiments whose lengths and cluster this one has. ``lengths``: forced ones; None: responses end by
    themselves. ``problems``: distinct prompts, which come back; None: no prompt comes twice. ``seeds``: for each a
    launch of every arm, their order turned with every seed."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    model: str
    cluster: Cluster
    testbed: str | None = None
    cell: str | None = None
    prompts: Count
    problems: Count | None = None
    samples: Count
    max_prompt_tokens: Count
    max_response_tokens: Count
    iterations: Annotated[int, Field(ge=2)]
    learning_rate: Annotated[float, Field(gt=0)]
    kl_coef: Annotated[float, Field(ge=0)] = 0.001
    micro_batch: Count = 8
    lengths: str | None = None
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0,)
    tps: Annotated[tuple[int, ...], Field(min_length=1)]
    verl_default_tp: int = 2
    forced_alive: Count = 8
    arms: Annotated[tuple[Literal[ARMS], ...], Field(min_length=1)] = ("static", "pat")

    @field_validator("lengths")
    @classmethod
    def _known_lengths(cls, text: str | None) -> str | None:
        if text is not None:
            parse_lengths(text)
        return text

    @model_validator(mode="after")
    def _consistent(self) -> E2eExperiment:
        if self.samples < 2:
            raise ValueError("samples: GRPO compares the samples of a prompt; at least 2")
        if self.prompts * self.samples % self.cluster.world:
            raise ValueError(f"prompts: {self.prompts} x {self.samples} samples are no multiple of the GPUs")
        if self.problems is not None and self.problems % self.prompts:
            raise ValueError(f"problems: {self.problems} is no multiple of the {self.prompts} prompts of an iteration")
        for tp in self.tps:
            if self.cluster.gpus_per_node % tp:
                raise ValueError(f"tps: TP{tp} does not divide a node of {self.cluster.gpus_per_node}; leave it out")
        if self.verl_default_tp not in self.tps:
            raise ValueError(f"verl_default_tp: TP{self.verl_default_tp} is not among tps {list(self.tps)}; add it")
        return self

    @property
    def device(self) -> str:
        return "cpu" if self.cluster.gpu == "cpu" else "cuda"

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def node_layouts(self) -> tuple[Layout, ...]:
        """Of one node: each has its own rollout server."""
        return layouts(self.cluster.gpus_per_node, self.tps)

    @property
    def verl_default(self) -> str:
        return f"static-{Layout.of(self.verl_default_tp, self.cluster.gpus_per_node)}"

    @property
    def arm_names(self) -> tuple[str, ...]:
        statics = tuple(f"static-{layout}" for layout in self.node_layouts) if "static" in self.arms else ()
        if "verl-default" in self.arms and not statics:
            statics = (self.verl_default,)
        return statics + tuple(arm for arm in self.arms if arm not in ("static", "verl-default"))


def load_e2e(name: str) -> E2eExperiment:
    """By name (a file of bench/experiments/e2e) or path of a YAML file; UserError names the file, field and remedy."""
    path, content = read_fields(name, FOLDER, "e2e experiment", "bench/experiments/e2e")
    try:
        return E2eExperiment.model_validate({"name": path.stem, **content})
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"])) or "experiment"
        known = f"; known fields: {', '.join(E2eExperiment.model_fields)}" if fault["type"] == "extra_forbidden" else ""
        raise UserError(f"{path}: {field}: {fault['msg'].removeprefix('Value error, ')}{known}") from None


def known_e2e() -> list[str]:
    return names_in(FOLDER)
