"""One replica, one step at a time, by SGLang's rules as plain loops: what the simulator must agree with."""

from __future__ import annotations

from dataclasses import dataclass, field

INITIAL, LOWEST, RETRACT = 0.7, 0.7 * 0.14, 20


@dataclass
class Reference:
    """Runs sequences (prompt, response) of one replica; ``decode_s(batch, mean context)``, ``prefill_s(tokens)``."""

    sequences: list[tuple[int, int]]
    capacity: int
    cap: int
    chunk: int
    decode_s: object
    prefill_s: object
    clip: int = 4096
    decay_steps: int = 600
    clock_s: float = 0.0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    retractions: int = 0
    peak_kv: int = 0
    finished_s: dict[int, float] = field(default_factory=dict)

    def run(self) -> Reference:
        self.queue, self.running, self.done = list(range(len(self.sequences))), [], [0] * len(self.sequences)
        self.ratio, self.full = INITIAL, False
        while self.queue or self.running:
            if not (self.queue and not self.full and self.prefill_pass()):
                self.decode_step()
        return self

    def left(self, i: int) -> int:
        return min(self.cap - self.done[i], self.clip)

    def context(self, i: int) -> int:
        return self.sequences[i][0] + self.done[i]

    def prefill_pass(self) -> bool:
        """Admit from the head of the queue; False where nobody could be."""
        remaining = self.capacity - sum(self.context(i) - 1 for i in self.running)
        remaining -= self.ratio * sum(self.left(i) for i in self.running)
        taken, tokens, no_token = [], 0, False
        for i in self.queue:
            if taken and tokens + self.context(i) > self.chunk:
                break
            if self.context(i) + self.left(i) + 1 >= remaining and (taken or self.running):
                no_token = True
                break
            taken.append(i)
            tokens += self.context(i)
            remaining -= self.context(i) + 1 + min(self.cap, self.clip)
        self.full = no_token and bool(self.running)
        if not taken:
            return False
        self.queue = self.queue[len(taken) :]
        self.clock_s += self.prefill_s(tokens)
        self.prefill_tokens += tokens
        for i in taken:
            self.done[i] += 1
        self.running += taken
        self.leave()
        return True

    def decode_step(self) -> None:
        if sum(self.context(i) for i in self.running) > self.capacity:
            order = sorted(self.running, key=lambda i: (-self.done[i], self.sequences[i][0], i))
            first = True
            while len(order) > 1 and (first or sum(self.context(i) for i in order) > self.capacity):
                self.queue.append(order.pop())
                self.retractions, first = self.retractions + 1, False
            self.running, self.full = order, False
            generated = sum(self.done[i] for i in order)
            self.ratio = min(1.0, (generated + RETRACT * len(order)) / (len(order) * self.cap + 1))
        contexts = [self.context(i) for i in self.running]
        self.peak_kv = max(self.peak_kv, sum(contexts))
        self.clock_s += self.decode_s(len(contexts), sum(contexts) / len(contexts))
        self.decode_tokens += len(contexts)
        self.ratio = max(LOWEST, self.ratio - (INITIAL - LOWEST) / self.decay_steps)
        for i in self.running:
            self.done[i] += 1
        self.leave()

    def leave(self) -> None:
        over = [i for i in self.running if self.done[i] >= self.sequences[i][1]]
        for i in over:
            self.finished_s[i] = self.clock_s
        if over:
            self.full = False
        self.running = [i for i in self.running if i not in over]
