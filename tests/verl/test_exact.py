"""PAT changes nothing but time: real VeRL with switches in every rollout, against a static layout with the same seeds.

Rewards, advantages, losses and updated weights come out of the same tokens and the same training, so that they are
equal to the last bits; the tolerance is that of one rounding in float32.
"""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from bench.e2e.launch import launch
from bench.tiny_models import TinyModel, materialise
from pat.verl.overrides import GrpoRun
from pat.verl.settings import PatSettings

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
]
STEPS, PROMPTS, SAMPLES = 2, 4, 4
ROUNDING = 1e-6
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **options):
    return len(set(solution_str)) / 64
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
COMPARED = (
    "critic/rewards/mean",
    "critic/advantages/mean",
    "critic/advantages/max",
    "critic/advantages/min",
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/grad_norm",
    "actor/entropy",
    "response_length/mean",
)


def grpo(folder, settings) -> GrpoRun:
    reward, data = folder / "reward.py", folder / "train.parquet"
    reward.write_text(REWARD)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i} + {3 * i + 1} ="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(4 * i + 1)},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(PROMPTS * STEPS)
    ]
    pd.DataFrame(rows).to_parquet(data, index=False)
    model = materialise(TinyModel("llama", hidden=128, layers=2, heads=4, kv_heads=2, intermediate=352, vocab=272))
    return GrpoRun(
        model_path=str(model),
        train_files=(str(data),),
        ranks=2,
        settings=PatSettings(**settings, records=str(folder / "records"), sequences=PROMPTS * SAMPLES),
        reward=(str(reward), "compute_score"),
        prompts=PROMPTS,
        samples=SAMPLES,
        max_prompt_tokens=32,
        max_response_tokens=48,
        steps=STEPS,
        learning_rate=1e-3,
        bucket_megabytes=1,
        checkpoint_directory=str(folder / "checkpoints"),
        save_every=STEPS,
        extra=(
            f'actor_rollout_ref.model.custom_chat_template="{TEMPLATE}"',
            "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
            f"trainer.rollout_data_dir='{folder / 'responses'}'",
        ),
    )


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder) -> list[dict]:
    return [line["data"] for line in lines(folder / "metrics.jsonl")]


def weights(folder) -> dict[str, torch.Tensor]:
    """Updated weights of both ranks' shards, by rank and name."""
    found = {}
    for path in sorted(folder.glob("checkpoints/**/model_world_size_2_rank_*.pt")):
        for name, tensor in torch.load(path, weights_only=False).items():
            found[f"{path.stem} {name}"] = getattr(tensor, "_local_tensor", tensor)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of two launches: with a switch in every rollout, and static under another TP."""
    thresholds = {"policy": "thresholds", "thresholds": [[14, "TP2xDP1"]], "interval_steps": 2}
    arms = {"pat": {"layouts": ["TP1xDP2", "TP2xDP1"], **thresholds}, "static": {"layouts": ["TP2xDP1"]}}
    folders = {}
    for name, settings in arms.items():
        folders[name] = tmp_path_factory.mktemp(name)
        launch(grpo(folders[name], settings), folders[name], limit_s=280)
    return folders


def test_the_rollouts_really_switched_and_came_back(runs):
    rollouts, syncs = (lines(runs["pat"] / "records" / name) for name in ("rollouts.jsonl", "syncs.jsonl"))
    assert [(row["start"], row["end"], len(row["switches"])) for row in rollouts] == [("TP1xDP2", "TP2xDP1", 1)] * STEPS
    assert [row["before"] for row in syncs] == ["TP1xDP2", *["TP2xDP1"] * STEPS]
    assert {row["after"] for row in syncs} == {"TP1xDP2"}
    assert min(row["buckets"] for row in syncs) > 1
    assert not any(row["error"] for row in rollouts)
    assert not any(row["switches"] for row in lines(runs["static"] / "records" / "rollouts.jsonl"))


def test_rollout_and_trainer_agree_on_log_probs(runs):
    for folder in runs.values():
        found = [row["training/rollout_probs_diff_max"] for row in metrics(folder)]
        assert len(found) == STEPS
        assert max(found) <= 1e-5


def test_responses_and_rewards_are_the_same(runs):
    for step in range(1, STEPS + 1):
        pat, static = (lines(folder / "responses" / f"{step}.jsonl") for folder in runs.values())
        assert [(row["output"], row["score"]) for row in pat] == [(row["output"], row["score"]) for row in static]
        assert len({row["score"] for row in pat}) > 4  # else there is nothing to be learned from, and to be compared


def test_advantages_and_losses_are_the_same(runs):
    for pat, static in zip(*(metrics(folder) for folder in runs.values()), strict=True):
        for name in COMPARED:
            assert pat[name] == pytest.approx(static[name], rel=ROUNDING, abs=ROUNDING), name
        assert pat["actor/grad_norm"] > 1e-3


def test_updated_weights_are_the_same(runs):
    pat, static = (weights(folder) for folder in runs.values())
    assert pat.keys() == static.keys()
    assert len(pat) > 20
    worst = max(float((pat[name] - static[name]).abs().max()) for name in pat if pat[name].numel())
    assert worst <= ROUNDING
    from safetensors.torch import load_file

    spec = TinyModel("llama", hidden=128, layers=2, heads=4, kv_heads=2, intermediate=352, vocab=272)
    before = load_file(materialise(spec) / "model.safetensors")
    rank0 = {name.split(" ")[1]: tensor for name, tensor in pat.items() if "rank_0" in name}
    moved = [np.abs(rank0[n] - before[n][: len(rank0[n])]).max() for n in rank0 if n in before]
    assert max(float(m) for m in moved) > 1e-4  # the updates were real ones
