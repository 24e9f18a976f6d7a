"""Matrix product of each expert's rows with that expert's weight, alone or with SwiGLU behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from archon_kernels.dispatch import choose, implementations
from archon_kernels.dtypes import autocast_operands, wide_dtype

_NATIVE_DTYPES = (torch.float32, torch.bfloat16)
_NATIVE_ALIGNMENT = 16  # bytes that every stride must be a multiple of


def grouped_linear(rows_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    """``rows @ weight[e].T`` for the rows of each expert e, differentiable in rows and weight.

    Sums run in fp32 or better. Under autocast the operands are cast to its dtype.

    Args:
        rows_ND: ``[N, D]`` sorted by expert, fp32, bf16, fp16 or fp64; N may be 0.
        weight_EFD: ``[E, F, D]``, same dtype.
        counts_E: ``[E]`` int64 rows of each expert, at most N in all; zeros are allowed.

    Returns:
        ``[N, F]`` in the dtype of the rows; 0 in rows beyond the counts, which get gradient 0.
    """
    return _grouped_linear(*autocast_operands(rows_ND, weight_EFD), counts_E)


def grouped_swiglu(rows_ND: Tensor, gate_up_EFD: Tensor, counts_E: Tensor) -> Tensor:
    """``silu(rows @ gate[e].T) * (rows @ up[e].T)`` for the rows of each expert e, differentiable in rows and weight.

    The products are rounded to the dtype of the rows and kept for backward; silu and its derivative run in fp32 or
    better on them. Otherwise as ``grouped_linear``.

    Args:
        rows_ND: ``[N, D]`` sorted by expert, fp32, bf16, fp16 or fp64; N may be 0.
        gate_up_EFD: ``[E, 2F, D]``, gate first, same dtype.
        counts_E: ``[E]`` int64 rows of each expert, at most N in all; zeros are allowed.

    Returns:
        ``[N, F]`` in the dtype of the rows; 0 in rows beyond the counts, which get gradient 0.
    """
    return _grouped_swiglu(*autocast_operands(rows_ND, gate_up_EFD), counts_E)[0]


def _reference_linear(rows_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    return _products(rows_ND, weight_EFD.transpose(1, 2), counts_E)


def _reference_grad_rows(grad_NF: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    return _products(grad_NF, weight_EFD, counts_E)


def _products(rows_NI: Tensor, weight_EIO: Tensor, counts_E: Tensor) -> Tensor:
    if _native(rows_NI, weight_EIO.shape[1], weight_EIO.shape[2]):
        out = F.grouped_mm(rows_NI, weight_EIO, offs=counts_E.cumsum(0).to(torch.int32))
        beyond = torch.arange(rows_NI.shape[0], device=rows_NI.device) >= counts_E.sum()
        return out.masked_fill_(beyond.unsqueeze(-1), 0)
    out = rows_NI.new_zeros(rows_NI.shape[0], weight_EIO.shape[2])
    for expert, rows in _slices(counts_E):
        torch.mm(rows_NI[rows], weight_EIO[expert], out=out[rows])
    return out


def _reference_grad_weight(grad_NF: Tensor, rows_ND: Tensor, counts_E: Tensor) -> Tensor:
    if _native(rows_ND, grad_NF.shape[1], rows_ND.shape[1]):
        return F.grouped_mm(grad_NF.t(), rows_ND, offs=counts_E.cumsum(0).to(torch.int32))
    out = rows_ND.new_zeros(counts_E.shape[0], grad_NF.shape[1], rows_ND.shape[1])
    for expert, rows in _slices(counts_E):
        torch.mm(grad_NF[rows].t(), rows_ND[rows], out=out[expert])
    return out


def _native(rows: Tensor, *widths: int) -> bool:
    """Whether torch's own grouped product takes these rows and a weight of these widths."""
    aligned = all(width * rows.element_size() % _NATIVE_ALIGNMENT == 0 for width in widths)
    return aligned and rows.dtype in _NATIVE_DTYPES and rows.shape[0] > 0


def _slices(counts_E: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, count in enumerate(counts_E.tolist()):
        yield expert, slice(start, start + count)
        start += count


def _reference_swiglu(rows_ND: Tensor, gate_up_EFD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    product_NF = _reference_linear(rows_ND, gate_up_EFD, counts_E)
    gate, up = product_NF.to(wide_dtype(product_NF)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(rows_ND.dtype), product_NF


def _reference_swiglu_backward(grad_NF: Tensor, product_NF: Tensor) -> Tensor:
    wide = wide_dtype(product_NF)
    gate, up = product_NF.to(wide).chunk(2, dim=-1)
    grad, sigmoid = grad_NF.to(wide), gate.sigmoid()
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([grad_gate, grad * gate * sigmoid], dim=-1).to(product_NF.dtype)


_LINEAR = implementations(_reference_linear, cpp="grouped_linear", triton="grouped_mm.grouped_linear")
_GRAD_ROWS = implementations(
    _reference_grad_rows, cpp="grouped_linear_grad_rows", triton="grouped_mm.grouped_linear_grad_rows"
)
_GRAD_WEIGHT = implementations(
    _reference_grad_weight, cpp="grouped_linear_grad_weight", triton="grouped_mm.grouped_linear_grad_weight"
)
_SWIGLU = implementations(_reference_swiglu, cpp="grouped_swiglu", triton="grouped_mm.grouped_swiglu")
_SWIGLU_BACKWARD = implementations(
    _reference_swiglu_backward, cpp="swiglu_backward", triton="grouped_mm.swiglu_backward"
)


def _choose(table: dict[str, Callable[..., Any]], x: Tensor) -> Callable[..., Any]:
    """Triton multiplies no fp64 matrices."""
    if x.dtype == torch.float64:
        table = {name: run for name, run in table.items() if name != "triton"}
    return choose(table, x.device)


@torch.library.custom_op("archon::grouped_linear", mutates_args=())
def _grouped_linear(rows_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    return _choose(_LINEAR, rows_ND)(rows_ND.contiguous(), weight_EFD.contiguous(), counts_E)


@_grouped_linear.register_fake
def _(rows_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    return rows_ND.new_empty(rows_ND.shape[0], weight_EFD.shape[1])


@torch.library.custom_op("archon::grouped_linear_grad_rows", mutates_args=())
def _grad_rows(grad_NF: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    return _choose(_GRAD_ROWS, grad_NF)(grad_NF.contiguous(), weight_EFD.contiguous(), counts_E)


@_grad_rows.register_fake
def _(grad_NF: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    return grad_NF.new_empty(grad_NF.shape[0], weight_EFD.shape[2])


@torch.library.custom_op("archon::grouped_linear_grad_weight", mutates_args=())
def _grad_weight(grad_NF: Tensor, rows_ND: Tensor, counts_E: Tensor) -> Tensor:
    return _choose(_GRAD_WEIGHT, rows_ND)(grad_NF.contiguous(), rows_ND.contiguous(), counts_E)


@_grad_weight.register_fake
def _(grad_NF: Tensor, rows_ND: Tensor, counts_E: Tensor) -> Tensor:
    return rows_ND.new_empty(counts_E.shape[0], grad_NF.shape[1], rows_ND.shape[1])


def _save_linear(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grad_linear(ctx: Any, grad_NF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows_ND, weight_EFD, counts_E = ctx.saved_tensors
    return *_grads(ctx.needs_input_grad, grad_NF, rows_ND, weight_EFD, counts_E), None


def _grads(
    needed: tuple[bool, ...], grad_NF: Tensor, rows_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    grad_rows = _grad_rows(grad_NF, weight_EFD, counts_E) if needed[0] else None
    return grad_rows, _grad_weight(grad_NF, rows_ND, counts_E) if needed[1] else None


_grouped_linear.register_autograd(_grad_linear, setup_context=_save_linear)


@torch.library.custom_op("archon::grouped_swiglu", mutates_args=())
def _grouped_swiglu(rows_ND: Tensor, gate_up_EFD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    return _choose(_SWIGLU, rows_ND)(rows_ND.contiguous(), gate_up_EFD.contiguous(), counts_E)


@_grouped_swiglu.register_fake
def _(rows_ND: Tensor, gate_up_EFD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
    rows, inner = rows_ND.shape[0], gate_up_EFD.shape[1]
    return rows_ND.new_empty(rows, inner // 2), rows_ND.new_empty(rows, inner)


@torch.library.custom_op("archon::swiglu_backward", mutates_args=())
def _swiglu_backward(grad_NF: Tensor, product_NF: Tensor) -> Tensor:
    return _choose(_SWIGLU_BACKWARD, product_NF)(grad_NF.contiguous(), product_NF)


@_swiglu_backward.register_fake
def _(grad_NF: Tensor, product_NF: Tensor) -> Tensor:
    return torch.empty_like(product_NF)


def _save_swiglu(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.set_materialize_grads(False)  # the product is kept for backward, and nobody else reads it


def _grad_swiglu(
    ctx: Any, grad_NF: Tensor | None, extra_NF: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None]:
    rows_ND, gate_up_EFD, counts_E, product_NF = ctx.saved_tensors
    grads = [] if grad_NF is None else [_swiglu_backward(grad_NF, product_NF)]
    grads += [] if extra_NF is None else [extra_NF]
    if not grads:
        return None, None, None
    return *_grads(ctx.needs_input_grad, sum(grads[1:], grads[0]), rows_ND, gate_up_EFD, counts_E), None


_grouped_swiglu.register_autograd(_grad_swiglu, setup_context=_save_swiglu)
