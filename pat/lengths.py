"""Response-length model: a survival curve from earlier rollouts, corrected by what the running rollout reveals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DOUBT = 0.1
GEOMETRIC_POINTS, EVEN_POINTS = 48, 129


def length_grid(cap_tokens: int) -> np.ndarray:
    """Bin edges 0 .. cap: geometric ones resolve short lengths, even ones where in a long tail a mode lies."""
    geometric, even = np.geomspace(1, cap_tokens, GEOMETRIC_POINTS), np.linspace(0, cap_tokens, EVEN_POINTS)
    return np.unique(np.concatenate([geometric, even]).round())


@dataclass(frozen=True, eq=False)
class LengthModel:
    """Discrete hazard of a response's end, with a sequence that reaches the cap ending there for certain.

    edges_tokens  [J + 1] bins of generated tokens, from 0 to the cap
    ended         [J] (weighted) sequences seen to end inside each bin, before the cap
    at_risk       [J] (weighted) sequences seen to enter each bin, those that left it unfinished counted in part
    doubt         sequences' worth of a constant hazard beside them, see :meth:`survival`
    """

    edges_tokens: np.ndarray
    ended: np.ndarray
    at_risk: np.ndarray
    doubt: float = 0.1

    @property
    def cap_tokens(self) -> int:
        return int(self.edges_tokens[-1])

    @classmethod
    def fit(cls, response_tokens: np.ndarray, cap_tokens: int, weight: float = 64.0) -> LengthModel:
        """From finished responses of earlier rollouts; those at the cap are truncated, not ended.

        ``weight``: the number of sequences this prior counts for against the running rollout's. ValueError if empty.
        """
        lengths = np.asarray(response_tokens, dtype=float)
        if lengths.size == 0:
            raise ValueError("length model: no earlier responses; give a trace of at least one rollout")
        edges = length_grid(cap_tokens)
        ended, at_risk = life_table(edges, lengths[lengths < cap_tokens], lengths[lengths >= cap_tokens])
        scale = min(1.0, weight / lengths.size)
        return cls(edges, ended * scale, at_risk * scale, DOUBT * scale)

    def updated(self, finished_tokens: np.ndarray, alive_tokens: np.ndarray) -> LengthModel:
        """With the running rollout's sequences added: finished ones, and alive ones as survivors so far."""
        finished = np.asarray(finished_tokens, dtype=float)
        capped = finished >= self.cap_tokens
        censored = np.concatenate([np.asarray(alive_tokens, dtype=float), finished[capped]])
        ended, at_risk = life_table(self.edges_tokens, finished[~capped], censored)
        return LengthModel(self.edges_tokens, self.ended + ended, self.at_risk + at_risk, self.doubt)

    def survival(self) -> np.ndarray:
        """[J + 1] P(response longer than each edge); the last is the share that reaches the cap.

        Kaplan-Meier over bins. Bins that nobody reached take the pooled hazard per token of all bins: a weak
        constant-hazard prior of half a sequence keeps the curve proper where the data end.
        """
        width = np.diff(self.edges_tokens)
        exposure = float(np.dot(self.at_risk, width))
        rate = self.ended.sum() / exposure if exposure > 0 else 1.0 / self.cap_tokens
        prior = self.doubt * -np.expm1(-rate * width)
        hazard = np.minimum(np.maximum((self.ended + prior) / (self.at_risk + self.doubt), 0.0), 1.0)
        return np.concatenate([[1.0], np.cumprod(1.0 - hazard)])

    def sample(self, sequences: int) -> np.ndarray:
        """Whole response lengths [sequences]: evenly spaced quantiles of the law, in an order that is always the same
        and says nothing."""
        share = (np.random.default_rng(sequences).permutation(sequences) + 0.5) / sequences
        lengths = np.interp(-share, -self.survival(), self.edges_tokens)
        return np.clip(np.ceil(lengths), 1, self.cap_tokens).astype(np.int64)


def life_table(edges: np.ndarray, ended: np.ndarray, censored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ended, at risk) by bin. A censored sequence counts in its last bin for the part it lived through."""
    bins = len(edges) - 1
    ends = np.bincount(np.searchsorted(edges[1:-1], ended), minlength=bins)
    last = np.searchsorted(edges[1:-1], censored)
    leaves = np.bincount(last, minlength=bins)
    at_risk = np.full(bins, float(len(ended) + len(censored)))
    at_risk[1:] -= np.cumsum(ends + leaves)[:-1]
    if len(censored):
        lived = (censored - edges[last]) / (edges[last + 1] - edges[last])
        unlived = 1.0 - np.minimum(np.maximum(lived, 0.0), 1.0)
        at_risk -= np.bincount(last, weights=unlived, minlength=bins)
    return ends.astype(float), at_risk


def expected_alive(
    edges_tokens: np.ndarray, survival: np.ndarray, generated_tokens: np.ndarray, ahead_tokens: np.ndarray
) -> np.ndarray:
    """[T] expected sequences still running after each of ``ahead_tokens`` [T] more tokens.

    Sequence i, alive at g_i, is alive t later with probability S(g_i + t) / S(g_i); none is beyond the cap. S is taken
    log-linear inside a bin (constant hazard). Sequences are pooled by their bin, so the cost is bins x T.
    """
    log_survival = np.log(np.maximum(survival, 1e-12))
    where = np.searchsorted(edges_tokens, generated_tokens, side="right") - 1
    where = np.minimum(np.maximum(where, 0), len(edges_tokens) - 2)
    count = np.bincount(where, minlength=len(edges_tokens) - 1)
    total = np.bincount(where, weights=generated_tokens, minlength=len(edges_tokens) - 1)
    used = count > 0
    start = total[used] / count[used]
    at = start[:, None] + ahead_tokens[None, :]
    log_ratio = np.interp(at, edges_tokens, log_survival) - np.interp(start, edges_tokens, log_survival)[:, None]
    return np.sum(count[used][:, None] * np.where(at < edges_tokens[-1], np.exp(log_ratio), 0.0), axis=0)
