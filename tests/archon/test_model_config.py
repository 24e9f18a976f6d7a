"""config.json: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from archon.models.config import ModelConfig, MoEConfig, RopeConfig

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def test_defaults_follow_the_architecture() -> None:
    config = ModelConfig.from_hf_dict(LLAMA)
    assert (config.num_key_value_heads, config.head_dim, config.rope) == (4, 16, RopeConfig(10_000.0))
    assert not config.tie_word_embeddings and config.moe is None
    assert ModelConfig.from_hf_dict({**LLAMA, "model_type": "qwen3", "architectures": None}).head_dim == 128


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_sparse_layers_follow_step_and_dense_list(key: str) -> None:
    hf = {**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    hf[key] = hf.pop("num_experts")
    assert ModelConfig.from_hf_dict(hf).moe == MoEConfig(8, 2, 32, False, frozenset({1, 5}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "model_type='mamba'"),
        ({"model_type": None}, "model_type=None"),
        ({"architectures": ["LlamaForTokenClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types.*sliding_attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_parameters.factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15"),
    ],
    ids=str,
)
def test_what_the_decoder_does_not_have_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_hf_dict({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"num_experts": 0}, "num_experts="), ({"num_experts_per_tok": 9}, "num_experts_per_tok=9")],
    ids=str,
)
def test_impossible_experts_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_hf_dict({**MOE, **changes})


def test_a_folder_that_is_no_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_folder(tmp_path) == ModelConfig.from_hf_dict(LLAMA)
