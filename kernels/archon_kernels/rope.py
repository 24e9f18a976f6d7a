"""Rotation of queries and keys by their positions (arXiv 2104.09864), in the half-split layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from archon_kernels.dispatch import choose, implementations


def rotate(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of every head by the angles of its position.

    A rotation is linear: backward rotates the other way and needs no activation.

    Args:
        x_THd: ``[T, H, d]`` fp32, bf16, fp16 or fp64, d even; computed in fp32 or better.
        cos_T1d: ``[T, 1, d]`` fp32, both halves of the last dimension alike, without gradient.
        sin_T1d: likewise, with the first half negated.

    Returns:
        ``[T, H, d]`` in the dtype of x.
    """
    return _rotate(x_THd, cos_T1d, sin_T1d, False)


def _reference(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor, inverse: bool) -> Tensor:
    swapped = x_THd.roll(x_THd.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_THd * cos_T1d, swapped, -sin_T1d if inverse else sin_T1d).to(x_THd.dtype)


_ROTATE = implementations(_reference, cpp="rotate")


@torch.library.custom_op("archon::rotate", mutates_args=())
def _rotate(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor, inverse: bool) -> Tensor:
    return choose(_ROTATE, x_THd.device)(x_THd, cos_T1d, sin_T1d, inverse)


@_rotate.register_fake
def _(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor, inverse: bool) -> Tensor:
    return x_THd.new_empty(x_THd.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos_T1d, sin_T1d, ctx.inverse = inputs
    ctx.save_for_backward(cos_T1d, sin_T1d)


def _grad(ctx: Any, grad_THd: Tensor) -> tuple[Tensor, None, None, None]:
    return _rotate(grad_THd, *ctx.saved_tensors, not ctx.inverse), None, None, None


_rotate.register_autograd(_grad, setup_context=_save)
