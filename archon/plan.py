"""What a model needs in memory to train and to generate, on one device, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch

from archon.device import default_device
from archon.models.config import ModelConfig
from archon.models.decoder import Decoder
from archon.parallel.recompute import layer_activation_bytes, norm_activation_bytes
from archon_kernels.linear_logprob import logit_bytes

_FP32 = 4
COMPUTE_BYTES = {"float32": 4, "bfloat16": 2}
_OPTIMIZER_STATES = {"adam": 2, "sgd": 0, None: 0}
"""fp32 numbers that the optimizer keeps for each parameter."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. They rarely peak together, so ``total`` is an upper estimate without allocator overhead.

    Attributes:
        parameters: fp32 masters.
        gradients: fp32.
        optimizer: fp32 states.
        compute_copy: the parameters in the compute dtype, where it is not fp32.
        activations: what one micro-batch keeps for backward.
        lm_head: logits held at once, the gradient of the head in the compute dtype, and the fp32 sum of its input's.
        engine_weights: the inference engine's own copy, in the compute dtype.
        staged_weights: the next version on its way to the engine.
        kv_cache: keys and values of the engine's cache.
    """

    parameters: int
    gradients: int
    optimizer: int
    compute_copy: int
    activations: int
    lm_head: int
    engine_weights: int
    staged_weights: int
    kv_cache: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def plan_memory(
    config: ModelConfig,
    *,
    dtype: Literal["float32", "bfloat16"],
    optimizer: Literal["adam", "sgd"] | None,
    tokens_per_mb: int,
    recompute: bool,
    kv_cache_tokens: int,
) -> MemoryPlan:
    """Memory of an engine and of an inference engine beside it, in one process.

    Args:
        config: the model's shape.
        dtype: of the computation.
        optimizer: None for an engine that only scores: no gradients, no states, nothing kept for backward.
        tokens_per_mb: tokens of the largest micro-batch.
        recompute: only the inputs of layers are kept, and one layer's activations at a time.
        kv_cache_tokens: tokens that the inference engine caches; 0 for none.
    """
    size, width = count_parameters(config), COMPUTE_BYTES[dtype]
    trains = optimizer is not None
    copy = 0 if dtype == "float32" else size * width
    logits = logit_bytes(tokens_per_mb, config.vocab_size, width, default_device(), backward=trains)
    head, head_input = config.vocab_size * config.hidden_size, tokens_per_mb * config.hidden_size
    return MemoryPlan(
        parameters=size * _FP32,
        gradients=size * _FP32 if trains else 0,
        optimizer=size * _FP32 * _OPTIMIZER_STATES[optimizer],
        compute_copy=copy,
        activations=tokens_per_mb * activation_bytes_per_token(config, width, recompute) if trains else 0,
        lm_head=logits + (width * (head + head_input) + _FP32 * head_input if trains else 0),
        engine_weights=size * width if kv_cache_tokens else 0,
        staged_weights=size * width if kv_cache_tokens else 0,
        kv_cache=kv_cache_tokens * kv_bytes_per_token(config, width),
    )


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the decoder, a tied head counted once; nothing is allocated."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())


def kv_bytes_per_token(config: ModelConfig, width: int) -> int:
    """Bytes of keys and values of one token over all layers, with ``width`` bytes a number."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * width


def activation_bytes_per_token(config: ModelConfig, width: int, recompute: bool) -> int:
    """Bytes kept for backward per token of a micro-batch, with ``width`` bytes a number."""
    layers = [layer_activation_bytes(config, width, index) for index in range(config.num_hidden_layers)]
    hidden = config.hidden_size
    head = norm_activation_bytes(hidden, width) + hidden * width  # the final norm, and the rows chosen for the head
    return (len(layers) * hidden * width + max(layers) if recompute else sum(layers)) + head
