"""Host terms by name: what the scheduler's CPU costs a decode step."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from pat.host import NO_HOST, HostTerm

CPU_OVERHEADS = Path(__file__).parents[1] / "data" / "vidur-a40" / "cpu_overheads.csv"
HOST_PARTS = ("schedule_ms", "prepare_inputs_launch_ms", "model_execution_launch_ms", "process_model_outputs_ms")

SGLANG = HostTerm(
    "sglang-0.5",
    base_s=0.55e-3,
    per_sequence_s=0.0055e-3,
    overlapped=True,
    broadcast_s=0.5e-3,
    source="SGLang 0.5.23's own scheduler, decode steps measured on a CPU; broadcast of a batch to TP ranks by gloo",
)


@dataclass(frozen=True, slots=True)
class HostFit:
    """A serial host term fitted to vidur's rows of Llama-2-7b at TP1, with the share of the variance it explains."""

    term: HostTerm
    r_squared: float
    rows: int


@cache
def fit_cpu_overheads(name: str, largest_batch: int, parts: tuple[str, ...], note: str = "") -> HostFit:
    """Least squares of base + per sequence over the rows of at most ``largest_batch`` sequences.

    A step's host time is the sum of the medians of ``parts``. The sampler is left out: the profiles count it as device
    time. It holds for every TP: rows of TP >= 2 carry Ray's overhead, which SGLang does not have.
    """
    with CPU_OVERHEADS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["batch_size"]) <= largest_batch]
    batch = np.array([float(row["batch_size"]) for row in rows])
    host_ms = np.array([sum(float(row[part]) for part in parts) for row in rows])
    per_sequence_ms, base_ms = np.polyfit(batch, host_ms, 1)
    left = host_ms - base_ms - per_sequence_ms * batch
    names = ", ".join(part.removesuffix("_ms").replace("_", " ") for part in parts)
    term = HostTerm(
        name,
        base_s=float(base_ms) * 1e-3,
        per_sequence_s=float(per_sequence_ms) * 1e-3,
        overlapped=False,
        source=f"fit of vidur's cpu_overheads, Llama-2-7b at TP1, 8 to {largest_batch} sequences: {names}{note}",
    )
    return HostFit(term, float(1 - left.var() / host_ms.var()), len(rows))


CHOSEN = "; rows and parts chosen to meet a prior 1.2 + 0.045 ms; 0.5 + 0.067 ms without rows above 96"
NO_LAUNCH = tuple(part for part in HOST_PARTS if part != "model_execution_launch_ms")
PAPER_ERA = {
    "paper-era": (128, HOST_PARTS, CHOSEN),
    "paper-era-96": (96, HOST_PARTS),
    "paper-era-96-no-launch": (96, NO_LAUNCH),
}
"""Host term of a vLLM-like scheduler of 2024, serial, by each way to fit it; ``paper-era`` is the one in use.

Its rows and parts are chosen so that the fit comes near the 1.2 ms + 0.045 ms that this project began with; the data do
not say so by themselves. The two rows above 96 sequences lie below the line of the others (their schedule takes 35% and
54% of what it does at 96), as if not all sequences ran: without them the fit is much closer, and the launch is time
that a GPU can hide.
"""


def paper_era_fits() -> dict[str, HostFit]:
    """Every fit of PAPER_ERA, by name."""
    return {name: fit_cpu_overheads(name, *how) for name, how in PAPER_ERA.items()}


PRESETS = {
    **{name: lambda name=name, how=how: fit_cpu_overheads(name, *how).term for name, how in PAPER_ERA.items()},
    "sglang-0.5": lambda: SGLANG,
    "none": lambda: NO_HOST,
}


def host_term(name: str) -> HostTerm:
    """By name, or ``serial:BASE,EACH`` and ``overlapped:BASE,EACH`` in ms a step and ms a sequence and step; ValueError
    lists the known ones."""
    way, _, numbers = name.partition(":")
    if way in ("serial", "overlapped"):
        try:
            base_ms, each_ms = (float(number) for number in numbers.split(","))
        except ValueError:
            base_ms = each_ms = -1.0
        if not (0 <= base_ms < 1e6 and 0 <= each_ms < 1e6):
            raise ValueError(f"host term {name!r}: {way} takes BASE,EACH in ms, both at least 0")
        return HostTerm(name, base_ms * 1e-3, each_ms * 1e-3, way == "overlapped", source="given on the command line")
    if name not in PRESETS:
        known = ", ".join([*PRESETS, "serial:BASE_MS,EACH_MS", "overlapped:BASE_MS,EACH_MS"])
        raise ValueError(f"host term {name!r} is not known; known ones: {known}")
    return PRESETS[name]()
