"""Step profiles of the GPUs that cells name."""

from __future__ import annotations

from functools import cache

from bench.models import model_directory, model_shape
from bench.profiles import a40, aiconfigurator
from bench.profiles.host_terms import host_term
from pat.profile import StepProfile

PROFILED = (*aiconfigurator.SYSTEMS, "a40")
"""GPUs that have a profile."""


@cache
def device_profile(model: str, gpu: str) -> StepProfile:
    """Device times of a model on a GPU, without host term; ValueError lists what is known."""
    shape = model_shape(model)
    if gpu == "a40":
        return a40.profile(shape)
    if gpu not in aiconfigurator.SYSTEMS:
        raise ValueError(f"no step profile of gpu {gpu!r}; known ones: {', '.join(PROFILED)}")
    return aiconfigurator.profile(shape, model_directory(model), gpu)


@cache
def step_profile(model: str, gpu: str, host: str) -> StepProfile:
    """Step profile of a built-in model or a model directory on a GPU, under a host term (see ``host_terms``)."""
    return device_profile(model, gpu).with_host(host_term(host))
