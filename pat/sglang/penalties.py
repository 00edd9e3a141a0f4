"""Penalties that look back (frequency, presence, repetition, fewest new tokens) across switches and retractions.

SGLang counts tokens into them step by step, in ``ScheduleBatch.cumulate_penalty_output_tokens``: without overlap the
last token before the step that follows it; with overlap, where that token is still under way, the one before, so
that the first it counts is the prompt's last. What a new batch of old requests must remember follows from this.
"""

from __future__ import annotations

from typing import Any

import torch


class OneRequest:
    """The part of a batch that SGLang's penalties read, of the requests merged so far."""

    def __init__(self, request, device) -> None:
        self.reqs, self.device = [request], device


def remember(_result, info, batch, vocab_size: int) -> None:
    """After SamplingBatchInfo.adjusted_from_schedule_batch: requests that have generated are not new to penalties."""
    had = info.penalizer_orchestrator
    if not had.is_required or not any(request.output_ids for request in batch.reqs):
        return
    late, decoding = int(batch.enable_overlap), int(batch.forward_mode.is_decode())
    kinds, parts = set(had.penalizers), [OneRequest(request, batch.device) for request in batch.reqs]
    found = []
    for part in parts:
        one = type(had)(vocab_size, part, kinds)
        tokens = seen(part.reqs[0])[1 - late :]
        for token in tokens[: max(0, len(tokens) - late - decoding)]:  # the next step of a decoding one counts one
            one.cumulate_output_tokens(torch.tensor([token], dtype=torch.int64, device=batch.device))
        found.append(one)
    first = found[0]
    for part, one in zip(parts[1:], found[1:], strict=True):
        first.merge(one)
        parts[0].reqs += part.reqs  # after the merge, which reads how many rows the first has
    first.batch = batch
    info.penalizer_orchestrator = first


def seen(request: Any) -> list[int]:
    """Token ids in the order in which SGLang counts them with overlap."""
    return [request.origin_input_ids[-1], *request.output_ids]


def count_late_once(batch) -> None:
    """For a batch in which no result is under way although the scheduler overlaps: its next step counts the token that
    it would have counted with the last one under way."""

    def count() -> None:
        del batch.cumulate_penalty_output_tokens
        tokens = torch.tensor([seen(request)[-2:][0] for request in batch.reqs], dtype=torch.int64)
        batch.sampling_info.penalizer_orchestrator.cumulate_output_tokens(tokens.to(batch.device))

    batch.cumulate_penalty_output_tokens = count
