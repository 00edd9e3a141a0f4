"""Warm-started tiny models: random checkpoints that have learned to add for about a minute, so that rewards vary.

A random model never answers right: all rewards are equal, advantages vanish and an iteration updates nothing.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from bench.cache import cache_dir
from bench.files import directory_whole
from bench.provenance import provenance
from bench.tiny_models import TinyModel, write_checkpoint, write_tokenizer
from bench.workloads.builtin import addition_problems

FORMAT = 2
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
TURN_END = "<|im_end|>"
"""VeRL refuses a Qwen tokenizer without it."""
SMALL = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 352, "vocab": 272, "max_position": 1024}
WARM_MODELS = {"warm-llama": TinyModel("llama", **SMALL), "warm-qwen3": TinyModel("qwen3", **SMALL)}


@dataclass(frozen=True, slots=True)
class Training:
    """Supervised training on worked sums; ``problems`` are drawn with ``seed``, those of the runs with another one."""

    steps: int = 240
    batch: int = 48
    learning_rate: float = 3e-3
    problems: int = 4000
    seed: int = 1_000_003


def warm_model(name: str, training: Training | None = None, progress=lambda step, of: None) -> Path:
    """Directory of a warm-started checkpoint, trained on first use and cached with ``warm.json`` (training, loss by
    step, seconds, provenance). ValueError names the known ones."""
    if name not in WARM_MODELS:
        raise ValueError(f"warm model {name!r} is not known; known ones: {', '.join(WARM_MODELS)}")
    training = training or Training()
    text = json.dumps([FORMAT, WARM_MODELS[name].key, asdict(training)], sort_keys=True)
    target = cache_dir("warm") / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def fill(directory: Path) -> None:
        write_checkpoint(WARM_MODELS[name], directory)
        write_tokenizer(directory)
        train(directory, training, progress)

    return directory_whole(target, fill)


def train_missing(names: Sequence[str]) -> None:
    """Fill the cache with the :func:`warm_model` of each name, side by side: each takes one core."""
    with ProcessPoolExecutor(len(names), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(warm_model, names))


def train(directory: Path, training: Training, progress) -> None:
    """Train the checkpoint of a directory in place, float32, and add a chat template and ``warm.json``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    begin_s = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN_END]})
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    examples = encoded(tokenizer, training)
    draw, losses, threads = Random(training.seed), [], torch.get_num_threads()
    torch.set_num_threads(1)  # matrices are small: more threads wait for each other, the more so on a busy machine
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(training.seed)
        begin_afresh(model)
        optimiser = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, training.learning_rate, training.steps)
        for step in range(training.steps):
            ids, labels = padded(draw.sample(examples, training.batch), tokenizer.pad_token_id)
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
            losses.append(round(loss.item(), 5))
            progress(step + 1, training.steps)
    torch.set_num_threads(threads)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    facts = {
        "training": asdict(training),
        "seconds": time.monotonic() - begin_s,
        "losses": losses[:: training.steps // 50],
    }
    (directory / "warm.json").write_text(json.dumps(facts | {"provenance": provenance()}, indent=1))


def begin_afresh(model) -> None:
    """Weights of the usual small size: those of the random checkpoints are large, for lively text."""
    import torch

    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)


def encoded(tokenizer, training: Training) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids with the end-of-sequence token) of every problem."""
    found = []
    for record in addition_problems(training.problems, training.seed):
        messages = [{"role": "user", "content": record["problem"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        response = tokenizer(record["solution"], add_special_tokens=False)["input_ids"]
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        found.append((prompt_ids, [*response, tokenizer.eos_token_id]))
    return found


def padded(examples: list[tuple[list[int], list[int]]], pad: int):
    """(ids, labels) [B, L]; labels of prompt and padding are left out of the loss."""
    import torch

    longest = max(len(prompt) + len(response) for prompt, response in examples)
    ids = torch.full((len(examples), longest), pad)
    labels = torch.full((len(examples), longest), -100)
    for row, (prompt, response) in enumerate(examples):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        labels[row, len(prompt) : end] = torch.tensor(response)
    return ids, labels
