"""Activation recomputation: what a layer keeps for backward, and which layers compute it again instead."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from archon.models.config import ModelConfig
from archon.options import Options

_FP32 = 4
_KEPT_OPS = ("mm", "addmm", "bmm", "grouped_", "_grouped_mm", "_scaled_dot_product", "packed_attention")
"""Beginnings of the names of operations whose results selective recomputation keeps.

Collectives are not among them: they fill a buffer of their caller, so what they return cannot stand for running them.
"""

LayerPlan = dict[int, Literal["layer", "op"]]
"""By layer, what backward recomputes: all of it, or all but the results of the expensive operations."""


def plan_recompute(options: Options, config: ModelConfig) -> LayerPlan:
    """Which layers of a model recompute, of all layers, so that every pipeline stage agrees."""
    layers = range(config.num_hidden_layers)
    if options.ac_mode == "full":
        return dict.fromkeys(layers, "layer")
    if options.ac_mode == "selective":
        if options.selective_ac_option == "op":
            return dict.fromkeys(layers, "op")
        return dict.fromkeys(layers[:: options.selective_ac_option], "layer")
    if options.ac_mode == "memory_budget":
        return dict.fromkeys(_layers_over_budget(options.ac_memory_budget, config), "layer")
    return {}


def _layers_over_budget(budget: float, config: ModelConfig) -> list[int]:
    """The first layers, as many as must recompute for the rest to keep at most ``budget`` of all activations.

    Early layers, because theirs are held longest.
    """
    sizes = [layer_activation_bytes(config, _FP32, index) for index in range(config.num_hidden_layers)]
    kept, allowed = sum(sizes), budget * sum(sizes)
    chosen = []
    for index, size in enumerate(sizes):
        if kept <= allowed:
            break
        chosen.append(index)
        kept -= size
    return chosen


def run_layer(how: Literal["layer", "op"] | None, layer: nn.Module, *args: Any) -> Tensor:
    """Run a layer so that backward recomputes what ``how`` says; None keeps everything."""
    if how is None or not torch.is_grad_enabled():
        return layer(*args)
    contexts = partial(create_selective_checkpoint_contexts, _keep_expensive) if how == "op" else noop_context_fn
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _keep_expensive(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().partition("::")[2]
    return CheckpointPolicy.MUST_SAVE if name.startswith(_KEPT_OPS) else CheckpointPolicy.PREFER_RECOMPUTE


def norm_activation_bytes(size: int, width: int, rows: int = 1) -> int:
    """A norm keeps its input, of ``width`` bytes a number, and one fp32 number per row of it."""
    return width * size + _FP32 * rows


def layer_activation_bytes(config: ModelConfig, width: int, index: int) -> int:
    """What the operations of one layer save, in bytes per token, with ``width`` bytes a number."""
    hidden, moe = config.hidden_size, config.moe
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    queries, keys = heads * config.head_dim, kv_heads * config.head_dim
    size = 2 * norm_activation_bytes(hidden, width) + width * hidden  # both norms, and what the projections read
    size += width * (2 * queries + 2 * keys)  # q, k, v, and the output, which the projection reads
    size += _FP32 * heads  # log-sum-exp
    if config.qk_norm:
        size += norm_activation_bytes(queries + keys, width, heads + kv_heads)
    if moe is None or index not in moe.layers:
        return size + width * (hidden + 4 * config.intermediate_size)  # what it reads; gate, silu(gate), up, product
    size += _FP32 * (hidden + moe.num_experts)  # the router's input and scores
    # rows in and out; gate, up and their product; places, weights and choices
    return size + moe.experts_per_token * (width * (2 * hidden + 3 * moe.intermediate_size) + 3 * 8 + 2 * _FP32)
