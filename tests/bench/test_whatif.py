"""What-if: golden answers, the planner's schedule in seconds, scale, and bad questions."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import whatif
from bench.errors import UserError
from bench.models import model_directory, model_shape
from bench.predicted import Cell, run_cell
from bench.report.whatif import as_json, as_markdown
from bench.whatif import Question, answer, expected_schedule, heaviest_nodes
from bench.workloads.lengths import parse
from bench.workloads.trace import synthetic_trace

GOLDEN = json.loads((Path(__file__).parent / "golden" / "whatif.json").read_text())
PAPER = Question("LLaMA3.1-8B", "h100_sxm", 8, None, "lognormal:7.25,1.41", 24576, 128, "paper-era", seeds=3)


@pytest.fixture(scope="module")
def said():
    return answer(PAPER)


@pytest.mark.parametrize("name", list(GOLDEN["answers"]))
def test_golden_answers(name):
    """Made by this code (see the file's provenance): a change of any number must be meant, and made by
    ``golden/remake_whatif.py``."""
    golden = GOLDEN["answers"][name]
    told = as_json(answer(Question(**golden["question"])))
    assert told["best_static"] == golden["best_static"]
    assert told["pays_off"] == golden["pays_off"]
    assert {a: v["rollout_s"]["mean"] for a, v in told["static"].items()} == pytest.approx(golden["static_s"], rel=1e-6)
    assert told["pat"]["rollout_s"]["mean"] == pytest.approx(golden["pat_s"], rel=1e-6)
    assert told["pat"]["layouts"] == golden["pat_layouts"]
    assert [s["layout"] for s in told["schedule"]["switches"]] == golden["schedule"]


def test_it_is_the_cell_of_bench_gen(said):
    """Seed by seed the same rollouts as the predicted tier's own cell."""
    for seed in (0, 2):
        records = {r.arm: r for r, _ in run_cell(Cell(said.experiment, 128, "paper-era", seed))}
        for layout, seconds in said.rollout_s.items():
            assert seconds[seed] == records[f"static-{layout}"].rollout_s
        assert said.pat_s[seed] == records["pat-planned"].rollout_s
        assert said.limit_s[seed] == records["pat-planned"].physical_limit_s
        assert list(said.pat_layouts[seed]) == [name for _, name in records["pat-planned"].layouts]


def test_the_schedule_takes_what_the_planner_says(said):
    """Its seconds, added up hop by hop, are the planner's own total."""
    from bench.machine import machine_of
    from bench.predicted import earlier_lengths, trace_of
    from pat.lengths import LengthModel
    from pat.policy import AdaptivePolicy, LengthForesight

    machine = machine_of(said.experiment, "paper-era")
    planner = machine.planner(machine.switches(machine.parts("seats")))
    prompts = trace_of(said.experiment, 128, 0).prompt_tokens
    model = LengthModel.fit(earlier_lengths(said.experiment, 128, 0), PAPER.max_response_tokens)
    first = AdaptivePolicy(planner, LengthForesight(model)).first_layout(prompts)
    ahead = LengthForesight(model).at_start(prompts)
    plan = planner.plans(ahead, fresh=True, earliest_steps=64)[first]
    schedule = expected_schedule(said.experiment, machine)
    prefill_s = float(machine.profile.prefill_s(first.tp, prompts.sum() / first.dp))
    assert schedule.first == first
    assert [hop.layout for hop in schedule.hops] == [layout for _, layout in plan.hops]
    assert len(schedule.hops) >= 1
    assert schedule.expected_s == pytest.approx(prefill_s + plan.best_s, rel=1e-9)


def test_the_report_says_what_the_numbers_say(said):
    text = as_markdown(said)
    gain = said.gain(said.best_static).text(1, "%", sign=True)
    assert f"{gain} tokens/s over the best static layout, {said.best_static}" in text
    assert ("**Adaptive TP pays off:**" in text) == said.pays
    for hop in said.schedule.hops:
        assert f"| {hop.at_s:,.1f} " in text
    assert json.loads(json.dumps(as_json(said)))["static"].keys() == {str(a) for a in said.rollout_s}


def test_the_readme_shows_the_real_output():
    question = Question("Qwen/Qwen3-8B", "h100_sxm", 8, None, "lognormal:7.25,1.41", 24576, 1024)
    shown = (Path(__file__).parents[2] / "README.md").read_text().split("```text\n# What if")[1].split("\n```")[0]
    assert as_markdown(answer(question)).startswith("# What if" + shown + "\n")


def test_one_seed_has_no_interval():
    told = as_json(answer(replace(PAPER, seeds=1)))
    assert told["gain_percent"]["best_static"]["half_95"] is None
    assert "NaN" not in json.dumps(told)


def test_a_trace_gives_its_own_lengths(tmp_path):
    path = tmp_path / "run.jsonl"
    trace = synthetic_trace(parse("bimodal:100,900,0.25"), 16, 4, 900, seed=1)
    trace.write(path)
    said = answer(replace(PAPER, lengths=str(path), max_response_tokens=2000, batch=800, seeds=1))
    share = (trace.response_tokens == 900).mean()
    expected = 800 * (100 + 800 * share)
    assert said.tokens[0] == pytest.approx(expected, rel=0.1)
    assert "cut at 900 tokens" in said.notes[1]


def test_a_fleet_is_many_nodes_of_the_same(said):
    """512 GPUs, 64 times the batch: the statics end a little later than one node's, for their longest sequences."""
    fleet = answer(replace(PAPER, gpus=512, batch=128 * 64, seeds=1))
    assert fleet.simulated_nodes == 64
    for layout, seconds in fleet.rollout_s.items():
        small = said.rollout_s[next(a for a in said.rollout_s if a.tp == layout.tp)]
        assert 0.95 * small.max() < seconds[0] < 1.6 * small.max()


def test_heaviest_nodes_stand_for_the_fleet(monkeypatch):
    """Four nodes whose sequences wait: the two heaviest predict the whole within a few percent."""
    experiment = replace(PAPER, gpus=32, batch=8192, host_term="sglang-0.5", seeds=1).experiment()
    runs = {}
    for sequences in (8192, 4096):
        monkeypatch.setattr(whatif, "WAITING_SEQUENCES", sequences)
        runs[sequences] = whatif.run_arm((experiment, "sglang-0.5", 0, 2, True))
    assert [run.nodes for run in runs.values()] == [4, 2]
    assert runs[4096].rollout_s == pytest.approx(runs[8192].rollout_s, rel=0.05)


def test_heaviest_nodes_are_those_with_the_most_tokens():
    experiment = replace(PAPER, gpus=32, batch=64).experiment()
    trace = synthetic_trace(parse("lognormal:6,1"), 8, 8, 4096, seed=0)
    load = np.bincount(np.arange(64) % 4, weights=trace.response_tokens)
    smaller, part = heaviest_nodes(experiment, trace, 32)
    assert smaller.cluster.nodes == 2
    assert len(part) == 32
    longest = trace.response_tokens.argmax() % 4
    others = [load[k] for k in range(4) if k != longest]
    assert part.response_tokens.sum() == load[longest] + max(others)
    assert heaviest_nodes(experiment, trace, 1)[1].response_tokens.sum() == load.max()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gpu": "h999"}, "known ones: h100_sxm, h200_sxm, a100_sxm, a40, l40s"),
        ({"model": "no-such-model"}, "neither one of LLaMA3.1-8B, Qwen3-14B"),
        ({"gpus": 8, "nodes": 3}, "--gpus 8 do not divide into 3 nodes"),
        ({"lengths": "weibull:1,2"}, "known ones: lognormal:mu,sigma"),
        ({"lengths": "no-such-file.jsonl"}, "no-such-file.jsonl"),
        ({"host_term": "fast"}, "known ones: paper-era, "),
        ({"host_term": "serial:1"}, "takes BASE,EACH in ms"),
        ({"model": "meta-llama/Meta-Llama-3.1-405B"}, "no layout holds"),
    ],
)
def test_bad_questions_are_told_what_is_known(change, told):
    with pytest.raises(UserError) as error:
        answer(replace(PAPER, **change))
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture MambaForCausalLM is not a known dense decoder (LlamaForCausalLM",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights are not modelled"),
    ],
)
def test_other_architectures_are_refused(tmp_path, change, told):
    config = json.loads((model_directory("LLaMA3.1-8B") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError) as error:
        answer(replace(PAPER, model=str(tmp_path)))
    assert told in str(error.value)


def test_names_of_the_hub_are_known_without_it():
    shape = model_shape("Qwen/Qwen3-8B")
    assert (shape.name, shape.layers, shape.hidden, shape.kv_heads) == ("Qwen3-8B", 36, 4096, 8)


def test_a_mistral_like_model_is_a_llama_of_its_sizes(tmp_path, monkeypatch):
    """The step-time package does not know Mistral; its layers are LLaMA's."""
    from bench.profiles import aiconfigurator

    config = json.loads((model_directory("LLaMA3.1-8B") / "config.json").read_text())
    like = config | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (tmp_path / "config.json").write_text(json.dumps(like))
    mine = aiconfigurator.compile_engine(tmp_path, "h100_sxm", 8)
    llama = aiconfigurator.compile_engine(model_directory("LLaMA3.1-8B"), "h100_sxm", 8)
    assert mine.predict_decode_latency(16, 8192, 2) == llama.predict_decode_latency(16, 8192, 2)
