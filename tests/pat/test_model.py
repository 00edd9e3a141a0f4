"""Model shapes against published parameter counts."""

import json

import pytest

from pat.model import ModelShape

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(
    ("config", "params", "kv_bytes"),
    [(LLAMA, 8_030_261_248, 131072), (QWEN3, 14_768_307_200, 163840), (QWEN2, 7_615_616_512, 57344)],
    ids=["LLaMA3.1-8B", "Qwen3-14B", "Qwen2.5-7B"],
)
def test_published_counts(config, params, kv_bytes):
    shape = ModelShape.from_config(config)
    assert shape.params == params
    assert shape.weight_bytes == 2 * params
    assert shape.kv_bytes_per_token() == kv_bytes


def test_kv_heads_are_divided_then_replicated():
    shape = ModelShape.from_config(LLAMA)
    assert [shape.kv_heads_per_rank(tp) for tp in (1, 2, 4, 8, 16)] == [8, 4, 2, 1, 1]
    assert shape.kv_bytes_per_token(8) * 8 == shape.kv_bytes_per_token()
    assert shape.kv_bytes_per_token(16) == shape.kv_bytes_per_token(8)


def test_tied_embeddings_count_once_and_float32_weighs_four_bytes():
    tied = ModelShape.from_config({**LLAMA, "tie_word_embeddings": True, "torch_dtype": "float32"})
    assert tied.params == 8_030_261_248 - 128256 * 4096
    assert tied.weight_bytes == 4 * tied.params


def test_check_tp():
    shape = ModelShape.from_config({**QWEN3, "num_attention_heads": 24, "num_key_value_heads": 6})
    for tp in (1, 2, 3, 6, 12):
        shape.check_tp(tp)
    with pytest.raises(ValueError, match="TP5 does not divide 24"):
        shape.check_tp(5)
    with pytest.raises(ValueError, match="TP4 neither divides"):
        shape.check_tp(4)


def test_load_names_what_is_wrong(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelShape.load(tmp_path).params == 8_030_261_248
    with pytest.raises(ValueError, match=r"no config\.json"):
        ModelShape.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="lacks the field 'vocab_size'"):
        ModelShape.from_config({k: v for k, v in LLAMA.items() if k != "vocab_size"})
    with pytest.raises(ValueError, match="MixtralForCausalLM is not a known dense decoder"):
        ModelShape.from_config({**LLAMA, "architectures": ["MixtralForCausalLM"]})
