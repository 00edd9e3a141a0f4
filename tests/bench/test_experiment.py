"""Experiments: every file loads, and every mistake is one error that names the field."""

import pytest
import yaml

from bench.errors import UserError
from bench.experiment import FOLDER, known_experiments, load_experiment
from bench.gen_measured import model_of
from bench.machine import machine_of
from bench.models import model_shape
from bench.tiny_models import PRESETS
from pat.layout import Layout

CELL = yaml.safe_load((FOLDER / "h100x8-llama-24k.yaml").read_text())


def written(tmp_path, **changes) -> str:
    path = tmp_path / "cell.yaml"
    path.write_text(yaml.safe_dump(CELL | changes))
    return str(path)


@pytest.mark.parametrize("name", known_experiments())
def test_every_experiment_loads_and_fits_its_model(name):
    experiment = load_experiment(name)
    assert experiment.name == name
    if experiment.tier == "predicted":
        experiment.check_model(model_shape(experiment.model))


@pytest.mark.parametrize("path", sorted((FOLDER / "extra").glob("*.yaml")), ids=lambda path: path.stem)
def test_experiments_beside_the_default_ones_load(path):
    experiment = load_experiment(str(path))
    assert path.stem not in known_experiments()
    assert experiment.model in PRESETS


def test_the_papers_cells_are_all_there():
    cells = {
        f"{bed}-{m}-{k}k" for bed in ("h100x8", "a40x8", "a40x16") for m in ("llama", "qwen") for k in (6, 8, 16, 24)
    }
    assert cells | {"cpu-llama", "cpu-qwen3"} == set(known_experiments())


def test_layouts_stay_inside_a_node():
    experiment = load_experiment("a40x16-qwen-16k")
    assert experiment.layouts == (Layout(1, 16), Layout(2, 8), Layout(4, 4), Layout(8, 2))
    assert experiment.verl_default == Layout(2, 8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"modle": "x"}, "unknown field 'modle'; known fields: name, tier, model"),
        ({"model": None}, "model: Input should be a valid string"),
        ({"tps": [1, 2, 3]}, "tps: TP3 does not divide 8 GPUs"),
        ({"tps": [1, 2, 16], "cluster": {"gpu": "a40", "nodes": 2, "gpus_per_node": 8}}, "tps: TP16 does not divide"),
        ({"tps": [1, 4, 8]}, "verl_default_tp: TP2 is not among tps"),
        ({"batches": [100]}, "batches: 100 is not a multiple of samples_per_prompt 8"),
        ({"batches": []}, "batches"),
        ({"lengths": "gamma:1"}, "lengths: length distribution 'gamma:1' is not known"),
        ({"arms": ["static", "magic"]}, "arms.1"),
        ({"cluster": {"gpu": "a40", "gpus_per_node": 0}}, "cluster.gpus_per_node"),
        ({"seeds": ["x"]}, "seeds.0"),
        ({"seeds": [-1]}, "seeds.0"),
        ({"name": "../elsewhere"}, "name: String should match"),
    ],
)
def test_a_mistake_names_its_field(tmp_path, changes, words):
    with pytest.raises(UserError) as error:
        load_experiment(written(tmp_path, **changes))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "GPT-9"}, "GPT-9"),
        ({"cluster": {"gpu": "v100", "gpus_per_node": 8}}, "v100"),
        ({"host_terms": ["psychic"]}, "psychic"),
    ],
)
def test_unknown_names_tell_the_known_ones(tmp_path, changes, words):
    experiment = load_experiment(written(tmp_path, **changes))
    with pytest.raises(UserError, match=words) as error:
        machine_of(experiment, experiment.host_terms[0])
    assert any(known in str(error.value) for known in ("LLaMA3.1-8B", "h100_sxm", "sglang-0.5"))


def test_a_tp_that_does_not_divide_the_heads(tmp_path):
    config = '{"architectures": ["LlamaForCausalLM"], "num_attention_heads": 6, "num_key_value_heads": 3, '
    config += '"hidden_size": 60, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 9}'
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(config)
    experiment = load_experiment(written(tmp_path, model=str(tmp_path / "model")))
    with pytest.raises(
        UserError, match="tps: model: TP2 neither divides nor is a multiple of 3 KV heads; leave TP2 out"
    ):
        machine_of(experiment, "none")


def test_missing_files_and_models(tmp_path):
    with pytest.raises(UserError, match="known ones: a40x16-llama-16k"):
        load_experiment("h100x9")
    for content in (b"a: [1\nb: }", b"\xff\xfe\x00"):
        (tmp_path / "bad.yaml").write_bytes(content)
        with pytest.raises(UserError, match=r"bad.yaml: not valid YAML: [^\n]*$"):
            load_experiment(str(tmp_path / "bad.yaml"))
    with pytest.raises(UserError, match="give --model"):
        model_of(load_experiment(written(tmp_path, model="Mystery-7B")), None)
