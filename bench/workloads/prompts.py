"""Problems as prompts: token ids for a model's tokenizer, in a reproducible choice."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from bench.errors import UserError
from bench.workloads.problems import Problem

INSTRUCTION = "Think step by step and give the final answer within \\boxed{}."
CHARACTERS_PER_TOKEN = 3.0
"""Of LaTeX-laden English under LLaMA-3's and Qwen's tokenizers, about; used only where no tokenizer is at hand."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """``token_ids`` of one problem; ``prompt_id`` is the problem's."""

    prompt_id: str
    token_ids: tuple[int, ...]


def chosen(problems: list[Problem], count: int, seed: int) -> list[Problem]:
    """``count`` different problems, shuffled by ``seed``; UserError where there are fewer."""
    if count > len(problems):
        raise UserError(f"dataset: holds {len(problems)} problems, the batch needs {count}; give a larger one")
    return Random(seed).sample(problems, count)


def prompt_text(problem: Problem) -> str:
    return f"{problem.problem} {INSTRUCTION}"


def encode(problem: Problem, tokenizer, max_prompt_tokens: int) -> Prompt:
    """With the tokenizer's chat template where it has one. A longer prompt keeps its last ``max_prompt_tokens``.

    A chat template writes the special tokens itself: if the tokenizer added its own, LLaMA-3's prompts would begin
    twice.
    """
    text = prompt_text(problem)
    templated = bool(getattr(tokenizer, "chat_template", None))
    if templated:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=not templated)["input_ids"]
    return Prompt(problem.problem_id, tuple(ids[-max_prompt_tokens:]))


def estimated_tokens(problem: Problem, max_prompt_tokens: int) -> int:
    """Prompt tokens without a tokenizer: characters / 3, at most ``max_prompt_tokens``."""
    return min(max_prompt_tokens, max(1, round(len(prompt_text(problem)) / CHARACTERS_PER_TOKEN)))
