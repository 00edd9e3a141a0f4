"""Other cures of the long tail, in a static layout: the order of admission, partial rollouts, over-provisioning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.backends.simulated.replica import Sequences
from bench.backends.simulated.rollout import System, make_replicas, simulate
from bench.workloads.trace import LengthTrace
from pat.layout import Layout
from pat.policy import StaticPolicy


@dataclass(frozen=True, slots=True)
class Cured:
    """What a rollout that delivers N responses took and gave up. Shares are of 1.

    rollout_s           seconds until the N responses are there
    response_tokens     tokens of the N responses
    stale_token_share   tokens of them that an older policy has generated
    wasted_token_share  of all tokens generated, those that are thrown away
    mean_length_ratio   mean length of the responses delivered / of those asked for
    """

    rollout_s: float
    response_tokens: int
    stale_token_share: float = 0.0
    wasted_token_share: float = 0.0
    mean_length_ratio: float = 1.0


def sibling_estimate(trace: LengthTrace) -> np.ndarray:
    """[N] mean length of the *other* responses to the same prompt: what an epoch ago tells of a prompt. Of a prompt
    with one response, the mean of all."""
    ids = np.unique(trace.prompt_id.astype(str), return_inverse=True)[1]
    total, count = np.bincount(ids, weights=trace.response_tokens), np.bincount(ids)
    others = (total[ids] - trace.response_tokens) / np.maximum(count[ids] - 1, 1)
    return np.where(count[ids] > 1, others, trace.response_tokens.mean())


def longest_first(system: System, layout: Layout, trace: LengthTrace, estimate: np.ndarray, cap: int) -> Cured:
    """Sequences are dealt out and admitted in falling order of ``estimate`` [N]."""
    order = np.argsort(-estimate, kind="stable")
    prompt, response = trace.prompt_tokens[order], trace.response_tokens[order]
    rollout = simulate(system, StaticPolicy(layout), prompt, response, cap)
    return Cured(rollout.rollout_s, int(response.sum()))


def run_until(
    system: System, layout: Layout, prompt: np.ndarray, response: np.ndarray, cap: int, wanted: int
) -> tuple[float, np.ndarray, np.ndarray]:
    """Seconds until ``wanted`` of the sequences [n] have ended; [n] tokens that each has at the next step boundary; [n]
    whether it has ended (more than ``wanted`` where several end at once). Run twice: to learn the moment, and up to it.
    """
    whole = simulate(system, StaticPolicy(layout), prompt, response, cap)
    moment_s = float(np.sort(whole.finished_s)[wanted - 1])
    sequences = Sequences.of(prompt, response)
    for replica in make_replicas(system, layout, sequences, cap, 0.0):
        replica.queue = list(range(replica.index, len(prompt), layout.dp))
        replica.start()
        replica.stop(moment_s)
    return moment_s, sequences.generated_tokens, sequences.generated_tokens >= sequences.response_tokens


def over_provisioned(system: System, layout: Layout, trace: LengthTrace, wanted: int, cap: int) -> Cured:
    """All of ``trace`` (more than ``wanted``) begin; when ``wanted`` have ended, the rest is thrown away."""
    moment_s, generated, ended = run_until(system, layout, trace.prompt_tokens, trace.response_tokens, cap, wanted)
    kept = trace.response_tokens[ended]
    return Cured(
        moment_s,
        int(kept.sum()),
        wasted_token_share=1 - kept.sum() / generated.sum(),
        mean_length_ratio=kept.mean() / trace.response_tokens.mean(),
    )


def partial_rollouts(
    system: System, layout: Layout, fresh: list[LengthTrace], in_flight: int, wanted: int, cap: int, warm_up: int = 2
) -> list[Cured]:
    """Iterations with ``in_flight`` sequences each, that end when ``wanted`` have ended; the others go on in the next
    one, their prompt and tokens prefilled again. ``fresh``: a trace an iteration, new sequences taken from its head.

    The first ``warm_up`` iterations, which have few sequences that were carried over, are left out.
    """
    prompt = response = before = np.empty(0, dtype=np.int64)  # ``before``: tokens from earlier iterations
    out = []
    for trace in fresh:
        room = in_flight - len(prompt)
        prompt = np.r_[prompt, trace.prompt_tokens[:room]]
        response = np.r_[response, trace.response_tokens[:room]]
        before = np.r_[before, np.zeros(len(trace.prompt_tokens[:room]), dtype=np.int64)]
        moment_s, new, ended = run_until(system, layout, prompt + before, response - before, cap, wanted)
        tokens = int(response[ended].sum())
        out.append(
            Cured(
                moment_s,
                tokens,
                stale_token_share=before[ended].sum() / tokens,
                mean_length_ratio=response[ended].mean() / np.concatenate([t.response_tokens for t in fresh]).mean(),
            )
        )
        prompt, response, before = prompt[~ended], response[~ended], (before + new)[~ended]
    return out[warm_up:]
