"""Rows of tokens sorted by expert, and their weighted sum back in token order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archon_kernels.dispatch import choose


@dataclass(frozen=True, eq=False)
class ExpertOrder:
    """Where each of the T x K (token, choice) pairs lies after a stable sort by expert.

    Attributes:
        source: ``[T*K]`` int64, pair ``t * K + k`` that sorted row i comes from.
        position: ``[T*K]`` int64, sorted row of each pair; the inverse of ``source``.
        counts: ``[E]`` int64 rows per expert, zeros included.
        top_k: K.
    """

    source: Tensor
    position: Tensor
    counts: Tensor
    top_k: int


def sort_by_expert(indices_TK: Tensor, num_experts: int) -> ExpertOrder:
    """Order the (token, choice) pairs by expert, pairs of one expert by token. No host synchronisation.

    Args:
        indices_TK: ``[T, K]`` int64 in [0, num_experts); T may be 0.
    """
    experts = indices_TK.flatten()
    source = experts.argsort(stable=True)
    position = torch.empty_like(source)
    position[source] = torch.arange(source.shape[0], device=source.device)
    counts = torch.zeros(num_experts, dtype=torch.long, device=experts.device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    return ExpertOrder(source, position, counts, indices_TK.shape[1])


def permute(hidden_TD: Tensor, order: ExpertOrder) -> Tensor:
    """Copy each token's row to the places of its K choices: ``[T, D] -> [T*K, D]``, any float dtype.

    Backward gathers and sums the K rows of each token, so it is deterministic and needs no atomics.
    """
    return choose({"reference": _Permute}).apply(hidden_TD, order)


def combine(rows_ND: Tensor, weights_TK: Tensor, order: ExpertOrder) -> Tensor:
    """Sum each token's K expert outputs, each times its weight.

    Args:
        rows_ND: ``[T*K, D]`` expert outputs in sorted order, any float dtype.
        weights_TK: ``[T, K]``; products and sums run in the wider of its dtype and that of the rows.

    Returns:
        ``[T, D]`` in the dtype of the rows, differentiable in rows and weights.
    """
    return choose({"reference": _Combine}).apply(rows_ND, weights_TK, order)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, order: ExpertOrder) -> Tensor:
        ctx.order = order
        return hidden_TD.index_select(0, order.source // order.top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_ND,) = grads
        grad_ND = grad_ND.index_select(0, ctx.order.position)
        top_k = ctx.order.top_k
        return grad_ND if top_k == 1 else grad_ND.unflatten(0, (-1, top_k)).sum(1), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, weights_TK: Tensor, order: ExpertOrder) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(rows_ND, weights_TK)
        rows_TKD = rows_ND.index_select(0, order.position).unflatten(0, weights_TK.shape)
        return (rows_TKD * weights_TK.unsqueeze(-1)).sum(1).to(rows_ND.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad_TD,) = grads
        rows_ND, weights_TK = ctx.saved_tensors
        order = ctx.order
        grad_ND = grad_TD.index_select(0, order.source // order.top_k)
        dots = (rows_ND.to(weights_TK.dtype) * grad_ND).sum(-1)
        grad_weights = dots.index_select(0, order.position).view_as(weights_TK)
        scale = weights_TK.flatten().index_select(0, order.source).unsqueeze(-1)
        return (grad_ND * scale).to(rows_ND.dtype), grad_weights.to(weights_TK.dtype), None
