"""Settings, overrides, sampling parameters and the trace: what the backend is told, without Ray or an engine."""

import json
import os
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from pat.layout import Layout
from pat.verl.arguments import capacities, engine_arguments, sampling
from pat.verl.overrides import GrpoRun, environment, overrides, text
from pat.verl.settings import PatSettings

TWO = ("TP1xDP2", "TP2xDP1")


def run(**changes):
    settings = PatSettings(layouts=TWO, policy="thresholds", thresholds=((3, "TP2xDP1"),), records="a dir/it's")
    fields = {"model_path": "m", "train_files": ("t.parquet",), "ranks": 2, "settings": settings}
    return GrpoRun(**fields | changes)


def config(run):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides(run))


def test_verl_reads_back_what_the_overrides_say():
    found = config(run(prompts=6, samples=4, max_response_tokens=77, learning_rate=3e-5, kl_coef=0.0))
    rollout = found.actor_rollout_ref.rollout
    assert PatSettings.of(OmegaConf.to_container(rollout.custom)) == run().settings
    assert (rollout.name, rollout.n, rollout.tensor_model_parallel_size) == ("pat", 4, 2)
    assert (found.data.train_batch_size, found.data.max_response_length) == (6, 77)
    assert found.actor_rollout_ref.actor.optim.lr == 3e-5
    assert not found.actor_rollout_ref.actor.use_kl_loss
    assert found.actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype == "fp32"
    assert found.trainer.device == "cpu"


def test_the_cuda_overrides_are_in_bfloat16_and_use_an_address_where_given():
    found = config(run(device="cuda", ray_address="auto"))
    assert found.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert found.actor_rollout_ref.actor.fsdp_config.param_offload
    assert found.ray_kwargs.ray_init.address == "auto"
    assert "VERL_PLATFORM" not in environment(run(device="cuda"), "metrics.jsonl")


@pytest.mark.parametrize(("value", "expected"), [(None, "null"), (True, "true"), ({"a": [1, "b c"]}, "{a:[1,'b c']}")])
def test_values_are_in_hydras_syntax(value, expected):
    assert text(value) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layouts": ["TP1xDP2", "TP2xDP2"]}, "not of one number of ranks"),
        ({"layouts": ["TP3"]}, "not of the form"),
        ({"layouts": TWO, "start": "TP4xDP1"}, "not one of layouts"),
        ({"layouts": TWO, "policy": "thresholds"}, "needs thresholds"),
        ({"layouts": TWO, "policy": "adaptive"}, "needs profile and switch_costs"),
        ({"layouts": TWO, "layout": "x"}, r"custom.pat.layout: Extra inputs"),
        ({}, "custom.pat is missing"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PatSettings.of({"pat": options})


def test_layouts_are_of_the_ranks():
    with pytest.raises(ValueError, match="not of ranks = 4"):
        run(ranks=4)


def test_engine_arguments_share_the_rollout_among_the_replicas_of_the_lowest_tp():
    found = OmegaConf.to_container(config(run()).actor_rollout_ref.rollout)
    rollout = OmegaConf.create(found | {"max_num_seqs": 9})
    settings = PatSettings(layouts=TWO, kv_tokens_per_rank=100)
    arguments = engine_arguments(settings, rollout, "cpu")
    assert (arguments["max_running_requests"], arguments["max_total_tokens"]) == (5, 100)
    assert capacities(arguments, settings.all_layouts) == {Layout(1, 2): 100, Layout(2, 1): 200}
    with pytest.raises(ValueError, match="data_parallel_size=1"):
        engine_arguments(settings, OmegaConf.create(found | {"data_parallel_size": 2}), "cpu")


def test_sampling_parameters():
    asked = {"temperature": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    assert sampling(asked, 40, 7, None) == (
        {"temperature": 1.0, "top_k": -1, "max_new_tokens": 40, "sampling_seed": 7},
        True,
    )
    forced, _ = sampling(asked | {"max_tokens": 30}, 40, None, 99)
    assert (forced["max_new_tokens"], forced["ignore_eos"]) == (40, True)
    assert sampling({"max_tokens": 30}, 40, None, None)[0]["max_new_tokens"] == 30


def test_a_trace_forces_lengths_by_iteration_and_place(tmp_path):
    from pat.verl.server import forced_tokens, place_of, read_trace, seed_of

    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"lengths": [[3, 4], [5, 6]]}))
    trace = read_trace(str(path))
    assert [forced_tokens(trace, iteration, 1) for iteration in (1, 2, 3)] == [4, 6, 4]
    assert forced_tokens(None, 1, None) is None
    with pytest.raises(ValueError, match="needs one more"):
        forced_tokens(trace, 1, 2)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"trace: .* is not"):
        read_trace(str(path))
    assert (place_of("det-12"), place_of("3f2a")) == (12, None)
    assert len({seed_of(0, iteration, place) for iteration in range(9) for place in range(9)}) == 81


PROBE = """
import verl
from verl.plugin.platform import get_platform
import pat.verl.register
from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
print(get_platform().device_name, get_rollout_replica_class("pat").__name__, get_rollout_class("pat").__name__,
      EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__)
"""


def probe(code, **changes):
    """Run code in a process of its own, as one of VeRL's."""
    names = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "pat.verl.plugin"}
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | names | changes, capture_output=True, text=True, timeout=120
    )


def test_verl_finds_backend_platform_and_engine():
    done = probe(PROBE)
    assert done.stdout.split() == ["cpu", "PatReplica", "PatWeights", "CpuFSDP2Engine"], done.stderr[-2000:]


def test_the_package_names_its_entry_point():
    import tomllib
    from importlib import import_module
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["verl.plugins"] == {"pat": "pat.verl.plugin"}
    assert import_module("pat.verl.plugin").error is None


def test_an_error_in_the_entry_point_is_shown_and_raised():
    broken = "import sys; sys.modules['pat.verl.cpu.process_group'] = None\n" + PROBE
    done = probe(broken, VERL_USE_EXTERNAL_MODULES="")
    assert done.returncode != 0
    assert "could not be registered in VeRL" in done.stderr


def test_another_version_of_verl_is_refused():
    patched = (
        "import importlib.metadata as m; old = m.version; m.version = lambda n: '0.8' if n == 'verl' else old(n)\n"
    )
    done = probe(patched + "import pat.verl.register")
    assert "written for verl 0.9.1, found 0.8" in done.stderr
