"""Tiny random transformers models of every family, with norms and biases that are not trivial."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archon.batch import PackedBatch
from archon.losses import Loss, SupervisedLoss, TokenOutputs
from archon.models.config import ModelConfig
from archon.models.decoder import Decoder, Head
from archon.options import Options
from archon.weights import load_named, named_weights

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
LENGTHS = (1, 2, 37, 5, 64)

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "qwen2": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}


def build(family: str, *, tied: bool = False, seed: int = 0, **overrides: Any) -> Any:
    """A transformers causal LM in fp32, eval mode, SDPA attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_SIZES, **_EXTRA[family], "tie_word_embeddings": tied, **overrides})
    config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("mlp.gate.weight"):
                parameter.normal_(0.0, 0.3)  # spread the router, so that the chosen experts win by a margin
    return model


def ours_from(theirs: Any, **options: Any) -> Decoder:
    """Our decoder with the weights of a transformers model, run with these ``Options``."""
    model = Decoder(ModelConfig.from_hf_dict(theirs.config.to_dict()), options=Options(**options))
    load_named(model, named_weights(theirs))
    return model


def predict(
    model: Decoder,
    batch: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    temperature: float | None = None,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of the token after each of ``rows [M]`` of a packed batch, and entropy there or None: ``[M]``."""
    divisor = None if temperature is None else torch.full((len(rows),), temperature)
    outputs = ("logprobs", "entropy") if with_entropy else ("logprobs",)
    columns = model(*batch, head=Head(rows, batch[0].roll(-1)[rows], divisor, outputs))[:, rows]
    return columns[0], columns[1] if with_entropy else None


def documents(vocab_size: int = 97, lengths: tuple[int, ...] = LENGTHS, seed: int = 7) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]


def pack(sequences: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """``input_ids``, ``position_ids`` and ``cu_seqlens`` of sequences laid end to end."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    return torch.cat(sequences), positions, torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])


class ValueLoss(SupervisedLoss):
    """Squared distance of the values under the mask from 1, and of the last values from -1."""

    outputs = ("values", "last_value")

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> Loss:
        assert outputs.values is not None and outputs.last_value is not None
        error = torch.where(batch.loss_mask, (outputs.values - 1).square(), 0.0).sum()
        return Loss(error + (outputs.last_value + 1).square().sum())


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())
