"""Tiny checkpoints: cached by their spec, whole or not there, with a tokenizer of bytes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from bench.tiny_models import PRESETS, TinyModel, materialise
from pat.model import ModelShape

SMALL = TinyModel("qwen3", hidden=64, layers=1, heads=4, kv_heads=2, intermediate=96)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def weights(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


def test_made_once_and_the_same_each_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = materialise(SMALL)
    assert path.is_relative_to(cache)
    made = (path / "config.json").stat().st_mtime_ns
    assert materialise(SMALL) == path
    assert (path / "config.json").stat().st_mtime_ns == made
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "other"))
    assert weights(materialise(SMALL)) == weights(path)
    assert weights(materialise(replace(SMALL, seed=1))) != weights(path)


def test_racing_makers_leave_one_whole_checkpoint() -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(materialise, [SMALL] * 4))
    assert len(paths) == 1
    (path,) = paths
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert AutoConfig.from_pretrained(path).num_hidden_layers == 1


def test_shape_is_the_spec() -> None:
    shape = ModelShape.load(materialise(SMALL))
    assert (shape.architecture, shape.hidden, shape.heads, shape.kv_heads) == ("Qwen3ForCausalLM", 64, 4, 2)
    assert (shape.head_dim, shape.vocab, shape.dtype_bytes, shape.tied_embeddings) == (16, 512, 4, False)
    assert ModelShape.load(materialise(replace(SMALL, tied=True))).tied_embeddings


def test_every_byte_is_a_token() -> None:
    tokenizer = AutoTokenizer.from_pretrained(materialise(SMALL))
    text = "x² + y² = 25; \\frac{1}{2}\n\tété 数"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_presets_divide_by_eight() -> None:
    for spec in PRESETS.values():
        assert spec.heads % 8 == spec.intermediate % 8 == spec.vocab % 8 == 0


@pytest.mark.parametrize(("change", "why"), [({"heads": 3}, "not nested"), ({"vocab": 100}, "at least 258")])
def test_impossible_specs_are_refused(change: dict, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        replace(SMALL, **change)
