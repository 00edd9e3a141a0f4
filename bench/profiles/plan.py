"""What a live profile measures: few rollouts that cover (TP, batch, context), as a list made beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pat.layout import Layout

STEPS_PER_BATCH = 5
VARIANTS = ("greedy", "sampled", "streamed")
"""How tokens are made and sent: greedy and at once when a response ends, sampled, or greedy and sent as they come."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One rollout of the plan: every replica's batch falls through ``batches``, STEPS_PER_BATCH steps at each.

    ``prompt_tokens`` of every prompt set the context; ``repeat`` 0 warms up and is not kept.
    """

    layout: Layout
    prompt_tokens: int
    batches: tuple[int, ...]
    variant: str
    repeat: int

    def response_tokens(self) -> list[int]:
        """[sequences] lengths, in turn over the replicas: all start together, some end after each level."""
        lengths, steps = [], 0
        for batch, after in zip(self.batches, (*self.batches[1:], 0), strict=True):
            steps += STEPS_PER_BATCH
            lengths += [1 + steps] * (batch - after)
        return [length for length in lengths for _ in range(self.layout.dp)]

    def prompts(self) -> list[list[int]]:
        """One a sequence; no two share a prefix."""
        many, long = self.batches[0] * self.layout.dp, self.prompt_tokens
        return [[3 + (17 * i + 7 * j + i * j + 29 * self.repeat) % 240 for j in range(long)] for i in range(many)]


def falling_batches(most: int) -> tuple[int, ...]:
    """From ``most`` down to one: four evenly spaced batches in each octave above 8, all below, for matrix products of
    few rows are timed by rules of their own."""
    octaves = {(4 + part) * 2**power for power in range(1, most.bit_length()) for part in range(4)}
    return tuple(sorted({most, *range(1, min(8, most) + 1), *(b for b in octaves if b <= most)}, reverse=True))


def visits(
    layouts: Sequence[Layout], sequences: int, max_context_tokens: int, repeats: int, thorough: bool
) -> list[Visit]:
    """The plan: batches from a replica's share of ``sequences`` down to one, with short and middling prompts; long
    contexts with a quarter of the batch, for only survivors get there. Layouts take turns within each repeat, so that
    drift of the machine meets them alike. ``thorough``: a warm-up before, and the other variants at short prompts.
    """
    short, middle, long = max(4, max_context_tokens // 24), max_context_tokens // 3, 2 * max_context_tokens // 3

    def one(layout: Layout, prompt: int, variant: str, repeat: int, part: int = 1) -> Visit:
        most = max(1, -(-sequences // layout.dp) // part)
        batches = falling_batches(most)
        fits = max(1, (max_context_tokens - prompt - 1) // STEPS_PER_BATCH)
        return Visit(layout, prompt, batches[-fits:], variant, repeat)

    plan = [one(layout, short, "greedy", 0) for layout in layouts] if thorough else []
    for repeat in range(1, repeats + 1):
        for prompt, part in ((short, 1), (middle, 1), (long, 4)):
            plan += [one(layout, prompt, "greedy", repeat, part) for layout in layouts]
        if thorough:
            plan += [one(layout, short, variant, repeat) for variant in VARIANTS[1:] for layout in layouts]
    return plan
