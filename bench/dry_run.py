"""Dry run: what a cell would launch on GPUs, layout by layout, and how long it should take."""

from __future__ import annotations

import json

from tabulate import tabulate

from bench.errors import UserError
from bench.experiment import Experiment, load_experiment
from bench.gen_measured import HUB_NAMES
from bench.gpus import gpu, local_devices, serves
from bench.launch_plan import LaunchError, LayoutPlan, launch_plan
from bench.predicted import Cell, run_cell, trace_of

GB = 1e-9


def describe(experiment: Experiment, model_path: str | None = None) -> str:
    """Markdown: SGLang's arguments, placement and memory of each layout, the trace, the expected time.

    UserError where no layout fits the GPUs.
    """
    if experiment.cluster.gpu == "cpu":
        return describe_cpu(experiment)
    from bench.models import model_shape

    shape, batch = model_shape(experiment.model), max(experiment.batches)
    experiment.check_model(shape)
    path = model_path or HUB_NAMES.get(experiment.model, experiment.model)
    sizes = {
        "gpus_per_node": experiment.cluster.gpus_per_node,
        "sequences": batch,
        "longest_tokens": experiment.max_prompt_tokens + experiment.max_response_tokens,
        "seed": experiment.seeds[0],
    }
    try:
        plans, refused = launch_plan(shape, path, gpu(experiment.cluster.gpu), experiment.layouts, **sizes)
    except LaunchError as error:
        raise UserError(f"{experiment.name}: {error}") from None
    expected = expected_s(experiment)
    parts = [f"# {experiment.name}: what would be launched ({batch} sequences)", memory_table(plans, expected)]
    parts += [f"{layout} is left out: {why}" for layout, why in refused.items()]
    for plan in plans:
        where = ", ".join(
            f"{p.rank}: node {p.node} gpu {p.gpu} = replica {p.replica} tp {p.tp_rank}" for p in plan.placement
        )
        parts.append(f"## {plan.layout}\n\nranks: {where}\n")
        parts.append(
            f"{len(plan.engines)} engine(s) of `sgl.Engine`:\n\n```json\n{json.dumps(plan.engines[0], indent=1)}\n```"
        )
    trace = trace_of(experiment, batch, experiment.seeds[0]).summary()
    parts.append(
        "trace: " + ", ".join(f"{k} {v:,.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in trace.items())
    )
    return "\n\n".join(parts) + "\n"


def describe_cpu(experiment: Experiment) -> str:
    """The same for the embedded experiments."""
    from bench.backends.engine_arguments import engine_arguments

    lines = [f"# {experiment.name}: what would be launched on this machine's CPU"]
    for layout in experiment.layouts:
        arguments = engine_arguments(experiment.model, layout, "cpu", sequences=max(experiment.batches))
        lines.append(f"## {layout}\n\n```json\n{json.dumps(arguments, indent=1)}\n```")
    return "\n\n".join(lines) + "\n"


def memory_table(plans: tuple[LayoutPlan, ...], expected: dict[str, float]) -> str:
    rows = [
        {
            "layout": str(plan.layout),
            "GPU, GB": f"{plan.memory.total_bytes * GB:.1f}",
            "weights, GB": f"{plan.memory.weight_bytes * GB:.1f}",
            "reserve, GB": f"{plan.memory.reserve_bytes * GB:.1f}",
            "KV cache, GB": f"{plan.memory.kv_bytes * GB:.1f}",
            "KV tokens a replica": f"{plan.memory.kv_tokens:,}",
            "sequences at the cap": str(plan.sequences_at_cap),
            "expected rollout, s": f"{expected[str(plan.layout)]:.0f}" if str(plan.layout) in expected else "–",
        }
        for plan in plans
    ]
    return tabulate(rows, headers="keys", tablefmt="pipe", disable_numparse=True)


def expected_s(experiment: Experiment) -> dict[str, float]:
    """Predicted rollout seconds of the static layouts, largest batch, first seed, last host term."""
    static = experiment.model_copy(update={"arms": ("static",)})
    cell = Cell(static, max(experiment.batches), experiment.host_terms[-1], experiment.seeds[0])
    return {r.arm.removeprefix("static-"): r.rollout_s for r, _ in run_cell(cell)}


def matching_cells(names: list[str]) -> list[str]:
    """On a machine with GPUs: which cells it can run, and how. Empty without."""
    devices = local_devices()
    if not devices:
        return []
    cells = [load_experiment(name) for name in names]
    fits = [e.name for e in cells if e.cluster.nodes == 1 and serves(e.cluster.gpu, e.cluster.gpus_per_node, devices)]
    have = f"{len(devices)} x {devices[0][0]}"
    if not fits:
        return [f"GPUs here: {have}; no cell is for them, so all is predicted (a YAML file of your own can name them)"]
    return [
        f"GPUs here: {have}; they match {', '.join(fits)}",
        f"to measure one: python -m bench gen {fits[0]} --tier measured (first with --dry-run)",
    ]
