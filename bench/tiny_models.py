"""Random checkpoints of LLaMA-3 and Qwen3 architecture with a byte-level tokenizer, made here and cached.

Weights are random: the text is noise, but shapes, kernels and layouts are those of the real architectures.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from bench.cache import cache_dir
from bench.files import directory_whole

FORMAT = 1
"""Part of the cache key: raise it when the files written for one spec change."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Sizes of a checkpoint in float32; ``architecture`` is ``llama`` or ``qwen3``. Head size: hidden / heads."""

    architecture: str
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 704
    vocab: int = 512
    max_position: int = 8192
    seed: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        if self.architecture not in ("llama", "qwen3"):
            raise ValueError(f"tiny model: architecture {self.architecture!r} is neither llama nor qwen3")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(
                f"tiny model: hidden {self.hidden}, heads {self.heads}, kv_heads {self.kv_heads} not nested"
            )
        if self.vocab < 258:
            raise ValueError(f"tiny model: vocab {self.vocab} holds no 256 bytes and two marks; at least 258")

    @property
    def key(self) -> str:
        """Cache key: twelve hex digits of the spec and the format."""
        text = json.dumps([FORMAT, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


BIG = {"hidden": 1024, "layers": 8, "intermediate": 2816, "vocab": 4096}
PRESETS = {
    "tiny-llama": TinyModel("llama"),
    "tiny-qwen3": TinyModel("qwen3"),
    "llama-0.1b": TinyModel("llama", **BIG),
    "qwen3-0.1b": TinyModel("qwen3", **BIG),
    "llama-0.35b": TinyModel("llama", hidden=2048, layers=8, heads=16, kv_heads=8, intermediate=5632, vocab=4096),
}


def cache_directory() -> Path:
    """Where checkpoints are kept: ``$XDG_CACHE_HOME/pat-reproduction/models`` (default ``~/.cache``)."""
    return cache_dir("models")


def materialise(model: str | TinyModel) -> Path:
    """Directory of the checkpoint of a preset or a spec, written on first use (atomic: processes may race).

    ValueError names the presets where ``model`` is none of them.
    """
    if isinstance(model, str) and model not in PRESETS:
        raise ValueError(f"tiny model {model!r} is not a preset; choose one of {', '.join(PRESETS)}")
    spec = PRESETS[model] if isinstance(model, str) else model
    name = model if isinstance(model, str) else spec.architecture
    target = cache_directory() / f"{name}-{spec.key}"

    def fill(directory: Path) -> None:
        write_checkpoint(spec, directory)
        write_tokenizer(directory)

    return directory_whole(target, fill)


def write_checkpoint(spec: TinyModel, directory: Path) -> None:
    """``config.json`` and safetensors; the caller's random state is left as it was."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[spec.architecture](
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.hidden // spec.heads,
        max_position_embeddings=spec.max_position,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=spec.tied,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        # large enough that greedy text does not fall into a loop of one token
        initializer_range=0.2 if spec.hidden < 512 else 0.05,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


def write_tokenizer(directory: Path) -> None:
    """One token a byte: ``<s>`` 0, ``</s>`` 1, then the 256 bytes; ids from 258 on decode to nothing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {byte: i for i, byte in enumerate(alphabet, start=2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(directory)
