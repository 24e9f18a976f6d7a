"""Data parallelism: ``fully_shard`` over data and context ranks, with gradients summed and never averaged."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
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
    }
    reshards = _reshards(ranks, options)
    if options.offload_params:
        arguments["offload_policy"] = CPUOffloadPolicy()
    for layer in model.model.layers.values():
        if ranks.expert_shards is not None and isinstance(layer.mlp, MoE):
            where = partial(_expert_sharding, layer.mlp.experts, ranks.layout)
            _shard(layer.mlp.experts, ranks.expert_shards, reshards, shard_placement_fn=where, **arguments)
        _shard(layer, ranks.shards, reshards, **arguments)
    # The head is used at the end of forward and at the start of backward: freeing it in between saves nothing.
    _shard(model, ranks.shards, options.reshard_after_forward == "always", **arguments)


def _shard(module: nn.Module, mesh: DeviceMesh | None, reshards: bool, **arguments: Any) -> None:
    sharded = fully_shard(module, mesh=mesh, reshard_after_forward=reshards, **arguments)
    # The engine divides the loss by a count over all ranks, so gradients are summed.
    sharded.set_force_sum_reduction_for_comms(True)
    if mesh is not None and mesh.size() > 1:  # over one rank torch divides by 1 itself, or copies to divide by ours
        sharded.set_gradient_divide_factor(1.0)


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
