"""What the numbers say, in sentences made from them."""

from __future__ import annotations

from bench.report.comparison import Comparison

EVEN_PERCENT = 1.0
"""Differences below this are called even."""


def findings(comparisons: list[Comparison]) -> list[str]:
    """One sentence a question a reader has; each counts cells, none is written by hand."""
    sentences = []
    for host in dict.fromkeys(c.host_term for c in comparisons):
        for batch in sorted({c.batch for c in comparisons if c.host_term == host}):
            cells = [c for c in comparisons if c.host_term == host and c.batch == batch]
            sentences += [s for s in (verl_sentence(cells), static_sentence(cells)) if s]
    worst = worst_sentence(comparisons)
    return [*sentences, worst] if worst else sentences


def where(cells: list[Comparison]) -> str:
    return f"{cells[0].host_term} host term, {cells[0].batch:,} sequences"


def verl_sentence(cells: list[Comparison]) -> str | None:
    """How PAT compares with VeRL's default layout."""
    gains = [g.mean for c in cells if (g := c.gain("pat-paper", c.verl_default))]
    if not gains:
        return None
    return (
        f"{where(cells)}: PAT (paper) gains {min(gains):+.1f}% to {max(gains):+.1f}% over VeRL's default layout "
        f"in {len(gains)} cells."
    )


def static_sentence(cells: list[Comparison]) -> str | None:
    """How the planned PAT compares with the best static layout."""
    gains = {c.experiment.name: g.mean for c in cells if (g := c.gain("pat-planned", c.best_static))}
    if not gains:
        return None
    ahead = [name for name, gain in gains.items() if gain > EVEN_PERCENT]
    even = [name for name, gain in gains.items() if abs(gain) <= EVEN_PERCENT]
    best = max(gains, key=gains.get)
    sentence = (
        f"{where(cells)}: PAT (planned) beats the best static layout by more than {EVEN_PERCENT:.0f}% in "
        f"{len(ahead)} of {len(gains)} cells (most: {gains[best]:+.1f}% in {best})"
    )
    return sentence + (f"; in {len(even)} the two are within {EVEN_PERCENT:.0f}% of each other." if even else ".")


def worst_sentence(comparisons: list[Comparison]) -> str | None:
    """The cell where the planned PAT does worst."""
    gains = [(g.mean, c) for c in comparisons if (g := c.gain("pat-planned", c.best_static))]
    if not gains:
        return None
    gain, cell = min(gains, key=lambda pair: pair[0])
    return (
        f"The worst cell for PAT (planned) against the best static layout: {gain:+.1f}%, in {cell.experiment.name} "
        f"with {cell.batch:,} sequences under the {cell.host_term} host term."
    )
