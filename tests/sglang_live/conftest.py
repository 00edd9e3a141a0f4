"""Engines of the live tests: one start for each set-up, shared by all tests of a module."""

import asyncio
from contextlib import contextmanager

import pytest
import torch

from pat.policy import Keep, Switch

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "|".join("01" * 4),
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCHDYNAMO_DISABLE": "1",
    "PAT_WARM": "1",
}
ARGUMENTS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "max_total_tokens": 4096,
    "max_running_requests": 16,
    "skip_server_warmup": True,
    "random_seed": 7,
    "log_level": "error",
    "wait_s": 20,
}
LIMIT_S = 60


class SwitchBelow:
    """A policy: from ``low`` to ``high`` as soon as fewer than ``alive`` sequences run. Remembers what it has seen."""

    interval_steps = 4

    def __init__(self, alive, low, high, first=None):
        self.alive, self.low, self.high, self.first, self.seen = alive, low, high, first or low, []

    def first_layout(self, prompt_tokens):
        return self.first

    def decide(self, state):
        self.seen.append(state)
        few = len(state.generated_tokens) < self.alive and state.layout == self.low
        return Switch(self.high, 1.0, 0.1) if few else Keep()

    def switched(self, predicted_s, observed_s):
        self.took = predicted_s, observed_s


@contextmanager
def adaptive_engine(model_path, layouts, environment=None, **arguments):
    """A started AdaptiveEngine; its processes are gone when the block is left."""
    from pat.sglang.engine import AdaptiveEngine

    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | (environment or {})).items():
            patch.setenv(name, value)
        asyncio.set_event_loop(asyncio.new_event_loop())
        engine = AdaptiveEngine(model_path=str(model_path), layouts=layouts, **ARGUMENTS | arguments)
        try:
            yield engine
        finally:
            engine.shutdown()


def run(engine, work):
    """Run a coroutine in the engine's loop, for at most a minute."""
    return engine.loop.run_until_complete(asyncio.wait_for(work, LIMIT_S))


async def generate(engine, prompts, lengths, **arguments):
    """All prompts at once, greedy unless told otherwise; the answers in order."""
    sampling = arguments.pop("sampling", {})
    return await asyncio.gather(
        *(
            engine.async_generate(
                input_ids=prompt,
                sampling_params={"temperature": 0, "max_new_tokens": length, "ignore_eos": True} | sampling,
                **arguments,
            )
            for prompt, length in zip(prompts, lengths, strict=True)
        )
    )


async def generate_with_switches(engine, prompts, lengths, switches, **arguments):
    """The answers, and the records of switches [(seconds to wait, layout, kv)] made meanwhile."""
    task = asyncio.create_task(generate(engine, prompts, lengths, **arguments))
    records = []
    for delay_s, layout, kv in switches:
        await asyncio.sleep(delay_s)
        if layout != engine.layout:
            records.append(await engine.async_switch(layout, kv=kv))
    return await task, records


def tokens(answers):
    return [(list(answer["output_ids"]), answer["text"]) for answer in answers]


def hf_model(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def hf_greedy(model, prompts, lengths) -> list[list[int]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices are tiny, cores few
    found = []
    for prompt, new in zip(prompts, lengths, strict=True):
        ids, cache, tail = [], None, torch.tensor([prompt])
        for _ in range(new):
            with torch.no_grad():
                answer = model(tail, past_key_values=cache, use_cache=True)
            cache, tail = answer.past_key_values, answer.logits[:, -1].argmax(-1, keepdim=True)
            ids.append(int(tail))
        found.append(ids)
    torch.set_num_threads(threads)
    return found
