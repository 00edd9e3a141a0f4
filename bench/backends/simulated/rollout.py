"""A simulated rollout: replicas that advance independently, and a policy that may change the layout between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from baselines.oracle import Schedule
from bench.backends.simulated.admission import Admission
from bench.backends.simulated.replica import NO_ONE, Replica, Sequences
from bench.backends.simulated.view import View
from pat.layout import Layout
from pat.placement import Room, place
from pat.policy import Policy, RolloutState, Switch
from pat.profile import StepProfile
from pat.switch_cost import SwitchCost, SwitchModel


@dataclass(frozen=True, eq=False)
class System:
    """The machine and engine that a rollout runs on.

    capacity_tokens   KV tokens a replica of each layout holds
    reaction_s        from the report that makes a policy switch until ranks hear of it: a step begun by then is made
    reports_at_once   the policy is asked after the first prefill and after the first step in another layout too
    """

    profile: StepProfile
    switches: SwitchModel
    capacity_tokens: dict[Layout, int]
    chunk_tokens: int = 8192
    max_running: int = 1 << 20
    reaction_s: float = 0.0
    reports_at_once: bool = False


@dataclass(frozen=True, slots=True)
class SwitchEvent:
    """One switch as it happened, with what the policy predicted."""

    time_s: float
    old: Layout
    new: Layout
    alive: int
    wait_s: float
    cost: SwitchCost
    predicted_cost_s: float
    predicted_gain_s: float


@dataclass(frozen=True, eq=False)
class Rollout:
    """What a rollout did. ``segments``: columns of runs of equal steps (see :func:`segments_of`); ``past``: every
    replica of every layout, as it ended."""

    first: Layout
    rollout_s: float
    finished_s: np.ndarray
    switches: tuple[SwitchEvent, ...]
    retractions: int
    past: tuple[Replica, ...]

    @cached_property
    def segments(self) -> dict[str, np.ndarray]:
        return segments_of(self.past)

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.first, tuple((event.time_s, event.new) for event in self.switches))


def simulate(
    system: System, policy: Policy, prompt_tokens: np.ndarray, response_tokens: np.ndarray, max_response_tokens: int
) -> Rollout:
    """Run every sequence [N] to its end. Deterministic; nothing reads a wall clock.

    ValueError where one sequence alone exceeds a replica's KV capacity.
    """
    sequences = Sequences.of(prompt_tokens, response_tokens)
    layout = policy.first_layout(sequences.prompt_tokens)
    replicas = begin(system, layout, sequences, max_response_tokens)
    past, events, now_s = list(replicas), [], 0.0
    wait_steps = 0 if system.reports_at_once else policy.interval_steps
    while policy.interval_steps is not None and (busy := [r for r in replicas if r.busy]):
        now_s, wait_steps = next_question_s(busy, wait_steps, now_s), policy.interval_steps
        for replica in busy:
            replica.advance(now_s)
        decision = policy.decide(observe(replicas, sequences, layout, now_s, len(events)))
        if isinstance(decision, Switch):
            event, replicas = switch(system, replicas, sequences, max_response_tokens, now_s, decision)
            policy.switched(decision.cost_s, event.cost.total_s)
            layout = decision.layout
            wait_steps = 1 if system.reports_at_once else policy.interval_steps
            events.append(event)
            past.extend(replicas)
    return finish(sequences, replicas, past, events)


def begin(system: System, layout: Layout, sequences: Sequences, max_response_tokens: int) -> list[Replica]:
    """The replicas of the first layout, dealt out round robin, as SGLang's data-parallel controller does."""
    replicas = make_replicas(system, layout, sequences, max_response_tokens, 0.0)
    for replica in replicas:
        replica.queue = list(range(replica.index, len(sequences.prompt_tokens), layout.dp))
        replica.start()
    return replicas


def finish(sequences: Sequences, replicas: list[Replica], past: list[Replica], events: list[SwitchEvent]) -> Rollout:
    """Run the last layout to its end."""
    for replica in replicas:
        replica.advance(np.inf)
    return Rollout(
        first=past[0].layout,
        rollout_s=float(np.max(sequences.finished_s)),
        finished_s=sequences.finished_s,
        switches=tuple(events),
        retractions=sum(r.retractions for r in past),
        past=tuple(past),
    )


def make_replicas(
    system: System, layout: Layout, sequences: Sequences, max_response_tokens: int, clock_s: float
) -> list[Replica]:
    """Empty replicas of a layout, at one clock; ValueError where one cannot hold the longest sequence."""
    longest, capacity = int((sequences.prompt_tokens + sequences.response_tokens).max()), system.capacity_tokens[layout]
    if longest > capacity:
        raise ValueError(f"{layout} holds {capacity} KV tokens a replica, one sequence needs {longest}")

    def admission() -> Admission:
        return Admission(capacity, max_response_tokens, system.max_running, system.chunk_tokens)

    return [Replica(i, layout, sequences, system.profile, admission(), clock_s) for i in range(layout.dp)]


def next_question_s(busy: list[Replica], interval_steps: int, now_s: float) -> float:
    """When the slowest of the busy replicas will have made ``interval_steps`` more decode steps."""
    return max(now_s, min(r.clock_s for r in busy)) + interval_steps * max(r.step_s(now_s) for r in busy)


def observe(replicas: list[Replica], sequences: Sequences, layout: Layout, now_s: float, switches: int) -> View:
    """What a policy may see at ``now_s``."""
    standing = [r.standing(now_s) for r in replicas if r.busy]
    return View(
        time_s=now_s,
        layout=layout,
        running=sum(batch for batch, _ in standing),
        context_sum=float(sum(tokens for _, tokens in standing)),
        waiting=sum(len(r.queue) for r in replicas),
        switches=switches,
        whole=lambda: whole_state(replicas, sequences, layout, now_s, switches),
        steps=lambda: tuple(r.observed(now_s) for r in replicas if r.busy),
    )


def whole_state(
    replicas: list[Replica], sequences: Sequences, layout: Layout, now_s: float, switches: int
) -> RolloutState:
    """Progress of the living, lengths of the finished."""
    seen = [r.peek(now_s) for r in replicas if r.busy] or [(NO_ONE, 0)]
    running = np.concatenate([ids for ids, _ in seen])
    generated = np.concatenate([sequences.generated_tokens[ids] + done for ids, done in seen])
    waiting = [i for r in replicas for i in r.queue]
    finished = np.ones(len(sequences.prompt_tokens), dtype=bool)
    finished[running] = False
    finished[waiting] = False
    return RolloutState(
        time_s=now_s,
        layout=layout,
        generated_tokens=generated,
        context_tokens=sequences.prompt_tokens[running] + generated,
        waiting=len(waiting),
        finished_tokens=sequences.response_tokens[finished],
        switches=switches,
        sequence_ids=running,
        waiting_ids=np.array(waiting, dtype=np.int64),
        finished_ids=np.flatnonzero(finished),
    )


def switch(
    system: System,
    replicas: list[Replica],
    sequences: Sequences,
    max_response_tokens: int,
    now_s: float,
    decision: Switch,
) -> tuple[SwitchEvent, list[Replica]]:
    """Stop all replicas at their next step boundary, wait for the last, move the sequences, start the new layout."""
    old, new = replicas[0].layout, decision.layout
    for replica in replicas:
        replica.stop(now_s + system.reaction_s)
    barrier_s = max(now_s, *(r.clock_s for r in replicas))
    running = np.concatenate([r.running for r in replicas])
    origin = np.repeat([r.index for r in replicas], [len(r.running) for r in replicas])
    context = sequences.context_tokens(running)
    target = place(old, new, origin, context, Room(system.capacity_tokens[new]), system.switches.node)
    moved = target >= 0
    cost = system.switches.cost(old, new, context[moved], origin[moved], target[moved])
    fresh = make_replicas(system, new, sequences, max_response_tokens, barrier_s + cost.total_s)
    waiting = running[~moved].tolist() + [i for r in replicas for i in r.queue]
    for replica in fresh:
        replica.running = running[target == replica.index]
        replica.queue = waiting[replica.index :: new.dp]
        replica.start()
    wait_s = barrier_s - now_s
    event = SwitchEvent(now_s, old, new, len(running), wait_s, cost, decision.cost_s, decision.gain_s)
    return event, fresh


def segments_of(replicas: Sequence[Replica]) -> dict[str, np.ndarray]:
    """Columns time_s, replica, tp, kind, steps, batch, context_tokens, seconds: a row is a run of ``steps`` steps of
    the same sequences; context_tokens is their mean at its start, seconds the time of the whole run."""
    rows = [(r, entry) for r in replicas for entry in r.log]
    sizes = [len(entry[1]) for _, entry in rows]
    columns = {
        name: np.concatenate([np.asarray(entry[i]) for _, entry in rows])
        for i, name in enumerate(("time_s", "steps", "batch", "context_tokens", "seconds"), start=1)
    }
    columns["replica"] = np.repeat([r.index for r, _ in rows], sizes)
    columns["tp"] = np.repeat([r.layout.tp for r, _ in rows], sizes)
    columns["kind"] = np.repeat([entry[0] for _, entry in rows], sizes)
    order = np.lexsort((columns["replica"], columns["time_s"]))
    return {name: column[order] for name, column in columns.items()}
