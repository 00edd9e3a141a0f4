"""The phase model against closed forms and published steps."""

from dataclasses import replace

import numpy as np
import pytest

from bench.phases import PUBLISHED_STEPS, Trainer, forward_flops, iteration, predicted_ratio, sync_s
from pat.model import ModelShape

SHAPE = ModelShape(
    "m", "LlamaForCausalLM", layers=2, hidden=8, intermediate=16, heads=2, kv_heads=1, head_dim=4, vocab=10
)
FAST = Trainer(gpus=4, peak_flops=1e6, link_bytes_per_s=1e15, forward_share=0.5, update_share=0.25)


def test_forward_flops_by_hand():
    # a layer: q, o 8x8 each, k, v 8x4 each = 192; MLP 3x8x16 = 384; two norms 16; head 80; final norm 8
    weights = 2 * (192 + 384 + 16) + 80 + 8
    assert forward_flops(SHAPE, np.array([3, 5])) == 2 * weights * 8 + 2 * 2 * 2 * 4 * (9 + 25)


def test_a_compute_bound_iteration_by_hand():
    lengths = np.array([3, 5])
    found = iteration(SHAPE, FAST, lengths, gen_s=7.0)
    flops = forward_flops(SHAPE, lengths)
    assert found.old_log_prob == found.ref == pytest.approx(flops / (4e6 * 0.5))
    assert found.update_actor == pytest.approx(3 * flops / (4e6 * 0.25))
    assert found.step == pytest.approx(7.0 + 2 * found.ref + found.update_actor + found.update_weights)
    assert found.gen_share == pytest.approx(7.0 / found.step)
    assert iteration(SHAPE, FAST, lengths, 7.0, reference=False).ref == 0


def test_a_slow_link_binds_each_pass_by_its_gathers():
    slow = replace(FAST, link_bytes_per_s=1.0, micro_batch_tokens=1)
    moved = SHAPE.weight_bytes * 3 / 4
    found = iteration(SHAPE, slow, np.array([3, 5]), 0.0)  # 8 tokens on 4 GPUs: two micro-batches
    assert found.old_log_prob == pytest.approx(2 * moved)
    assert found.update_actor == pytest.approx(2 * 3 * moved)
    assert found.update_weights == pytest.approx(moved) == pytest.approx(sync_s(SHAPE, slow))


def test_an_optimiser_in_host_memory_moves_there_and_back():
    lengths = np.array([4])
    moved = iteration(SHAPE, replace(FAST, host_bytes_per_s=10.0), lengths, 0.0).update_actor
    assert moved - iteration(SHAPE, FAST, lengths, 0.0).update_actor == pytest.approx(2 * 12 * SHAPE.params / 4 / 10)


def test_published_steps_that_the_model_did_not_see_lie_within_a_third():
    assert predicted_ratio() == pytest.approx(286 / 88)
    for step in PUBLISHED_STEPS:
        assert step.update_to_forward / predicted_ratio() == pytest.approx(1, abs=1 / 3), step.source
        assert step.ref is None or step.ref / step.old_log_prob == pytest.approx(1, abs=0.1)


def test_a_trainer_without_gpus_is_refused():
    with pytest.raises(ValueError, match="gpus must be above 0"):
        replace(FAST, gpus=0)
