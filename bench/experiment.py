"""Experiments: what to compare, on what, validated from YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from bench.errors import UserError
from bench.workloads.lengths import parse as parse_lengths
from pat.layout import Layout, layouts
from pat.model import ModelShape

FOLDER = Path(__file__).parent / "experiments"
ABLATIONS = (
    "pat-threshold",
    "pat-no-cost",
    "pat-one-hop",
    "pat-no-lengths",
    "pat-migrate",
    "pat-recompute",
    "pat-no-groups",
)
"""Of the predicted tier: the planner without one of its parts, see ``bench.predicted.ablated``."""
ARMS = ("static", "pat-paper", "pat-planned", "restart", "oracle", *ABLATIONS, "pat-live", "pat-forced")
"""The last two are for the measured tier."""


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cluster(Strict):
    """``nodes`` machines of ``gpus_per_node`` GPUs; TP stays inside a machine."""

    gpu: str
    nodes: Annotated[int, Field(ge=1)] = 1
    gpus_per_node: Annotated[int, Field(ge=1)]

    @property
    def world(self) -> int:
        return self.nodes * self.gpus_per_node


class Experiment(Strict):
    """One comparison: every arm runs the same traces, one for each batch and seed."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    tier: Literal["predicted", "measured"]
    model: str
    cluster: Cluster
    testbed: str | None = None
    max_response_tokens: Annotated[int, Field(ge=1)]
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 1024
    batches: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    samples_per_prompt: Annotated[int, Field(ge=1)] = 8
    lengths: str
    prompt_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (0, 1, 2)
    tps: Annotated[tuple[int, ...], Field(min_length=1)] = (1, 2, 4, 8)
    verl_default_tp: int = 2
    host_terms: tuple[str, ...] = ("paper-era", "sglang-0.5")
    arms: Annotated[tuple[Literal[ARMS], ...], Field(min_length=1)] = ("static", "pat-paper", "pat-planned", "oracle")

    @field_validator("lengths")
    @classmethod
    def _known_lengths(cls, text: str) -> str:
        parse_lengths(text)
        return text

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        for batch in self.batches:
            if batch % self.samples_per_prompt:
                raise ValueError(f"batches: {batch} is not a multiple of samples_per_prompt {self.samples_per_prompt}")
        for tp in self.tps:
            if self.cluster.world % tp or tp > self.cluster.gpus_per_node:
                raise ValueError(
                    f"tps: TP{tp} does not divide {self.cluster.world} GPUs in nodes of {self.cluster.gpus_per_node}; "
                    "leave it out"
                )
        if self.verl_default_tp not in self.tps:
            raise ValueError(f"verl_default_tp: TP{self.verl_default_tp} is not among tps {list(self.tps)}; add it")
        return self

    @property
    def is_ablation(self) -> bool:
        """Whether it is about the parts of the planner; then tables of cells leave it out."""
        return any(arm in ABLATIONS for arm in self.arms)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return layouts(self.cluster.world, self.tps, self.cluster.gpus_per_node)

    @property
    def verl_default(self) -> Layout:
        return Layout.of(self.verl_default_tp, self.cluster.world)

    def check_model(self, shape: ModelShape) -> None:
        """UserError where a layout does not divide the model's heads."""
        for tp in self.tps:
            try:
                shape.check_tp(tp)
            except ValueError as error:
                raise UserError(f"experiment {self.name}: tps: {error}; leave TP{tp} out") from None


def load_experiment(name: str) -> Experiment:
    """By name (a file of bench/experiments) or path of a YAML file; UserError names the file, field and remedy."""
    path, content = read_fields(name, FOLDER, "experiment", "bench/experiments")
    try:
        return Experiment.model_validate({"name": path.stem, **content})
    except ValidationError as error:
        raise UserError(f"{path}: {first_fault(error)}") from None


def read_fields(name: str, folder: Path, what: str, examples: str) -> tuple[Path, dict]:
    """(path, fields) of a YAML file, by its path or its name in ``folder``; UserError where it is not a mapping."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        raise UserError(f"{what} {name!r} does not exist; known ones: {', '.join(names_in(folder))}")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: an experiment is a mapping of fields, see {examples} for examples")
    return path, content


def names_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def first_fault(error: ValidationError) -> str:
    """One line of a pydantic error: field and what is wrong with it."""
    fault = error.errors()[0]
    field = ".".join(str(part) for part in fault["loc"]) or "experiment"
    if fault["type"] == "extra_forbidden":
        return f"unknown field {field!r}; known fields: {', '.join(Experiment.model_fields)}"
    return f"{field}: {fault['msg'].removeprefix('Value error, ')}"


def known_experiments() -> list[str]:
    return names_in(FOLDER)
