"""What the PAT arm plans with: a step profile and switch costs, measured here or, for GPUs, those of predictions."""

from __future__ import annotations

from pathlib import Path

from bench.backends.adaptive_engine import AdaptiveRollouts
from bench.e2e.experiment import E2eExperiment
from bench.errors import UserError
from bench.experiment import load_experiment
from bench.machine import machine_of
from bench.profiles import stored
from bench.profiles.live import measure
from bench.profiles.samples import Samples
from pat.profile import StepProfile
from pat.reshard.kv import KvCosts
from pat.verl.policies import SwitchCosts, save_switch_costs


def adaptive_files(experiment: E2eExperiment, model_path: str, folder: Path, dry_run: bool = False) -> dict[str, str]:
    """Settings ``profile`` and ``switch_costs``: paths of files, written unless ``dry_run``."""
    profile, costs = folder / "profile.parquet", folder / "switch_costs.json"
    if not dry_run:
        folder.mkdir(parents=True, exist_ok=True)
        found = measured(experiment, model_path) if experiment.device == "cpu" else predicted(experiment)
        found[0].save(profile)
        save_switch_costs(costs, found[1])
    return {"profile": str(profile), "switch_costs": str(costs)}


def measured(experiment: E2eExperiment, model_path: str) -> tuple[StepProfile, SwitchCosts]:
    """From this engine's own steps and switches, measured once and cached."""
    of, layouts = stored.identity(Path(model_path), "cpu"), experiment.node_layouts
    longest = experiment.max_prompt_tokens + experiment.max_response_tokens

    def of_an_engine() -> Samples:
        tokens = (longest + 8) * -(-experiment.sequences // experiment.cluster.world)
        sizes = {"sequences": experiment.sequences, "kv_tokens_per_rank": tokens}
        with AdaptiveRollouts.over(model_path, layouts, "cpu", **sizes) as engine:
            return measure(engine, experiment.model, experiment.sequences, longest)

    samples = stored.cached_or(of_an_engine, of, layouts, experiment.sequences, longest)
    return samples.profile(), costs_of(samples)


def costs_of(samples: Samples) -> SwitchCosts:
    return SwitchCosts(samples.links(), samples.parts(), samples.kv_costs())


def predicted(experiment: E2eExperiment) -> tuple[StepProfile, SwitchCosts]:
    """GPUs: step times of the predicted tier under SGLang's present host term, with this project's switch."""
    if experiment.cell is None:
        raise UserError(f"{experiment.name}: cell: the PAT arm needs the predicted experiment to plan with; name one")
    machine = machine_of(load_experiment(experiment.cell), "sglang-0.5")
    kv = {layout: KvCosts() for layout in experiment.node_layouts}
    return machine.profile, SwitchCosts(machine.links, machine.parts("seats"), kv)
