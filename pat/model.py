"""The shape of a dense decoder model, read from its Hugging Face ``config.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

KNOWN_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that memory and communication follow from. All counts are of the whole model, not of a rank."""

    name: str
    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool = False
    dtype_bytes: int = 2

    @property
    def attention_params(self) -> int:
        """Q, K, V and output projection of one layer; with Qwen2's Q, K, V biases, with Qwen3's Q and K norms."""
        projections = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        extra = {
            "Qwen2ForCausalLM": self.head_dim * (self.heads + 2 * self.kv_heads),
            "Qwen3ForCausalLM": 2 * self.head_dim,
        }
        return projections + extra.get(self.architecture, 0)

    @property
    def mlp_params(self) -> int:
        """Gate, up and down projection of one layer."""
        return 3 * self.hidden * self.intermediate

    @property
    def params(self) -> int:
        """Parameters: embedding, layers with their two norms, final norm, LM head unless tied."""
        embedding = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return embedding + self.layers * (self.attention_params + self.mlp_params + 2 * self.hidden) + self.hidden

    @property
    def weight_bytes(self) -> int:
        return self.params * self.dtype_bytes

    def kv_heads_per_rank(self, tp: int) -> int:
        """KV heads a rank holds; where TP exceeds the KV heads they are replicated, one a rank."""
        return max(1, self.kv_heads // tp)

    def kv_bytes_per_token(self, tp: int = 1) -> int:
        """KV cache bytes of one token on *one rank* at the given TP (tp=1: of the whole model)."""
        return 2 * self.layers * self.kv_heads_per_rank(tp) * self.head_dim * self.dtype_bytes

    def check_tp(self, tp: int) -> None:
        """ValueError unless ``tp`` divides the heads and divides (or is a multiple of) the KV heads."""
        if self.heads % tp:
            raise ValueError(f"{self.name}: TP{tp} does not divide {self.heads} attention heads")
        if self.kv_heads % tp and tp % self.kv_heads:
            raise ValueError(f"{self.name}: TP{tp} neither divides nor is a multiple of {self.kv_heads} KV heads")

    @classmethod
    def from_config(cls, config: dict, name: str = "model") -> ModelShape:
        """From the fields of a ``config.json``; ValueError names a missing field or an unknown architecture."""
        architecture = (config.get("architectures") or ["(none)"])[0]
        if architecture not in KNOWN_ARCHITECTURES:
            known = ", ".join(KNOWN_ARCHITECTURES)
            raise ValueError(f"{name}: architecture {architecture} is not a known dense decoder ({known})")
        try:
            heads = config["num_attention_heads"]
            return cls(
                name=name,
                architecture=architecture,
                layers=config["num_hidden_layers"],
                hidden=config["hidden_size"],
                intermediate=config["intermediate_size"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                vocab=config["vocab_size"],
                tied_embeddings=bool(config.get("tie_word_embeddings", False)),
                dtype_bytes=4 if "float32" in str(config.get("torch_dtype") or config.get("dtype")) else 2,
            )
        except KeyError as error:
            raise ValueError(f"{name}: config.json lacks the field {error.args[0]!r}") from None

    @classmethod
    def load(cls, path: Path) -> ModelShape:
        """From a model directory, or a config file whose stem becomes the name."""
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ValueError(f"model: no config.json at {path}; give a Hugging Face model directory")
        return cls.from_config(json.loads(file.read_text()), path.name if path.is_dir() else path.stem)
