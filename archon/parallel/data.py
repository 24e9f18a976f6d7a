"""Data parallelism: ``fully_shard`` over data and context ranks, with gradients summed and never averaged."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from archon.layout import Layout
from archon.mesh import Ranks
from archon.models.decoder import Decoder
from archon.models.moe import Experts, MoE
from archon.options import Options


def shard_model(model: Decoder, ranks: Ranks, dtype: torch.dtype, options: Options) -> None:
    """Shard each layer, its experts apart from the rest, and then what is left.

    Parameters, gradients and their reduction are fp32; ``dtype`` is that of the gathered copy which computes. One fp32
    process needs none of this and is left alone.
    """
    if ranks.layout.world_size == 1 and dtype == torch.float32 and not options.offload_params:
        return
    arguments: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if dtype == torch.float32 else dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        "reshard_after_forward": _reshards(ranks, options),
    }
    if options.offload_params:
        arguments["offload_policy"] = CPUOffloadPolicy()
    for layer in model.model.layers.values():
        if ranks.expert_shards is not None and isinstance(layer.mlp, MoE):
            where = partial(_expert_sharding, layer.mlp.experts, ranks.layout)
            fully_shard(layer.mlp.experts, mesh=ranks.expert_shards, shard_placement_fn=where, **arguments)
        fully_shard(layer, mesh=ranks.shards, **arguments)
    fully_shard(model, mesh=ranks.shards, **arguments)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The engine divides the loss by a count over all ranks, so gradients are summed. Dividing by 1 and asking
            # for a sum says so at every mesh size.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _reshards(ranks: Ranks, options: Options) -> bool:
    if options.reshard_after_forward != "default":
        return options.reshard_after_forward == "always"
    # A pipeline would gather every layer again for every micro-batch; one rank has nothing to free.
    return ranks.layout.pipeline == 1 and ranks.shards is not None and ranks.shards.size() > 1


def _expert_sharding(experts: Experts, layout: Layout, parameter: nn.Parameter) -> Shard:
    """Along which dimension a stack of experts is sharded: experts if they divide evenly, else D, else experts."""
    if parameter.shape[0] // layout.expert % layout.expert_data == 0:
        return Shard(0)
    hidden = 1 if parameter is experts.down_proj else parameter.ndim - 1
    return Shard(hidden if parameter.shape[hidden] % layout.expert_data == 0 else 0)
