"""Tensor and expert-tensor parallelism: how each parameter is split, and computing with this rank's piece of it.

Between blocks a rank holds the rows of its own tokens only (sequence parallel, arXiv 2205.05198). A block gathers the
tokens of all tensor ranks, computes with its columns of the first weights (``q_proj``, ``gate_proj``) and its rows of
the last (``o_proj``, ``down_proj``), and the sum over ranks is scattered back by tokens.

Parameters are DTensors, so that storage, checkpoints and exports know the whole; arithmetic sees plain local tensors.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from archon.mesh import Ranks
from archon.models.config import ModelConfig
from archon.parallel.collectives import scatter_tokens

_ROWS = re.compile(r".*(embed_tokens|lm_head|q_proj|gate_proj|up_proj)\.(weight|bias)")
_KEY_VALUE = re.compile(r".*(k_proj|v_proj)\.(weight|bias)")
_COLUMNS = re.compile(r".*(o_proj|down_proj)\.weight")
_EXPERTS = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


def local(parameter: Tensor) -> Tensor:
    """This rank's piece of a parameter, for arithmetic.

    Where every tensor rank holds the whole parameter (norms, the router), each of them sees other tokens, so the
    gradients are summed over these ranks.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    gradients = [Partial() if placement.is_replicate() else placement for placement in parameter.placements]
    return parameter.to_local(grad_placements=gradients)


def row_linear(linear: nn.Linear, x: Tensor, ranks: Ranks) -> Tensor:
    """Sum over tensor ranks of their columns' products, scattered by tokens: ``[T, I/t] -> [T/t, O]``.

    The bias is added after the sum, once.
    """
    bias = linear.bias
    if ranks.tensor is None:
        return F.linear(x, local(linear.weight), None if bias is None else local(bias))
    out = scatter_tokens(F.linear(x, local(linear.weight)), ranks.tensor)
    return out if bias is None else out + local(bias)


class ColumnLinear(nn.Linear):
    """A linear layer of which each tensor rank computes its consecutive part of the output: ``[T, I] -> [T, O/t]``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, local(self.weight), None if self.bias is None else local(self.bias))


def placements(name: str, config: ModelConfig, ranks: Ranks) -> tuple[Placement, ...]:
    """How a dense parameter lies on the tensor mesh, or an expert's on the (expert, expert tensor) mesh."""
    if _EXPERTS.fullmatch(name):
        # F is dimension 2 of both: gate_up_proj [E, 2, F, D], down_proj [E, D, F]
        return (Shard(0), Shard(2)) if ranks.layout.expert_tensor > 1 else (Shard(0), Replicate())
    if _KEY_VALUE.fullmatch(name):
        # Fewer heads than ranks: all hold them all, and read the one that their queries attend to.
        return (Replicate(),) if config.num_key_value_heads % ranks.layout.tensor else (Shard(0),)
    if _ROWS.fullmatch(name):
        return (Shard(0),)
    return (Shard(1),) if _COLUMNS.fullmatch(name) else (Replicate(),)


def distribute_parameters(model: nn.Module, config: ModelConfig, ranks: Ranks) -> None:
    """Make each parameter of a model on the meta device a DTensor of the tensor mesh, or of the expert mesh."""
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            full_name = f"{prefix}.{name}"
            mesh = ranks.expert_mesh if _EXPERTS.fullmatch(full_name) else ranks.tensor_mesh
            if mesh is None:
                continue
            where = placements(full_name, config, ranks)
            shared = distribute_tensor(parameter.detach(), mesh, where, src_data_rank=None)
            module.register_parameter(name, nn.Parameter(shared))


@torch.no_grad()
def assign(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's piece of ``whole`` (any dtype and device) into a parameter. No communication."""
    assign_block(parameter, whole.view(parameter.shape), [0] * parameter.ndim)


@torch.no_grad()
def assign_block(parameter: Tensor, block: Tensor, offsets: Sequence[int]) -> None:
    """Copy into a parameter what this rank holds of ``block``, which lies at ``offsets`` in the whole."""
    held, start = parameter.detach(), torch.Size([0] * parameter.ndim)
    if isinstance(parameter, DTensor):
        (chunk,) = parameter.__create_chunk_list__()
        held, start = parameter.to_local(), chunk.offsets
    here, there = [], []
    for begin, size, offset, length in zip(start, held.shape, offsets, block.shape, strict=True):
        first, end = max(begin, offset), min(begin + size, offset + length)
        if first >= end:
            return
        here.append(slice(first - begin, end - begin))
        there.append(slice(first - offset, end - offset))
    held[tuple(here)].copy_(block[tuple(there)])
