"""bench e2e: experiments, data, reward, records and report; real launches are in CI's shrunken run."""

import json
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml

from bench.e2e import launch as launching
from bench.e2e.data import write_data, write_trace
from bench.e2e.experiment import FOLDER, known_e2e, load_e2e
from bench.e2e.iterations import Iteration, IterationStore, parse
from bench.e2e.launch import MARK, launch, marked, stop
from bench.e2e.reward import compute_score
from bench.e2e.run import Options, describe, disagreement, settings_of
from bench.errors import UserError
from bench.experiment import load_experiment
from bench.report.e2e import SECTIONS, render_e2e
from bench.report.e2e_launches import difference
from bench.workloads.builtin import addition_problems


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"3+4=7 \boxed{7}", "7", 1.0),
        (r"\boxed{8}", "7", 0.0),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        ("7", "7", 0.0),
        (r"\boxed{7" + "\x00" * 40, "7", 0.0),
    ],
)
def test_reward(response, truth, score):
    assert compute_score("pat", response, truth) == {"score": score, "acc": score, "reward_failed": 0.0}


def test_a_reward_that_raises_scores_nothing_and_is_counted(monkeypatch):
    def fails(*_):
        raise RuntimeError("parser")

    monkeypatch.setattr("bench.e2e.reward.answered", fails)
    assert compute_score("pat", "x", "1") == {"score": 0.0, "acc": 0.0, "reward_failed": 1.0}


def test_worked_sums_end_in_their_answer_and_are_right():
    problems = addition_problems(50, seed=3)
    assert problems == addition_problems(50, seed=3)
    assert len({len(p["solution"]) for p in problems}) > 5
    for p in problems:
        assert eval(p["problem"].removeprefix("Compute $").removesuffix("$.")) == p["answer"]
        assert compute_score("pat", p["solution"], str(p["answer"]))["score"] == 1.0
        for step in p["solution"].split()[:-1]:
            left, _, right = step.partition("=")
            assert eval(left) == int(right)


@pytest.mark.parametrize("name", known_e2e())
def test_presets_are_valid_and_agree_with_their_predicted_cell(name):
    experiment = load_e2e(name)
    if experiment.device == "cpu":
        return
    cell = load_experiment(experiment.cell)
    assert (experiment.model, experiment.cluster, experiment.testbed) == (cell.model, cell.cluster, cell.testbed)
    assert experiment.max_response_tokens == cell.max_response_tokens
    assert experiment.sequences in cell.batches


def test_every_arm_of_a_dry_run_differs_in_its_rollout_alone(tmp_path):
    text = describe(load_e2e("a40x16-qwen-16k-e2e"), Options(out=tmp_path, dry_run=True, ray_address="auto"))
    arms = [part.splitlines() for part in text.split("\n## ")[1:]]
    assert [arm[0] for arm in arms] == ["static-TP1xDP8", "static-TP2xDP4", "static-TP4xDP2", "static-TP8xDP1", "pat"]
    assert not list(tmp_path.iterdir())
    for arm in arms:
        assert {a.split("=")[0].strip() for a in set(arm) ^ set(arms[0]) if "=" in a} <= {
            '"+actor_rollout_ref.rollout.custom',
            '"trainer.experiment_name',
            '"trainer.default_local_dir',
            '"hydra.run.dir',
            "export VERL_FILE_LOGGER_PATH",
        }
        assert any("ray_init.address='auto'" in line for line in arm)
        assert any("trainer.nnodes=2" in line for line in arm)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 1}, "samples: GRPO"),
        ({"prompts": 3, "samples": 3}, "prompts: 3 x 3"),
        ({"problems": 24}, "problems: 24"),
        ({"tps": [3]}, "tps: TP3"),
        ({"iterations": 1}, "iterations"),
        ({"lengths": "normal:1"}, "lengths"),
        ({"nodes": 1}, "nodes: .*known fields"),
    ],
)
def test_a_bad_experiment_names_its_field(tmp_path, change, message):
    content = yaml.safe_load((FOLDER / "cpu-llama-e2e.yaml").read_text()) | change
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=message):
        load_e2e(str(path))


def test_data_and_forced_lengths_are_the_same_for_every_arm(tmp_path):
    experiment = load_e2e("cpu-llama-e2e").model_copy(update={"lengths": "uniform:2,9"})
    frame = pd.read_parquet(write_data(experiment, 0, None, tmp_path / "a.parquet"))
    assert len(frame) == experiment.problems == experiment.prompts
    fresh = write_data(experiment.model_copy(update={"problems": None}), 0, None, tmp_path / "b.parquet")
    assert len(pd.read_parquet(fresh)) == experiment.prompts * experiment.iterations
    assert frame.prompt[0][0]["content"] == addition_problems(1, 0)[0]["problem"]
    assert frame.reward_model[0]["ground_truth"] == str(addition_problems(1, 0)[0]["answer"])
    lengths = json.loads(write_trace(experiment, 0, tmp_path / "t.json").read_text())["lengths"]
    assert [len(row) for row in lengths] == [experiment.sequences] * experiment.iterations
    assert lengths[0] != lengths[1]
    assert min(map(min, lengths)) >= 2
    assert max(map(max, lengths)) <= 9
    assert json.loads(write_trace(experiment, 1, tmp_path / "u.json").read_text())["lengths"] != lengths
    forced = settings_of(experiment, "pat-forced", tmp_path, tmp_path / "t.json", {})
    assert (forced.start, forced.thresholds) == ("TP1xDP2", ((48, "TP2xDP1"),))
    assert settings_of(experiment, "static-TP2xDP1", tmp_path, None, {}).layouts == ("TP2xDP1",)


def written(folder, step, **metrics):
    """A launch's files as VeRL's file logger and the rollout server write them."""
    (folder / "records").mkdir(parents=True, exist_ok=True)
    data = {"timing_s/step": 3.0, "timing_s/gen": 2.0, "critic/rewards/mean": 0.5, "perf/throughput": 9.0} | metrics
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "data": data | {"training/epoch": 0, "note": "text"}}) + "\n")
    rollout = {"iteration": step, "begin_s": 1.0, "end_s": 3.0, "expected_s": 1.5, "lengths_known": 4}
    with (folder / "records" / "rollouts.jsonl").open("a") as file:
        file.write(json.dumps(rollout | {"start": "TP1xDP2", "end": "TP2xDP1", "switches": [{}]}) + "\n")


def test_metrics_are_joined_with_the_servers_records_and_a_cut_line_is_left_out(tmp_path):
    written(tmp_path, 1)
    written(tmp_path, 2)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "data": {"timing_s/st')
    first, second = parse(tmp_path, "e", "pat", 0, "mark")
    assert (first.iteration, second.iteration) == (1, 2)
    assert second.metrics["timing_s/gen"] == 2.0
    assert second.rollout["expected_s"] == 1.5
    assert "note" not in second.metrics


def test_report_gives_paired_reductions_and_exactness(tmp_path):
    experiment = load_e2e("cpu-llama-e2e")
    store, found = IterationStore(tmp_path, experiment.name), []
    for arm, gen_s in (("static-TP1xDP2", 2.0), ("static-TP2xDP1", 4.0), ("pat", 1.0)):
        folder = tmp_path / "runs" / arm
        for step in (1, 2, 3):
            written(folder, step, **{"timing_s/gen": gen_s * step, "timing_s/step": gen_s * step + 2.0})
        found += parse(folder, experiment.name, arm, 0, "mark")
    store.append(found)
    provenance = {"commit": "c", "command": "x", "machine": {}, "versions": {}}
    made = {"experiment": experiment.model_dump(mode="json"), "fingerprints": ["mark"], "provenance": provenance}
    store.write_made(made)
    text = render_e2e(tmp_path).read_text()
    assert all(section in text for section in SECTIONS)
    gains = next(
        line for line in text.splitlines() if line.startswith("| cpu-llama-e2e") and "| pat" in line and "%" in line
    )
    cells = [cell.strip() for cell in gains.split("|")]
    # generation: 4 -> 1 and 2 -> 1 in every iteration; iterations 2 and 3 take 10, 14 | 6, 8 | 4, 5
    assert cells[3] == "+75.0% ± 0.0"
    assert cells[4] == "+50.0% ± 0.0"
    assert cells[5] == "–"  # these launches say nothing of training
    assert cells[6].startswith("+62.1%")
    assert cells[7].startswith("+35.4%")
    assert "-25%" in text  # 1.5 s expected, 2 s taken
    assert "stayed in the layout" not in text
    still = {"start": "TP1xDP2", "end": "TP1xDP2", "switches": []}
    store.append([one.model_copy(update={"rollout": one.rollout | still}) for one in found])
    assert "pat stayed in the layout of static-TP1xDP2" in render_e2e(tmp_path).read_text()


def test_a_launch_whose_rollout_and_trainer_disagree_is_named():
    good = Iteration(experiment="e", arm="pat", seed=0, iteration=1, metrics={"training/rollout_probs_diff_max": 4e-6})
    bad = good.model_copy(update={"iteration": 2, "metrics": {"training/rollout_probs_diff_max": 0.99}})
    assert disagreement([good]) is None
    assert disagreement([]) is None
    assert "iteration 2: probabilities of rollout and trainer differ by 9.9e-01" in disagreement([good, bad])


def test_difference_is_relative_above_one():
    def one(i, value):
        return Iteration(experiment="e", arm="a", seed=0, iteration=i, metrics={"m": value})

    assert difference([one(1, 0.5), one(2, 11.0)], [one(1, 0.25), one(2, 10.0)], "m") == 0.25
    assert difference([one(1, 12.0)], [one(1, 10.0)], "m") == pytest.approx(0.2)
    assert difference([one(1, 1.0)], [one(2, 1.0)], "m") is None


def test_all_processes_of_a_launch_end_also_those_in_sessions_of_their_own():
    code = "import subprocess, time; subprocess.Popen(['sleep', '60'], start_new_session=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {MARK: "test-mark"})
    deadline = time.monotonic() + 20
    while len(marked("test-mark")) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(marked("test-mark")) == 2
    stop(process, "test-mark")
    assert marked("test-mark") == []


def test_a_launch_that_fails_shows_the_end_of_its_output(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "command", lambda _: [sys.executable, "-c", "raise OSError('No space left')"])
    monkeypatch.setattr(launching, "environment", lambda *_: {})
    run = SimpleNamespace(ray_address=None, model_path=str(tmp_path), checkpoint_directory=str(tmp_path / "a" / "b"))
    with pytest.raises(UserError, match=r"code 1; see (.|\n)*OSError: No space left'?$"):
        launch(run, tmp_path, 60.0)
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    monkeypatch.setattr(launching.shutil, "disk_usage", lambda _: SimpleNamespace(free=500))
    with pytest.raises(UserError, match=r"No space left for checkpoints in .*: 0.0 MB are free"):
        launch(run, tmp_path, 60.0)


def test_an_address_without_a_cluster_is_refused_at_once(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    for wrong in (address, f"ray://{address}", "127.0.0.1:none"):
        with pytest.raises(UserError, match=rf"--ray-address {wrong}: no cluster answers there .*ray start"):
            launch(SimpleNamespace(ray_address=wrong), tmp_path, 60.0)
