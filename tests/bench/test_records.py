"""Records: what is appended is read, spoilt lines are left out, and the same records give the same bytes."""

import logging

import pandas as pd
import pytest
from pydantic import ValidationError

from bench.records import RecordStore, RolloutSummary, fingerprint_of


def summary(arm="static-TP2xDP4", seed=0, rollout_s=2.0, fingerprint="f", **changes) -> RolloutSummary:
    fields = {
        "experiment": "cell",
        "arm": arm,
        "tier": "predicted",
        "batch": 8,
        "host_term": "paper-era",
        "seed": seed,
        "layouts": [(0.0, "TP2xDP4")],
        "rollout_s": rollout_s,
        "prompt_tokens": 10,
        "response_tokens": 100,
        "tokens_per_s": 50.0,
        "decode_p50_ms": 1.0,
        "decode_p90_ms": 2.0,
        "decode_p99_ms": 3.0,
        "trace_sha256": "0" * 64,
        "fingerprint": fingerprint,
    }
    return RolloutSummary(**(fields | changes))


def test_what_is_appended_is_read(tmp_path):
    store = RecordStore(tmp_path, "cell")
    assert store.read() == {}
    first, second = summary(seed=1), summary(seed=0)
    store.append([first])
    store.append([second])
    assert store.read() == {first.key: first, second.key: second}


def test_the_last_record_of_a_key_counts(tmp_path):
    store = RecordStore(tmp_path, "cell")
    store.append([summary(rollout_s=2.0), summary(rollout_s=3.0)])
    assert [r.rollout_s for r in store.read().values()] == [3.0]


def test_a_cut_line_is_left_out_with_a_warning_and_spoils_no_other(tmp_path, caplog):
    store = RecordStore(tmp_path, "cell")
    store.append([summary(seed=0), summary(seed=1)])
    store.path.write_text(store.path.read_text()[:-40])
    with caplog.at_level(logging.WARNING):
        assert [r.seed for r in store.read().values()] == [0]
    assert "line 2" in caplog.text
    store.append([summary(seed=2)])
    assert [r.seed for r in store.read().values()] == [0, 2]


def test_spoilt_files_count_as_missing_with_a_warning(tmp_path, caplog):
    store = RecordStore(tmp_path, "cell")
    store.append([summary()])
    store.path.write_bytes(b"\xff\xfe\n" + store.path.read_bytes())
    store.write_made({})
    store.made_path.write_text("{")
    store.write_steps(summary(), pd.DataFrame({"batch": [1]}))
    store.steps_path(summary()).write_bytes(b"junk")
    with caplog.at_level(logging.WARNING):
        assert list(store.read().values()) == [summary()]
        assert store.read_made() == {}
        assert store.read_steps(summary()) is None
    assert len(caplog.records) == 3


def test_tidy_gives_the_same_bytes_whatever_the_order(tmp_path):
    one, other = RecordStore(tmp_path / "a", "cell"), RecordStore(tmp_path / "b", "cell")
    records = [summary(arm, seed) for arm in ("oracle", "pat-paper") for seed in (0, 1)]
    one.append(records)
    other.append(records[::-1] + records)
    one.tidy()
    other.tidy()
    assert one.path.read_bytes() == other.path.read_bytes()
    assert len(one.path.read_text().splitlines()) == 4


def test_current_records_are_those_the_last_run_names(tmp_path):
    store = RecordStore(tmp_path, "cell")
    store.append([summary(seed=0, fingerprint="old"), summary(seed=1, fingerprint="new")])
    store.write_made({"fingerprints": ["new"]})
    assert [r.seed for r in store.current()] == [1]


def test_steps(tmp_path):
    store, steps = RecordStore(tmp_path, "cell"), pd.DataFrame({"time_s": [0.0, 1.0], "batch": [3, 2]})
    assert store.read_steps(summary()) is None
    store.write_steps(summary(), steps)
    pd.testing.assert_frame_equal(store.read_steps(summary()), steps)


def test_fingerprints_tell_everything_apart():
    assert fingerprint_of("a", 1) == fingerprint_of("a", 1)
    assert len({fingerprint_of("a", 1), fingerprint_of("a", 2), fingerprint_of("b", 1), fingerprint_of("a1")}) == 4


def test_a_rollout_takes_time():
    with pytest.raises(ValidationError, match="rollout_s"):
        summary(rollout_s=0)
