"""Options of rollout backend ``pat``: ``actor_rollout_ref.rollout.custom.pat`` of VeRL's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pat.layout import Layout


class PatSettings(BaseModel):
    """
    layouts        layouts the engine can take, of all ranks of a node: ``TP1xDP2``
    start          where rollouts begin and where a weight sync leaves the engine; None: the lowest TP, but a choice of
                   the planner's at each rollout where ``policy`` is adaptive
    policy         ``static``, ``thresholds`` or ``adaptive``
    thresholds     for ``thresholds``: [(alive, layout)], go to the layout when fewer than ``alive`` sequences are left
    profile        for ``adaptive``: file of a :class:`pat.profile.StepProfile`
    switch_costs   for ``adaptive``: file of :func:`pat.verl.policies.save_switch_costs`
    lengths        for ``adaptive``: JSON list of response tokens of earlier rollouts; without it, the first iteration
                   stays in its starting layout
    remember       iterations whose lengths the length model is fitted to
    max_hops, margin   of :class:`pat.policy.AdaptivePolicy`
    interval_steps decode steps between two reports of a replica to the policy
    trace          JSON file of forced response lengths, see :mod:`pat.verl`
    records        directory for records; None: none are written
    sequences      requests of one rollout on one replica (prompts x samples): it begins when as many have come, or
                   after 100 x ``quiet_s``; None: when none has come for ``quiet_s``
    kv_tokens_per_rank   KV budget of a rank, in tokens of all heads; None: SGLang's choice (CPU: 16384)
    shm_allreduce, pin   CPU: all-reduce through shared memory; pin each rank to a core
    engine         further arguments for SGLang's engine
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layouts: tuple[str, ...] = Field(min_length=1)
    start: str | None = None
    policy: Literal["static", "thresholds", "adaptive"] = "static"
    thresholds: tuple[tuple[int, str], ...] = ()
    profile: str | None = None
    switch_costs: str | None = None
    lengths: str | None = None
    remember: int = Field(default=4, ge=1)
    max_hops: int = Field(default=3, ge=1)
    margin: float = Field(default=0.25, ge=0)
    interval_steps: int = Field(default=4, ge=1)
    trace: str | None = None
    records: str | None = None
    sequences: int | None = Field(default=None, ge=1)
    quiet_s: float = Field(default=0.05, gt=0)
    kv_tokens_per_rank: int | None = Field(default=None, ge=1)
    shm_allreduce: bool = True
    pin: bool = True
    engine: dict[str, Any] = {}

    @field_validator("layouts")
    @classmethod
    def _layouts(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len({Layout.parse(name).world for name in names}) > 1:
            raise ValueError(f"{', '.join(names)} are not of one number of ranks")
        return tuple(str(layout) for layout in sorted({Layout.parse(name) for name in names}))

    @model_validator(mode="after")
    def _consistent(self) -> PatSettings:
        named = [name for name in (self.start, *(name for _, name in self.thresholds)) if name is not None]
        for name in named:
            if str(Layout.parse(name)) not in self.layouts:
                raise ValueError(f"{name} is not one of layouts ({', '.join(self.layouts)})")
        if self.policy == "thresholds" and not self.thresholds:
            raise ValueError("policy thresholds needs thresholds, a list of [alive, layout]")
        missing = [name for name in ("profile", "switch_costs") if getattr(self, name) is None]
        if self.policy == "adaptive" and missing:
            raise ValueError(f"policy adaptive needs {' and '.join(missing)}, files measured before")
        return self

    @property
    def all_layouts(self) -> tuple[Layout, ...]:
        return tuple(Layout.parse(name) for name in self.layouts)

    @property
    def home(self) -> Layout:
        """Where a weight sync leaves the engine."""
        return Layout.parse(self.start) if self.start is not None else self.all_layouts[0]

    @classmethod
    def of(cls, custom: Mapping[str, Any] | None) -> PatSettings:
        """From ``rollout.custom``. ValueError names the option that is wrong."""
        options = (custom or {}).get("pat")
        if not options:
            raise ValueError(
                "actor_rollout_ref.rollout.custom.pat is missing: rollout backend pat needs at least layouts"
            )
        try:
            return cls(**options)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, ("pat", *first["loc"])))
            raise ValueError(f"actor_rollout_ref.rollout.custom.{where}: {first['msg']}") from None
