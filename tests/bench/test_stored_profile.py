"""Profiles on disk: kept whole, found again in the cache, refused where they are of something else."""

import numpy as np
import pytest

from bench.errors import UserError
from bench.profile import parse_layouts
from bench.profiles import stored
from pat.layout import Layout
from pat.profile import StepProfile, TpGrid

HERE = dict.fromkeys(stored.OF, "here")
BOTH = (Layout(1, 2), Layout(2, 1))


def profile_of(of: dict, tps=(1, 2)) -> StepProfile:
    batches, contexts = np.array([1, 4]), np.array([1, 100])
    times_s = np.array([[0.01, 0.02], [0.03, 0.04]])
    grids = {tp: TpGrid(tp, batches, contexts, times_s / tp, np.array([1, 50]), np.array([0.01, 0.05])) for tp in tps}
    return stored.stamped(StepProfile("model", "cpu", grids), of)


def test_a_profile_of_here_is_taken_whole(tmp_path):
    path = tmp_path / "a.parquet"
    profile_of(HERE).save(path)
    found = stored.load_given(path, HERE, BOTH)
    assert found.tps == (1, 2)
    assert found.grids[2].decode_s == pytest.approx(profile_of(HERE).grids[2].decode_s)
    assert found.provenance["of"] == HERE


@pytest.mark.parametrize("name", stored.OF)
def test_a_foreign_profile_is_refused_unless_forced(name, tmp_path):
    path = tmp_path / "a.parquet"
    profile_of(HERE | {name: "elsewhere"}).save(path)
    with pytest.raises(UserError, match=f"is of {name} 'elsewhere', here it is 'here'.*--force-profile"):
        stored.load_given(path, HERE, BOTH)
    assert stored.load_given(path, HERE, BOTH, force=True).tps == (1, 2)


def test_a_missing_layout_cannot_be_forced(tmp_path):
    path = tmp_path / "a.parquet"
    profile_of(HERE, tps=(1,)).save(path)
    with pytest.raises(UserError, match="has no TP2, only"):
        stored.load_given(path, HERE, BOTH, force=True)


def test_the_cache_finds_its_own_and_nothing_spoilt(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = stored.cached_path(HERE, BOTH, 32, 288)
    assert stored.load_cached(path, HERE, BOTH) is None
    stored.keep(profile_of(HERE), path)
    assert stored.load_cached(path, HERE, BOTH).tps == (1, 2)
    others = [stored.cached_path(HERE, BOTH, 16, 288), stored.cached_path(HERE | {"cpu": "x"}, BOTH, 32, 288)]
    assert path not in others
    path.write_bytes(b"spoilt")
    assert stored.load_cached(path, HERE, BOTH) is None


def test_layouts_are_of_one_world():
    assert parse_layouts("TP2xDP1, TP1xDP2") == BOTH
    with pytest.raises(UserError, match="must be the same in all"):
        parse_layouts("TP1xDP2,TP2xDP2")
    with pytest.raises(UserError, match="not of the form"):
        parse_layouts("two")


def test_a_model_is_known_by_its_shape(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    first = stored.model_hash(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    assert stored.model_hash(tmp_path) != first
    with pytest.raises(UserError, match=r"no config\.json"):
        stored.model_hash(tmp_path / "nowhere")
