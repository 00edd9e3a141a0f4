"""Named by ``actor_rollout_ref.model.external_lib``: registers rollout backend ``pat``, and an engine for the CPU."""

from __future__ import annotations

import os
from importlib.metadata import version

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry

from pat.verl import plugin

VERL = "0.9.1"

if version("verl") != VERL:
    raise ImportError(f"pat.verl is written for verl {VERL}, found {version('verl')}; install that version")
if plugin.error is not None:
    raise ImportError("pat.verl: the CPU platform could not be registered in VeRL") from plugin.error


def replica_class() -> type:
    from pat.verl.replica import PatReplica

    return PatReplica


RolloutReplicaRegistry.register("pat", replica_class)
base._ROLLOUT_REGISTRY[("pat", "async")] = "pat.verl.weights.PatWeights"
if os.environ.get("VERL_PLATFORM") == "cpu":
    from pat.verl.cpu import engine  # noqa: F401
