"""Phase model of a synchronous GRPO iteration in VeRL: what an iteration takes beside its generation. Pure.

    iteration = generation + old log-probs + reference + update + weight sync

A training pass is bound by arithmetic or, where that is slower, by FSDP's gathering of the weights for each micro-batch
(the two overlap). Arithmetic of a forward pass over sequences of L tokens (2 a multiply-add, causal attention):

    2 x (parameters without the input embedding) x sum(L)  +  2 x layers x heads x head_dim x sum(L^2)

An update counts three forward passes (backward is twice a forward). The share of a GPU's peak that each pass reaches is
taken from published runs of VeRL:

- update 0.34: ``perf/mfu/actor`` of H100 runs, 0.343 and "about 0.33" (github.com/verl-project/verl issues 2060, 965).
- forward 0.37: follows from the ratio of update to old log-probs of a 7B FSDP2 run, 286 s and 88 s of a step of 749 s
  with generation 321 s (VeRL's documentation, docs/advance/one_step_off.md, "colocate sync", 16 H20, DAPO).

Other published ratios, which the model did not see, stand in :data:`PUBLISHED_STEPS`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from pat.model import ModelShape

PEAK_FLOPS = {"h100_sxm": 989e12, "h200_sxm": 989e12, "a100_sxm": 312e12, "a40": 149.7e12, "l40s": 362e12}
"""Dense bfloat16 tensor-core peak of one GPU by the name that experiments use (the makers' data sheets)."""

FORWARDS_PER_UPDATE = 3.0
UPDATE_SHARE = 0.34
FORWARD_SHARE = UPDATE_SHARE * (286 / 88) / FORWARDS_PER_UPDATE
OPTIMISER_BYTES = 12
"""Of one parameter: float32 master copy and Adam's two moments."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """The GPUs that train, all of them together.

    peak_flops        of one GPU, bfloat16
    link_bytes_per_s  that one GPU receives while all others do, over the slowest link of the group
    host_bytes_per_s  between one GPU and host memory, where the optimiser is kept there between phases; None: it stays
    micro_batch_tokens  of one GPU and forward pass
    """

    gpus: int
    peak_flops: float
    link_bytes_per_s: float
    host_bytes_per_s: float | None = None
    micro_batch_tokens: int = 16_384
    forward_share: float = FORWARD_SHARE
    update_share: float = UPDATE_SHARE

    def __post_init__(self) -> None:
        for name in ("gpus", "peak_flops", "link_bytes_per_s", "micro_batch_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"trainer: {name} must be above 0, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of each phase of an iteration, by the names of VeRL's timers (``timing_s/<name>``)."""

    gen: float
    old_log_prob: float
    ref: float
    update_actor: float
    update_weights: float

    @property
    def step(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def gen_share(self) -> float:
        return self.gen / self.step


def forward_flops(shape: ModelShape, lengths_tokens: np.ndarray) -> float:
    """Of one forward pass over sequences of these lengths [N], prompt and response together."""
    lengths = np.asarray(lengths_tokens, dtype=float)
    weights = shape.params - (0 if shape.tied_embeddings else shape.vocab * shape.hidden)
    attention = shape.layers * shape.heads * shape.head_dim
    return float(2 * weights * lengths.sum() + 2 * attention * np.square(lengths).sum())


def gather_s(shape: ModelShape, trainer: Trainer, tokens: float, gathers: float) -> float:
    """FSDP moves the other ranks' weights to every GPU ``gathers`` times for each micro-batch."""
    micro_batches = np.ceil(tokens / trainer.gpus / trainer.micro_batch_tokens)
    moved_bytes = shape.weight_bytes * (trainer.gpus - 1) / trainer.gpus
    return float(micro_batches * gathers * moved_bytes / trainer.link_bytes_per_s)


def forward_s(shape: ModelShape, trainer: Trainer, lengths_tokens: np.ndarray) -> float:
    """Log-probabilities of all sequences: one forward pass, sequences spread evenly over the GPUs."""
    compute_s = forward_flops(shape, lengths_tokens) / (trainer.gpus * trainer.peak_flops * trainer.forward_share)
    return max(compute_s, gather_s(shape, trainer, float(np.sum(lengths_tokens)), gathers=1))


def update_s(shape: ModelShape, trainer: Trainer, lengths_tokens: np.ndarray) -> float:
    """One epoch of updates: forward, backward (weights gathered twice, gradients scattered once), optimiser's moves."""
    flops = FORWARDS_PER_UPDATE * forward_flops(shape, lengths_tokens)
    compute_s = flops / (trainer.gpus * trainer.peak_flops * trainer.update_share)
    bound_s = max(compute_s, gather_s(shape, trainer, float(np.sum(lengths_tokens)), gathers=3))
    if trainer.host_bytes_per_s is None:
        return bound_s
    return bound_s + 2 * OPTIMISER_BYTES * shape.params / trainer.gpus / trainer.host_bytes_per_s


def sync_s(shape: ModelShape, trainer: Trainer) -> float:
    """Weights from the trainer to the rollout: every GPU receives all of them once, tensor by tensor."""
    return shape.weight_bytes * (trainer.gpus - 1) / trainer.gpus / trainer.link_bytes_per_s


def iteration(
    shape: ModelShape, trainer: Trainer, lengths_tokens: np.ndarray, gen_s: float, reference: bool = True
) -> Phases:
    """Phases of an iteration whose sequences have these lengths [N] and whose generation takes ``gen_s``."""
    log_probs_s = forward_s(shape, trainer, lengths_tokens)
    return Phases(
        gen=gen_s,
        old_log_prob=log_probs_s,
        ref=log_probs_s if reference else 0.0,
        update_actor=update_s(shape, trainer, lengths_tokens),
        update_weights=sync_s(shape, trainer),
    )


@dataclass(frozen=True, slots=True)
class PublishedStep:
    """Seconds (or microseconds a token) of a published VeRL run; ``ref`` None where it had no reference model."""

    source: str
    old_log_prob: float
    ref: float | None
    update_actor: float
    fitted: bool = False

    @property
    def update_to_forward(self) -> float:
        return self.update_actor / self.old_log_prob


PUBLISHED_STEPS = (
    PublishedStep("VeRL docs/advance/one_step_off.md, 7B, FSDP2", 88, None, 286, fitted=True),
    PublishedStep("VeRL docs/advance/one_step_off.md, 7B, Megatron", 119, None, 344),
    PublishedStep("verl issue 1208, GSM8K on GH200", 3.566, 3.420, 14.302),
    PublishedStep("verl pull request 7519, DAPO, bf16, microseconds a token", 17.8, 17.3, 45.2),
)


def predicted_ratio() -> float:
    """Update to old log-probs where both are bound by arithmetic: what :data:`PUBLISHED_STEPS` is compared with."""
    return FORWARDS_PER_UPDATE * FORWARD_SHARE / UPDATE_SHARE
