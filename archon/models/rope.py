"""Rotary position embeddings (arXiv 2104.09864), in the half-split layout of Hugging Face models."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from archon.models.config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int, device: torch.device | None = None) -> Tensor:
    """``[head_dim / 2]`` fp32 radians per position, with linear or Llama 3.1 scaling applied."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, inverse)
    return inverse


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Divide long waves by ``factor``, keep short ones, and interpolate in between."""
    turns = rope.original_max_position_embeddings * inverse / (2 * math.pi)  # over the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * inverse / rope.factor + smooth * inverse


def cos_sin(rope: RopeConfig, head_dim: int, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Tables ``[T, 1, head_dim]`` fp32 for ``rotate``, of ``position_ids [T]``, to broadcast over heads."""
    angles = position_ids[:, None, None].float() * frequencies(rope, head_dim, position_ids.device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def rotate(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of every head by the angles of its position.

    Args:
        x_THd: ``[T, H, d]`` any float dtype; computed in fp32.
        cos, sin: ``[T, 1, d]`` fp32 tables of ``cos_sin``, without gradient.

    Returns:
        ``[T, H, d]`` in the dtype of x.
    """
    return _Rotate.apply(x_THd, cos, sin)


class _Rotate(torch.autograd.Function):
    """A rotation is linear: backward rotates the other way and needs no activation."""

    @staticmethod
    def forward(ctx: Any, x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x_THd, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, -sin), None, None


def _turn(x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    swapped = x_THd.roll(x_THd.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_THd * cos, swapped, sin).to(x_THd.dtype)
