"""RMS normalisation (arXiv 1910.07467)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from archon_kernels.dispatch import choose, implementations
from archon_kernels.dtypes import wide_dtype


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension; computed in fp32 or better, rounded once.

    On the CPU, backward keeps the input and one number per row; elsewhere this is torch's own, which has kernels.

    Args:
        x: ``[..., D]`` fp32, bf16, fp16 or fp64.
        weight_D: ``[D]`` any float dtype, rounded to that of x.

    Returns:
        ``[..., D]`` in the dtype of x, differentiable in both.

    Raises:
        ValueError: a weight of another width than x.
    """
    if weight_D.shape != x.shape[-1:]:
        raise ValueError(f"a weight of shape {tuple(weight_D.shape)} cannot scale rows of {tuple(x.shape[-1:])}")
    if x.device.type != "cpu":
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    return _rms_norm(x.reshape(-1, x.shape[-1]), weight_D, eps)[0].view(x.shape)


def _reference(x_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x_ND.to(wide_dtype(x_ND))
    scale = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * scale.unsqueeze(-1) * weight_D.to(x_ND.dtype).to(wide.dtype)).to(x_ND.dtype), scale


def _reference_backward(grad_ND: Tensor, x_ND: Tensor, weight_D: Tensor, scale_N: Tensor) -> tuple[Tensor, Tensor]:
    grad, scale = grad_ND.to(scale_N.dtype), scale_N.unsqueeze(-1)
    normal = x_ND.to(scale_N.dtype) * scale
    pull = grad * weight_D.to(x_ND.dtype).to(scale_N.dtype)
    grad_x = scale * (pull - normal * (pull * normal).mean(-1, keepdim=True))
    return grad_x.to(x_ND.dtype), (grad * normal).sum(0).to(weight_D.dtype)


_FORWARD = implementations(_reference, cpp="rms_norm")
_BACKWARD = implementations(_reference_backward, cpp="rms_norm_backward")


@torch.library.custom_op("archon::rms_norm", mutates_args=())
def _rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return choose(_FORWARD, x_ND.device)(x_ND, weight_D, eps)


@_rms_norm.register_fake
def _(x_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x_ND.new_empty(x_ND.shape), x_ND.new_empty(x_ND.shape[0], dtype=wide_dtype(x_ND))


@torch.library.custom_op("archon::rms_norm_backward", mutates_args=())
def _rms_norm_backward(grad_ND: Tensor, x_ND: Tensor, weight_D: Tensor, scale_N: Tensor) -> tuple[Tensor, Tensor]:
    return choose(_BACKWARD, x_ND.device)(grad_ND, x_ND, weight_D, scale_N)


@_rms_norm_backward.register_fake
def _(grad_ND: Tensor, x_ND: Tensor, weight_D: Tensor, scale_N: Tensor) -> tuple[Tensor, Tensor]:
    return x_ND.new_empty(x_ND.shape), weight_D.new_empty(weight_D.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_ND, weight_D, _ = inputs
    ctx.save_for_backward(x_ND, weight_D, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, grad_ND: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, None]:
    if grad_ND is None:
        return None, None, None
    return *_rms_norm_backward(grad_ND, *ctx.saved_tensors), None


_rms_norm.register_autograd(_grad, setup_context=_save)
