"""Profiles on disk: kept whole, found again in the cache, refused where they are of something else."""

import pytest

from bench.errors import UserError
from bench.profile import of_experiments, parse
from bench.profiles import stored
from bench.profiles.samples import Samples
from tests.bench.test_live_profile import BOTH, samples_of

HERE = dict.fromkeys(stored.OF, "here")


def test_a_profile_is_kept_whole(tmp_path):
    path, made = tmp_path / "a.parquet", samples_of(of=HERE)
    made.save(path)
    found = stored.load_given(path, HERE, BOTH)
    assert found.steps.equals(made.steps)
    names = ("model", "shape", "device", "sequences", "max_context_tokens", "switches", "costs", "provenance")
    assert all(getattr(found, name) == getattr(made, name) for name in names)


@pytest.mark.parametrize("name", stored.OF)
def test_a_foreign_profile_is_refused_unless_forced(name, tmp_path):
    path = tmp_path / "a.parquet"
    samples_of(of=HERE | {name: "elsewhere"}).save(path)
    with pytest.raises(UserError, match=f"is of {name} 'elsewhere', here it is 'here'.*--force-profile"):
        stored.load_given(path, HERE, BOTH)
    assert stored.load_given(path, HERE, BOTH, force=True).layouts == BOTH


def test_a_missing_layout_cannot_be_forced(tmp_path):
    path = tmp_path / "a.parquet"
    samples_of(lambda rows: rows[rows.layout == "TP1xDP2"], of=HERE).save(path)
    with pytest.raises(UserError, match="has no TP2, only"):
        stored.load_given(path, HERE, BOTH, force=True)


def test_what_is_no_profile_is_one_error(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"spoilt")
    with pytest.raises(UserError, match=r"profile a\.parquet: is not a step profile"):
        stored.load_given(tmp_path / "a.parquet", HERE, BOTH, force=True)
    with pytest.raises(ValueError, match="is not a step profile"):
        Samples.load(tmp_path / "nowhere.parquet")


def test_the_cache_finds_what_covers_the_need_and_nothing_spoilt(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert stored.load_cached(HERE, BOTH) is None
    stored.keep(samples_of(of=HERE), BOTH)  # of 16 sequences and 200 tokens
    assert stored.load_cached(HERE, BOTH, 16, 200).layouts == BOTH
    assert stored.load_cached(HERE, BOTH, 17, 200) is None
    assert stored.load_cached(HERE, BOTH, 16, 201) is None
    assert stored.load_cached(HERE | {"cpu": "x"}, BOTH) is None
    assert stored.load_cached(HERE, BOTH[:1]) is None
    stored.cached_path(HERE, BOTH).write_bytes(b"spoilt")
    assert stored.load_cached(HERE, BOTH) is None


def test_layouts_are_of_one_world():
    assert parse("TP2xDP1, TP1xDP2") == BOTH
    with pytest.raises(UserError, match="must be the same in all"):
        parse("TP1xDP2,TP2xDP2")
    with pytest.raises(UserError, match="not of the form"):
        parse("two")


def test_by_default_every_cpu_experiment_is_covered():
    needs = {one.model: (one.layouts, one.sequences, one.context_tokens) for one in of_experiments()}
    assert needs == {"llama-0.1b": (BOTH, 16, 176), "qwen3-0.1b": (BOTH, 16, 144)}


def test_a_model_is_known_by_its_shape(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    first = stored.model_hash(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert stored.model_hash(tmp_path) != first
    with pytest.raises(UserError, match=r"no config\.json"):
        stored.model_hash(tmp_path / "nowhere")
