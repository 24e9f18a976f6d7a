"""The memory model against what is really allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from archon.models.config import ModelConfig, MoEConfig, RopeConfig
from archon.models.decoder import Decoder, Head
from archon.options import Options
from archon.plan import activation_bytes_per_token, count_parameters, plan_memory

DENSE = ModelConfig("llama", 211, 64, 160, 3, 8, 2, 8, 512, RopeConfig(10_000.0))
TIED = ModelConfig("qwen3", 97, 48, 96, 2, 4, 4, 16, 512, RopeConfig(10_000.0), tie_word_embeddings=True, qk_norm=True)
SPARSE = ModelConfig(
    "qwen3_moe", 101, 64, 128, 3, 4, 2, 16, 512, RopeConfig(10_000.0), qk_norm=True,
    moe=MoEConfig(8, 2, 96, True, frozenset({1, 2})),
)  # fmt: skip


def hf_config(name: str):
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    sizes = {
        "vocab_size": 211, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    if name == "qwen3_moe":
        return Qwen3MoeConfig(**sizes, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    classes = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    return classes[name](**sizes, tie_word_embeddings=name == "qwen3")


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_hf_parity_of_parameter_counts(name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = hf_config(name)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config).num_parameters()
    assert count_parameters(ModelConfig.from_hf_dict(config.to_dict())) == theirs


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_parameters_gradients_and_optimizer_states_are_exact(name: str) -> None:
    model = Decoder(SPARSE)
    model.init_weights(torch.Generator().manual_seed(0))
    kinds = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = kinds[name](model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    plan = plan_memory(SPARSE, dtype="float32", optimizer=name, tokens_per_mb=1, recompute=False, kv_cache_tokens=0)  # type: ignore[arg-type]
    parameters = list(model.parameters())
    states = [s for p in parameters for s in optimizer.state[p].values() if torch.is_tensor(s) and s.ndim]
    assert plan.parameters == sum(p.nbytes for p in parameters)
    assert plan.gradients == sum(p.grad.nbytes for p in parameters if p.grad is not None)
    assert plan.optimizer == sum(s.nbytes for s in states)
    assert plan.compute_copy == plan.kv_cache == plan.engine_weights == 0


def saved_bytes(config: ModelConfig, dtype: torch.dtype, lengths: list[int], **options: Any) -> int:
    """Bytes of distinct storages that autograd keeps after a forward, without the tile of logits, planned apart."""
    model = Decoder(config, options=Options(**options))
    model.init_weights(torch.Generator().manual_seed(0))
    model.to(dtype)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = sum(lengths)
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(0, config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(1))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        columns = model(ids, position_ids, cu_seqlens, head=Head(torch.arange(tokens - 1), ids[1:]))
    assert columns.requires_grad
    return sum(storage.nbytes() for storage in kept.values()) - dtype.itemsize * (tokens - 1) * config.vocab_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [DENSE, TIED, SPARSE], ids=lambda config: config.model_type)
def test_activations_match_what_autograd_keeps(config: ModelConfig, dtype: torch.dtype) -> None:
    measured = saved_bytes(config, dtype, [300, 300])
    planned = 600 * activation_bytes_per_token(config, dtype.itemsize, recompute=False)
    assert planned == pytest.approx(measured, rel=0.05)


def test_recompute_keeps_the_inputs_of_layers() -> None:
    deep = ModelConfig("llama", 211, 64, 160, 12, 8, 2, 8, 512, RopeConfig(10_000.0))
    kept = saved_bytes(deep, torch.float32, [300, 300], ac_mode="full")
    one_layer = activation_bytes_per_token(DENSE, 4, recompute=False) // DENSE.num_hidden_layers
    planned = activation_bytes_per_token(deep, 4, recompute=True)
    assert planned == pytest.approx(kept / 600 + one_layer, rel=0.05)
    assert planned < activation_bytes_per_token(deep, 4, recompute=False) / 2


@pytest.mark.parametrize(("budget", "recomputed"), [(1.0, 0), (0.8, 1), (0.75, 1), (0.7, 2), (0.5, 2), (0.1, 4)])
def test_a_memory_budget_keeps_at_most_its_share_and_recomputes_no_layer_more(budget: float, recomputed: int) -> None:
    """Beside the inputs of layers and the head, which are kept in any case."""
    config = ModelConfig("llama", 211, 64, 160, 4, 8, 2, 8, 512, RopeConfig(10_000.0))
    everything, inputs, kept = (
        saved_bytes(config, torch.float32, [150, 150], **options)
        for options in ({}, {"ac_mode": "full"}, {"ac_mode": "memory_budget", "ac_memory_budget": budget})
    )
    share = (kept - inputs) / (everything - inputs)
    assert share == pytest.approx(1 - recomputed / 4, abs=0.01)
    assert share <= budget + 0.01 < share + 1 / 4 + 0.01


def test_bf16_adds_a_copy_and_the_engine_its_weights_and_cache() -> None:
    def plan(**changes):
        given = {
            "dtype": "bfloat16",
            "optimizer": "adam",
            "tokens_per_mb": 64,
            "recompute": False,
            "kv_cache_tokens": 0,
        }
        return plan_memory(DENSE, **(given | changes))

    size = count_parameters(DENSE)
    assert plan().compute_copy == 2 * size
    assert plan().engine_weights == 0
    with_engine = plan(kv_cache_tokens=1000)
    assert with_engine.engine_weights == with_engine.staged_weights == 2 * size
    assert with_engine.kv_cache == 1000 * 2 * DENSE.num_hidden_layers * DENSE.num_key_value_heads * DENSE.head_dim * 2
    assert with_engine.total - plan().total == 4 * size + with_engine.kv_cache
    scoring = plan(optimizer=None)
    assert scoring.gradients == scoring.optimizer == scoring.activations == 0
