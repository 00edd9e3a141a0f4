"""``bench profile``: a step profile of real SGLang on this machine, as one Parquet file."""

from __future__ import annotations

from pathlib import Path

from bench.backends.adaptive_engine import AdaptiveRollouts
from bench.backends.engine_arguments import EngineError
from bench.errors import UserError
from bench.profiles import stored
from bench.profiles.live import measure
from bench.tiny_models import PRESETS, materialise
from pat.layout import Layout
from pat.model import ModelShape
from pat.profile import StepProfile

PROMPT_TOKENS = 96


def run(model: str, layouts: str, device: str, sequences: int, context_tokens: int, out: Path | None) -> Path:
    """Measure and write; the file's path. UserError for bad input, before an engine starts."""
    wanted = parse_layouts(layouts)
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device must be cpu or cuda, not {device!r}")
    model_path = materialise(model) if model in PRESETS else Path(model)
    path = out or Path(f"{Path(model).name}.profile.parquet")
    if path.is_dir():
        raise UserError(f"--out {path}: is a folder; give a file's name")
    of = stored.identity(model_path, device)
    profile = stored.stamped(measured(model_path, wanted, device, sequences, context_tokens), of)
    profile.save(path)
    return path


def parse_layouts(text: str) -> tuple[Layout, ...]:
    """``"TP1xDP2,TP2xDP1"``, lowest TP first; UserError unless all are of one world."""
    try:
        found = tuple(sorted({Layout.parse(part.strip()) for part in text.split(",")}))
    except ValueError as error:
        raise UserError(f"--layouts: {error}") from None
    if len({layout.world for layout in found}) > 1:
        raise UserError(f"--layouts {text}: TP x DP must be the same in all")
    return found


def measured(
    model_path: Path, layouts: tuple[Layout, ...], device: str, sequences: int, context_tokens: int
) -> StepProfile:
    """The profile from an engine that is started for it."""
    prompt = min(PROMPT_TOKENS, context_tokens // 2)
    sizes: dict = {"sequences": sequences}
    if device == "cpu":
        sizes["kv_tokens_per_rank"] = (context_tokens + prompt) * -(-sequences // layouts[0].world)
    try:
        with AdaptiveRollouts.over(str(model_path), layouts, device, **sizes) as engine:
            return measure(engine, ModelShape.load(model_path).name, sequences, context_tokens, prompt)
    except EngineError as error:
        raise UserError(f"bench profile: {error}") from None
