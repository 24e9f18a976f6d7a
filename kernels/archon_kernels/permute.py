"""Rows of tokens sorted by expert, and their weighted sum back in token order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archon_kernels.dispatch import choose, implementations
from archon_kernels.dtypes import check_choices, wide_dtype


@dataclass(frozen=True, eq=False)
class ExpertOrder:
    """Where each of the T x K (token, choice) pairs lies after a stable sort by expert, N rows in all.

    Attributes:
        source: ``[N]`` int64, pair ``t * K + k`` that sorted row i comes from; -1 for filler.
        position: ``[T*K]`` int64, sorted row of each pair; without filler the inverse of ``source``.
        counts: ``[E]`` int64 rows per expert, zeros and filler up to the next tile included.
        top_k: K.
    """

    source: Tensor
    position: Tensor
    counts: Tensor
    top_k: int


def sort_by_expert(indices_TK: Tensor, num_experts: int, tile: int = 1) -> ExpertOrder:
    """Order the (token, choice) pairs by expert, pairs of one expert by token. No host synchronisation.

    With a tile above 1, each expert's rows start at a multiple of it and filler rows lie between them. Nobody on the
    host knows how many are needed, so there are as many as could be: ``N = padded_rows(T*K, E, tile)``, and those
    after the last expert belong to none.

    Args:
        indices_TK: ``[T, K]`` int64 in [0, num_experts); T may be 0.
        tile: rows that the start of each expert is a multiple of.

    Raises:
        ValueError: choices that are not int64, no choices per token, or a tile below 1.
    """
    check_choices(indices_TK)
    if indices_TK.shape[1] < 1 or tile < 1:
        raise ValueError(f"{indices_TK.shape[1]} choices per token in tiles of {tile} rows: both are at least 1")
    source, position, counts = _sort_by_expert(indices_TK, num_experts, tile)
    return ExpertOrder(source, position, counts, top_k=indices_TK.shape[1])


def padded_rows(pairs: int, num_experts: int, tile: int) -> int:
    """Rows that suffice for ``pairs`` rows whatever their experts, a multiple of ``tile``."""
    return -(-(pairs + num_experts * (tile - 1)) // tile) * tile


def permute(hidden_TD: Tensor, order: ExpertOrder) -> Tensor:
    """Copy each token's row to the places of its K choices: ``[T, D] -> [N, D]``, any float dtype; filler is 0.

    Backward gathers and sums the K rows of each token, in fp32 or better, so it is deterministic and needs no atomics.
    """
    return _permute(hidden_TD, order.source, order.position, order.top_k)


def combine(rows_ND: Tensor, weights_TK: Tensor, order: ExpertOrder) -> Tensor:
    """Sum each token's K expert outputs, each times its weight.

    Args:
        rows_ND: ``[N, D]`` expert outputs in sorted order, any float dtype; filler is not read and gets gradient 0.
        weights_TK: ``[T, K]``, any float dtype; products and sums run in fp32, or in fp64 if the rows are fp64.

    Returns:
        ``[T, D]`` in the dtype of the rows, differentiable in rows and weights.
    """
    return _combine(rows_ND, weights_TK, order.source, order.position)


def _reference_sort(indices_TK: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    experts = indices_TK.flatten()
    counts = torch.zeros(num_experts, dtype=torch.long, device=experts.device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    padded = (counts + tile - 1) // tile * tile
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    pairs_in_order = experts.argsort(stable=True)
    rows = torch.arange(experts.shape[0], device=experts.device) + shift[experts[pairs_in_order]]
    position = torch.empty_like(experts)
    position[pairs_in_order] = rows
    source = experts.new_full((padded_rows(experts.shape[0], num_experts, tile),), -1)
    source[rows] = pairs_in_order
    return source, position, padded


def _reference_permute(hidden_TD: Tensor, source: Tensor, top_k: int) -> Tensor:
    if hidden_TD.shape[0] == 0:
        return hidden_TD.new_zeros(source.shape[0], hidden_TD.shape[1])
    rows_ND = hidden_TD.index_select(0, source.clamp(min=0) // top_k)
    return rows_ND.masked_fill_((source < 0).unsqueeze(-1), 0)


def _reference_permute_backward(grad_ND: Tensor, position: Tensor, top_k: int) -> Tensor:
    grad_TKD = grad_ND.index_select(0, position).unflatten(0, (-1, top_k))
    return grad_TKD.sum(1, dtype=wide_dtype(grad_ND)).to(grad_ND.dtype)


def _reference_combine(rows_ND: Tensor, weights_TK: Tensor, position: Tensor) -> Tensor:
    rows_TKD = rows_ND.index_select(0, position).unflatten(0, weights_TK.shape)
    return (rows_TKD * weights_TK.to(wide_dtype(rows_ND)).unsqueeze(-1)).sum(1).to(rows_ND.dtype)


def _reference_combine_backward(
    grad_TD: Tensor, rows_ND: Tensor, weights_TK: Tensor, source: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(rows_ND)
    grad_TKD = grad_TD.to(wide).unsqueeze(1).expand(-1, weights_TK.shape[1], -1)
    grad_weights = (rows_ND.index_select(0, position).unflatten(0, weights_TK.shape).to(wide) * grad_TKD).sum(-1)
    grad_rows = rows_ND.new_zeros(rows_ND.shape)
    grad_rows[position] = (grad_TKD * weights_TK.to(wide).unsqueeze(-1)).flatten(0, 1).to(rows_ND.dtype)
    return grad_rows, grad_weights.to(weights_TK.dtype)


_SORT = implementations(_reference_sort, cpp="sort_by_expert", triton="permute.sort_by_expert")
_PERMUTE = implementations(_reference_permute, cpp="permute", triton="permute.permute")
_PERMUTE_BACKWARD = implementations(
    _reference_permute_backward, cpp="permute_backward", triton="permute.permute_backward"
)
_COMBINE = implementations(_reference_combine, cpp="combine", triton="permute.combine")
_COMBINE_BACKWARD = implementations(
    _reference_combine_backward, cpp="combine_backward", triton="permute.combine_backward"
)


@torch.library.custom_op("archon::sort_by_expert", mutates_args=())
def _sort_by_expert(indices_TK: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    return choose(_SORT, indices_TK.device)(indices_TK, num_experts, tile)


@_sort_by_expert.register_fake
def _(indices_TK: Tensor, num_experts: int, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    pairs = indices_TK.numel()
    rows = padded_rows(pairs, num_experts, tile)
    return indices_TK.new_empty(rows), indices_TK.new_empty(pairs), indices_TK.new_empty(num_experts)


@torch.library.custom_op("archon::permute", mutates_args=())
def _permute(hidden_TD: Tensor, source: Tensor, position: Tensor, top_k: int) -> Tensor:
    return choose(_PERMUTE, hidden_TD.device)(hidden_TD, source, top_k)


@_permute.register_fake
def _(hidden_TD: Tensor, source: Tensor, position: Tensor, top_k: int) -> Tensor:
    return hidden_TD.new_empty(source.shape[0], hidden_TD.shape[1])


@torch.library.custom_op("archon::permute_backward", mutates_args=())
def _permute_backward(grad_ND: Tensor, position: Tensor, top_k: int) -> Tensor:
    return choose(_PERMUTE_BACKWARD, grad_ND.device)(grad_ND, position, top_k)


@_permute_backward.register_fake
def _(grad_ND: Tensor, position: Tensor, top_k: int) -> Tensor:
    return grad_ND.new_empty(position.shape[0] // top_k, grad_ND.shape[1])


def _save_permute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, position, ctx.top_k = inputs
    ctx.save_for_backward(position)


def _grad_permute(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
    return _permute_backward(grad_ND, *ctx.saved_tensors, ctx.top_k), None, None, None


_permute.register_autograd(_grad_permute, setup_context=_save_permute)


@torch.library.custom_op("archon::combine", mutates_args=())
def _combine(rows_ND: Tensor, weights_TK: Tensor, source: Tensor, position: Tensor) -> Tensor:
    return choose(_COMBINE, rows_ND.device)(rows_ND, weights_TK, position)


@_combine.register_fake
def _(rows_ND: Tensor, weights_TK: Tensor, source: Tensor, position: Tensor) -> Tensor:
    return rows_ND.new_empty(weights_TK.shape[0], rows_ND.shape[1])


@torch.library.custom_op("archon::combine_backward", mutates_args=())
def _combine_backward(
    grad_TD: Tensor, rows_ND: Tensor, weights_TK: Tensor, source: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    return choose(_COMBINE_BACKWARD, rows_ND.device)(grad_TD, rows_ND, weights_TK, source, position)


@_combine_backward.register_fake
def _(grad_TD: Tensor, rows_ND: Tensor, weights_TK: Tensor, source: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    return rows_ND.new_empty(rows_ND.shape), weights_TK.new_empty(weights_TK.shape)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grad_combine(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *_combine_backward(grad_TD, *ctx.saved_tensors), None, None


_combine.register_autograd(_grad_combine, setup_context=_save_combine)
