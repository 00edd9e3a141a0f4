"""``bench profile``: a step profile of real SGLang on this machine, as one Parquet file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.backends.adaptive_engine import AdaptiveRollouts
from bench.backends.engine_arguments import EngineError
from bench.errors import UserError
from bench.experiment import known_experiments, load_experiment
from bench.live_arms import longest_tokens
from bench.profiles import stored
from bench.profiles.live import measure
from bench.profiles.plan import STEPS_PER_BATCH
from bench.profiles.samples import Samples
from bench.progress import console, progress_bar
from bench.report.step_errors import hold_out_rows
from bench.report.tables import markdown
from bench.tiny_models import PRESETS, materialise
from pat.layout import Layout


@dataclass(frozen=True, slots=True)
class Wanted:
    """One profile to measure; ``sequences`` and ``context_tokens`` of a whole rollout."""

    model: str
    layouts: tuple[Layout, ...]
    device: str
    sequences: int
    context_tokens: int


def run(
    model: str | None, layouts: str, device: str, sequences: int, context_tokens: int, repeats: int, out: Path
) -> None:
    """Measure, cache, write and print the hold-out error. UserError for bad input, before an engine starts."""
    wanted = of_experiments() if model is None else [Wanted(model, parse(layouts), device, sequences, context_tokens)]
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device must be cpu or cuda, not {device!r}")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is not a folder; give one, or a name that is free")
    paths = {one: model_path(one.model) for one in wanted}
    identities = {one: stored.identity(path, one.device) for one, path in paths.items()}
    with progress_bar() as progress:
        for one in wanted:
            task = progress.add_task(f"profile of {Path(one.model).name}", total=None)
            samples = measured(
                one, paths[one], repeats, lambda done, of, t=task: progress.update(t, completed=done, total=of)
            )
            samples = stored.stamped(samples, identities[one])
            stored.keep(samples, one.layouts)
            path = stored.recorded_path(out, one.model)
            samples.save(path)
            console.print(f"profile: {path}")
            print(markdown(hold_out_rows([samples])))


def of_experiments() -> list[Wanted]:
    """What the embedded experiments need: for each model the most sequences and the longest context."""
    needs: dict[tuple, tuple[int, int]] = {}
    for experiment in map(load_experiment, known_experiments()):
        if experiment.tier == "measured" and experiment.cluster.gpu == "cpu":
            key = (experiment.model, experiment.layouts)
            most, longest = needs.get(key, (0, 0))
            needs[key] = max(most, *experiment.batches), max(longest, longest_tokens(experiment))
    return [Wanted(model, layouts, "cpu", *need) for (model, layouts), need in needs.items()]


def parse(text: str) -> tuple[Layout, ...]:
    """``"TP1xDP2,TP2xDP1"``, lowest TP first; UserError unless all are of one world."""
    try:
        found = tuple(sorted({Layout.parse(part.strip()) for part in text.split(",")}))
    except ValueError as error:
        raise UserError(f"--layouts: {error}") from None
    if len({layout.world for layout in found}) > 1:
        raise UserError(f"--layouts {text}: TP x DP must be the same in all")
    return found


def model_path(model: str) -> Path:
    return materialise(model) if model in PRESETS else Path(model)


def measured(wanted: Wanted, path: Path, repeats: int, progress) -> Samples:
    """The profile from an engine that is started for it."""
    sizes: dict = {"sequences": wanted.sequences}
    if wanted.device == "cpu":
        longest = wanted.context_tokens + 2 * STEPS_PER_BATCH
        sizes["kv_tokens_per_rank"] = longest * -(-wanted.sequences // wanted.layouts[0].world)
    try:
        with AdaptiveRollouts.over(str(path), wanted.layouts, wanted.device, **sizes) as engine:
            return measure(
                engine, wanted.model, wanted.sequences, wanted.context_tokens, repeats, thorough=True, progress=progress
            )
    except EngineError as error:
        raise UserError(f"bench profile: {error}") from None
