"""Step profile: padding, the eager extra, the host term, and the file format."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat.host import NO_HOST, HostTerm
from pat.profile import StepProfile, TpGrid, interpolate


def grid(tp: int = 1, **changes) -> TpGrid:
    """1 ms a sequence at no context, 1 us more a token of context and sequence; prefill 1 us a token."""
    batches, contexts = np.array([1, 2, 4, 8, 64]), np.array([1, 1000, 8000])
    decode_s = batches[:, None] * (1e-3 + 1e-6 * contexts[None, :])
    return TpGrid(tp, batches, contexts, decode_s, np.array([10, 1000]), np.array([1e-5, 1e-3]), **changes)


def profile(host: HostTerm = NO_HOST, **changes) -> StepProfile:
    grids = {tp: grid(tp, **changes) for tp in (1, 2)}
    return StepProfile("model", "gpu", grids, host, {"source": "made up"})


def test_interpolates_between_rows_and_contexts():
    assert profile().decode_s(1, 3, 500) == pytest.approx(3 * (1e-3 + 500e-6))
    assert profile().decode_s(1, 100, 10_000) == pytest.approx(100 * (1e-3 + 10_000e-6))  # both beyond the grid


def test_first_row_holds_below_the_grid():
    assert interpolate(np.array([4, 8]), np.array([[1.0], [2.0]]), np.array([1, 4, 6, 10]))[:, 0].tolist() == [
        1.0,
        1.0,
        1.5,
        2.5,
    ]


def test_a_batch_is_padded_to_its_graph():
    padded = profile(graph_batches=(1, 2, 4, 8))
    assert padded.decode_s(1, 5, 1000) == padded.decode_s(1, 8, 1000)
    assert padded.decode_s(1, 9, 1000) > padded.decode_s(1, 8, 1000)
    assert padded.grids[1].padded(np.array([1, 3, 5, 8, 9])).tolist() == [1, 4, 8, 8, 9]


def test_eager_extra_is_added_only_above_the_largest_graph():
    plain, extra = profile(graph_batches=(1, 2, 4, 8)), profile(graph_batches=(1, 2, 4, 8), eager_extra_s=0.5)
    assert extra.decode_s(1, 8, 1000) == plain.decode_s(1, 8, 1000)
    assert extra.decode_s(1, 9, 1000) == pytest.approx(plain.decode_s(1, 9, 1000) + 0.5)
    assert profile(eager_extra_s=0.5).decode_s(1, 9, 1000) == plain.decode_s(1, 9, 1000)  # no graphs, no gap


@pytest.mark.parametrize("tp", [1, 2])
def test_host_term_is_added_or_overlapped(tp):
    device_s = profile().decode_s(tp, 4, 1000)
    host = HostTerm("h", base_s=3e-3, per_sequence_s=1e-3, overlapped=False, broadcast_s=0.5e-3)
    host_s = 7e-3 + (0.5e-3 if tp > 1 else 0.0)
    assert profile(host).decode_s(tp, 4, 1000) == pytest.approx(device_s + host_s)
    overlapped = HostTerm("h", 3e-3, 1e-3, overlapped=True, broadcast_s=0.5e-3)
    assert profile(overlapped).decode_s(tp, 4, 1000) == pytest.approx(max(device_s, host_s))
    slow = HostTerm("h", 1.0, 0.0, overlapped=True)
    assert profile(slow).decode_s(tp, 4, 1000) == pytest.approx(1.0)


def test_prefill_is_nothing_for_no_tokens_and_linear_else():
    assert profile().prefill_s(1, np.array([0, 10, 500, 2000])) == pytest.approx([0, 1e-5, 5e-4, 2e-3])
    assert float(profile().prefill_s(1, 500)) == pytest.approx(5e-4)


def test_extrapolation_is_told_by_batch_context_and_their_product():
    measured = profile(measured_batch=64, measured_context_tokens=8000, measured_tokens=16_000)
    assert not measured.extrapolated(1, 2, 8000)
    assert measured.extrapolated(1, 65, 10)
    assert measured.extrapolated(1, 1, 8001)
    assert measured.extrapolated(1, 3, 8000)


def test_saves_and_loads_the_same_profile(tmp_path):
    saved = profile(
        HostTerm("h", 1e-3, 1e-4, overlapped=True, source="here"),
        graph_batches=(1, 2, 4),
        eager_extra_s=1e-3,
        measured_batch=64,
        measured_context_tokens=8000,
        measured_tokens=16_000,
    )
    saved.save(tmp_path / "deep" / "p.parquet")
    loaded = StepProfile.load(tmp_path / "deep" / "p.parquet")
    assert (loaded.model, loaded.device, loaded.host, loaded.provenance) == (
        "model",
        "gpu",
        saved.host,
        saved.provenance,
    )
    assert loaded.tps == (1, 2)
    for tp, mine in saved.grids.items():
        for name in TpGrid.__dataclass_fields__:
            assert np.array_equal(getattr(loaded.grids[tp], name), getattr(mine, name)), name
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["p.parquet"]


@pytest.mark.parametrize("content", [b"", b"PAR1 but no more", None])
def test_a_file_that_is_no_profile_is_named(tmp_path, content):
    path = tmp_path / "broken.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.parquet is not a step profile"):
        StepProfile.load(path)


def test_no_damaged_byte_of_the_data_changes_a_time(tmp_path):
    path, saved = tmp_path / "p.parquet", profile()
    saved.save(path)
    whole = path.read_bytes()
    footer, found = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"), 0
    for at in range(4, footer, 3):  # Parquet has no checksum of its footer
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            loaded = StepProfile.load(path)
        except ValueError as error:
            assert "is not a step profile" in str(error)  # noqa: PT017
            found += 1
        else:  # statistics, which nobody reads
            assert all(np.array_equal(loaded.grids[tp].decode_s, saved.grids[tp].decode_s) for tp in saved.tps)
            assert all(np.array_equal(loaded.grids[tp].prefill_s, saved.grids[tp].prefill_s) for tp in saved.tps)
    assert found > 20


def test_a_missing_tp_is_named():
    with pytest.raises(ValueError, match=r"no TP8, only \[1, 2\]"):
        profile().table(8, 4)


@given(st.lists(st.integers(1, 1 << 16), min_size=1, max_size=6, unique=True), st.integers(0, 1 << 18))
def test_one_prefill_is_that_of_the_array(tokens, asked):
    knots = np.array(sorted(tokens))
    grid = TpGrid(1, np.array([1]), np.array([1]), np.ones((1, 1)), knots, 1e-3 + 1e-6 * knots**1.1)
    assert grid.one_prefill_time_s(asked) == float(grid.prefill_time_s(asked))
