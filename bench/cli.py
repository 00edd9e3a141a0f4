"""Command line: ``python -m bench gen | whatif | sweep | profile | switch | report``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from bench.errors import UserError

INTERRUPTED = 130
"""What typer returns after Ctrl-C."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Adaptive tensor parallelism in RLHF rollouts: run comparisons, read reports.",
)

Out = Annotated[Path, typer.Option(help="Folder of records and reports.")]


@app.command()
def gen(
    experiments: Annotated[
        list[str] | None,
        typer.Argument(help="Names in bench/experiments or YAML files; none: every cell that this machine can run."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds 0 .. N - 1 instead of the experiment's.")] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Prompts: builtin, hub (DeepScaleR), or a JSON, JSONL or Parquet file in its schema. "
            "None: builtin where measured, synthetic prompt lengths where predicted."
        ),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Length trace (JSONL) that every arm replays, instead of synthetic ones.")
    ] = None,
    tier: Annotated[
        str | None, typer.Option(help="measured: run a GPU cell on real SGLang here, instead of predicting it.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Hub name or directory of the model's weights, for --tier measured.")
    ] = None,
    tracker: Annotated[str, typer.Option(help="wandb (offline without a key) or none.")] = "wandb",
    out: Out = Path("results"),
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be launched, and launch nothing.")
    ] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run finished arms again instead of keeping them.")] = False,
    profile: Annotated[
        Path | None, typer.Option(help="Step profile (`bench profile`) that measured PAT plans with; none: its own.")
    ] = None,
    force_profile: Annotated[
        bool, typer.Option("--force-profile", help="Take --profile also from another model, machine or version.")
    ] = False,
) -> None:
    """Rollouts: static layouts beside PAT. Writes raw records and OUT/gen.md; run again to resume."""
    from bench.gen import Options, run

    chosen = tuple(experiments or ())
    run(Options(chosen, seeds, dataset, trace, tier, model, tracker, out, dry_run, fresh, profile, force_profile))


@app.command("profile")
def profile_command(
    model: Annotated[
        str | None,
        typer.Option(help="Preset of bench/tiny_models.py, or a model directory; none: those of the CPU experiments."),
    ] = None,
    layouts: Annotated[str, typer.Option(help="Layouts of one world, with commas between.")] = "TP1xDP2,TP2xDP1",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    sequences: Annotated[int, typer.Option(min=1, help="Of a whole rollout; replicas share them.")] = 32,
    context: Annotated[int, typer.Option(min=32, help="The longest context, in tokens.")] = 288,
    repeats: Annotated[int, typer.Option(min=1, help="Times that every point is measured.")] = 3,
    out: Out = Path("results"),
) -> None:
    """Measure steps of real SGLang here, by TP, batch and context. Writes OUT/raw/profile-MODEL.parquet.

    `bench gen` on this machine plans with it from then on.
    """
    from bench.profile import run

    run(model, layouts, device, sequences, context, repeats, out)


@app.command()
def e2e(
    experiments: Annotated[
        list[str] | None,
        typer.Argument(help="Names in bench/experiments/e2e or YAML files; none: the two that a CPU can run."),
    ] = None,
    arm: Annotated[list[str] | None, typer.Option(help="Only this arm; may be repeated.")] = None,
    iterations: Annotated[int | None, typer.Option(min=2, help="Of a launch, with the first, discarded one.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed instead of the experiment's.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Prompts: builtin, hub (DeepScaleR), or a file in its schema.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hub name or directory of the model's weights.")] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(help="A running Ray cluster (auto, or host:port); none: one is started here."),
    ] = None,
    tracker: Annotated[str, typer.Option(help="wandb (offline without a key) or none.")] = "wandb",
    out: Out = Path("results"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print VeRL's command lines, and launch nothing.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run finished arms again instead of keeping them.")] = False,
) -> None:
    """GRPO iterations of real VeRL with each rollout arm. Writes raw records and OUT/e2e.md; run again to resume."""
    from bench.e2e.run import Options, run

    arms, names = tuple(arm or ()), tuple(experiments or ())
    run(Options(names, arms, iterations, seed, dataset, model, ray_address, tracker, out, dry_run, fresh))


@app.command()
def switch(
    model: Annotated[str, typer.Option(help="Preset of bench/tiny_models.py.")] = "llama-0.1b",
    rounds: Annotated[int, typer.Option(min=1, help="Rollouts, of five switches each.")] = 4,
    out: Out = Path("results"),
) -> None:
    """What a change of layout costs on real SGLang here, beside a restart. Writes OUT/switch.md."""
    from bench.report.switch import render_switch
    from bench.switch import run

    run(model, rounds, out)
    print(render_switch(out))


@app.command()
def whatif(
    model: Annotated[str, typer.Option(help="Hugging Face model directory or name; a config.json is enough.")],
    gpu: Annotated[str, typer.Option(help="h100_sxm, h200_sxm, a100_sxm, l40s or a40.")],
    lengths: Annotated[str, typer.Option(help="Trace of a run (JSONL), or lognormal:mu,sigma and the like.")],
    max_response: Annotated[int, typer.Option(min=2, help="Greatest response, in tokens.")],
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a rollout: prompts x samples.")],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs in all.")] = 8,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes they are in; none: of 8 GPUs.")] = None,
    host_term: Annotated[
        str, typer.Option(help="sglang-0.5, paper-era, or serial:MS,MS_A_SEQUENCE, overlapped:MS,MS_A_SEQUENCE.")
    ] = "sglang-0.5",
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Rollouts to simulate; none: 5, of 8,192 sequences and more 3.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of markdown.")] = False,
) -> None:
    """Would adaptive TP pay off? Best static layout, best schedule, gain and memory, predicted in seconds."""
    from bench.report.whatif import as_json as json_of
    from bench.report.whatif import as_markdown
    from bench.whatif import Question, answer

    said = answer(Question(model, gpu, gpus, nodes, lengths, max_response, batch, host_term, seeds))
    print(json.dumps(json_of(said), indent=1) if as_json else as_markdown(said))


@app.command()
def sweep(
    out: Out = Path("results"),
    ray: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster to run on (auto, or host:port); none: this machine.")
    ] = None,
) -> None:
    """When does PAT pay off? Gain over host term, links, batch, tail, switch and model. Writes OUT/sensitivity.md."""
    from bench.report.sensitivity import run

    print(run(out, ray))


@app.command()
def scenarios(
    count: Annotated[int, typer.Option(min=1, help="How many; the first are always the same ones.")] = 500,
    out: Out = Path("results"),
) -> None:
    """Random predicted cells, PAT beside every static layout: OUT/raw/scenarios.jsonl, a section of predictor.md."""
    from bench.gen import progress_bar
    from bench.scenarios import run

    with progress_bar() as progress:
        task = progress.add_task("scenarios", total=count)
        print(run(out, count, lambda done, of: progress.update(task, completed=done, total=of)))


@app.command()
def report(
    out: Out = Path("results"),
    check: Annotated[bool, typer.Option("--check", help="Fail where a report lacks a section.")] = False,
) -> None:
    """Render OUT/gen.md, predictor.md, paper.md and, where iterations were run, e2e.md anew from the raw records."""
    from bench.report.e2e import SECTIONS as E2E_SECTIONS
    from bench.report.e2e import render_e2e
    from bench.report.e2e_launches import launches
    from bench.report.gen import SECTIONS, check_sections, render
    from bench.report.paper import SECTIONS as PAPER_SECTIONS
    from bench.report.paper import render_paper
    from bench.report.predictor import check_predictor, render_predictor

    path, predictor = render(out), render_predictor(out)
    if check:
        check_sections(path, SECTIONS)
        check_predictor(predictor)
    print(path, predictor, sep="\n")
    if launches(out):
        path = render_e2e(out)
        if check:
            check_sections(path, E2E_SECTIONS)
        print(path)
    if path := render_paper(out):
        if check:
            check_sections(path, PAPER_SECTIONS)
        print(path)


def main() -> None:
    """Run; a user's mistake is one line on stderr and exit code 2, Ctrl-C exit code 130."""
    try:
        code = app(standalone_mode=False)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's own: the command line is wrong
            error.show()
            sys.exit(2)
        raise
    if code == INTERRUPTED:
        print("interrupted: what was finished is kept; the same command goes on from there", file=sys.stderr)
    sys.exit(code or 0)
