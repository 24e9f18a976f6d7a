"""Collectives with a backward, over the first dimension (tokens) of a tensor. A group of None changes nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 renamed these two, and warns of the names that earlier versions have.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_tokens(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """``[S, ...] -> [n*S, ...]``: the rows of all n ranks. Backward sums each row's gradient over the ranks."""
    return x if group is None else _GatherTokens.apply(x, group)


def scatter_tokens(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """``[n*S, ...] -> [S, ...]``: this rank's rows of the sum over the n ranks. Backward gathers."""
    return x if group is None else _ScatterTokens.apply(x, group)


def exchange_rows(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup | None) -> Tensor:
    """``[sum(sent), ...] -> [sum(received), ...]``: the first ``sent[0]`` rows go to rank 0 of the group, and so on.

    Any count may be 0. Backward sends the gradients the other way.
    """
    return x if group is None else _ExchangeRows.apply(x, received, sent, group)


def gather_outputs(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """``[S, ...] -> [n*S, ...]`` for a loss that every rank computes alike: backward takes this rank's rows."""
    return x if group is None else _GatherOutputs.apply(x, group)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grads[0], ctx.group), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grads[0], ctx.group), None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _all_to_all(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.sent, ctx.received, ctx.group), None, None, None


class _GatherOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.rank, ctx.rows = group.rank(), x.shape[0]
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(0, ctx.rank * ctx.rows, ctx.rows).contiguous(), None


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    gathered = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    _all_gather_single(gathered, x.contiguous(), group=group)
    return gathered


def _reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    scattered = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _reduce_scatter_single(scattered, x.contiguous(), group=group)
    return scattered


def _all_to_all(x: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    arrived = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(arrived, x.contiguous(), received, sent, group=group)
    return arrived
