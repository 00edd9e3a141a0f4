"""Live profiles but for the engine: the plan, and what follows from the samples."""

import numpy as np
import pandas as pd
import pytest

from bench.profiles.plan import STEPS_PER_BATCH, falling_batches, visits
from bench.profiles.samples import COLUMNS, Samples
from pat.layout import Layout
from pat.model import ModelShape
from pat.reshard.kv import KvCosts

BOTH = (Layout(1, 2), Layout(2, 1))
SHAPE = ModelShape("tiny", "LlamaForCausalLM", 2, 64, 128, 4, 2, 16, 512)
SWITCH = {"pause_s": 0.008, "groups_s": 0.001, "weights_s": 0.0, "kv_s": 0.5, "graphs_s": 0.0, "resume_s": 0.002}


def step_s(tp: int, batch, context):
    return (0.020 + 0.002 * batch + 1e-5 * batch * context) / tp


def samples_of(change=lambda rows: rows, variants=("greedy",), repeats=3, of=None) -> Samples:
    """Steps by a law of the model's family; prefill 1 ms + 10 us a token; forward 1 ms + 0.1 ms a sequence less."""
    rows = []
    for layout in BOTH:
        for variant in variants:
            for repeat in range(1, repeats + 1):
                for prompt in (10, 50, 90):
                    at = str(layout), variant, prompt, repeat, 0
                    for batch in (1, 2, 3, 4, 8):
                        for step in range(4):
                            context = prompt + 5 + step
                            time_s = step_s(layout.tp, batch, context)
                            rows.append((*at, "decode", batch, context, batch, time_s, time_s - 1e-3 - 1e-4 * batch))
                    for tokens in (prompt, 7 * prompt):
                        time_s = 1e-3 + 1e-5 * tokens
                        rows.append((*at, "extend", 1, tokens, tokens, time_s, time_s))
    steps = change(pd.DataFrame(rows, columns=list(COLUMNS)))
    costs = {layout: KvCosts(exchange_s=0.004, sequence_s=3e-4, bytes_per_s=2e9) for layout in BOTH}
    switches = (SWITCH, SWITCH | {"pause_s": 0.010}, SWITCH | {"pause_s": 9.0})
    return Samples("tiny", SHAPE, "cpu", 16, 200, steps, switches, costs, {"of": of or {}, "repeats": repeats})


def test_the_law_is_found_again():
    profile = samples_of().profile()
    for tp in (1, 2):
        grid = profile.grids[tp]
        assert (grid.measured_batch, grid.measured_context_tokens) == (8, 96)
        assert grid.half_interval == pytest.approx(0, abs=1e-6)
        for batch, context in ((1, 20), (3, 60), (6, 100), (8, 199)):
            assert profile.decode_s(tp, batch, context) == pytest.approx(step_s(tp, batch, context), rel=1e-6)
    assert profile.prefill_s(1, np.array([0, 10, 100, 700])) == pytest.approx([0, 1.1e-3, 2e-3, 8e-3])
    assert profile.decode_interval_s(2, 3, 60) == pytest.approx([step_s(2, 3, 60)] * 2, rel=1e-5)


def test_single_outliers_and_one_spoilt_repeat_do_not_move_it():
    def spoil(rows):
        rows.loc[rows.index[::13], "latency_s"] *= 9
        rows.loc[rows.repeat == 2, "latency_s"] *= 1.8
        return rows

    spoilt = samples_of(spoil)
    assert spoilt.profile().grids[1].decode_s == pytest.approx(samples_of().profile().grids[1].decode_s, rel=1e-3)
    assert spoilt.cells().outliers.sum() > 0


def test_hold_out_and_repeats():
    hold_out = samples_of().hold_out()
    assert hold_out.fit_error.abs().max() < 1e-6
    assert hold_out.error.abs().max() < 1e-6
    assert hold_out[hold_out.batch.isin([1, 8])].batch_error.isna().all()
    assert hold_out[hold_out.batch.isin([2, 3, 4])].batch_error.abs().max() < 1e-6

    def drift(rows):
        rows.loc[rows.repeat == 3, "latency_s"] *= 1.1
        return rows

    errors = samples_of(drift).repeat_errors().error
    assert sorted(set(errors.round(6))) == pytest.approx([1 / 1.05 - 1, 0.1], abs=1e-6)


def test_host_terms_are_lines_over_the_sequences_by_layout_and_variant():
    terms = samples_of(variants=("greedy", "streamed")).host_terms()
    assert set(terms) == {(str(layout), variant) for layout in BOTH for variant in ("greedy", "streamed")}
    for term in terms.values():
        assert (term.base_s, term.per_sequence_s) == pytest.approx((1e-3, 1e-4))


def test_switch_parts_are_medians_and_links_the_engines_rates():
    samples = samples_of()
    assert samples.parts().fixed_s == pytest.approx(0.010 + 0.001 + 0.002 + 0.004)  # the last of moving KV cache
    assert (samples.links().local_copy_bytes_per_s, samples.links().latency_s) == (2e9, 3e-4)
    prefill_s = samples.profile().prefill_s(1, np.array([1.0, 65.0]))
    for costs in samples.kv_costs().values():
        assert costs.bytes_per_s == 2e9
        assert [costs.prefill_fixed_s + costs.recompute_s(n) for n in (1, 65)] == pytest.approx(prefill_s)


def test_a_layout_without_decode_steps_is_an_error():
    with pytest.raises(ValueError, match="no decode steps of TP2xDP1"):
        samples_of(lambda rows: rows[(rows.layout == "TP1xDP2") | (rows.kind == "extend")]).profile()


def test_batches_fall_to_one():
    assert falling_batches(1) == (1,)
    assert falling_batches(6) == (6, 5, 4, 3, 2, 1)
    assert falling_batches(32) == (32, 28, 24, 20, 16, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1)
    assert falling_batches(33)[:2] == (33, 32)


@pytest.mark.parametrize(("sequences", "context"), [(1, 32), (7, 100), (32, 288), (16, 192)])
def test_every_visit_passes_its_levels_within_the_context(sequences, context):
    """All start together; STEPS_PER_BATCH steps are made at each level; nothing exceeds the context asked for."""
    for visit in visits(BOTH, sequences, context, 2, thorough=True):
        lengths = visit.response_tokens()
        assert len(lengths) == len(visit.prompts()) == visit.batches[0] * visit.layout.dp
        assert {len(prompt) for prompt in visit.prompts()} == {visit.prompt_tokens}
        assert visit.prompt_tokens + max(lengths) <= context
        mine = lengths[:: visit.layout.dp]
        running = [sum(n > step for n in mine) for step in range(1, max(mine))]
        assert pd.Series(running).value_counts().to_dict() == dict.fromkeys(visit.batches, STEPS_PER_BATCH)


def test_a_thorough_plan_has_warm_ups_repeats_and_variants_and_layouts_take_turns():
    plan = visits(BOTH, 8, 100, 2, thorough=True)
    assert [v.layout for v in plan] == [*BOTH] * (len(plan) // 2)
    assert [v.repeat for v in plan[:2]] == [0, 0]
    assert {v.variant for v in plan} == {"greedy", "sampled", "streamed"}
    assert max(v.repeat for v in plan) == 2
    brief = visits(BOTH, 8, 100, 1, thorough=False)
    assert {(v.variant, v.repeat) for v in brief} == {("greedy", 1)}
    assert len(brief) == 6
