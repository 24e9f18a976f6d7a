"""Rotary position embeddings (arXiv 2104.09864), in the half-split layout of Hugging Face models."""

from __future__ import annotations

import math

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
    """Tables ``[T, 1, head_dim]`` fp32 of ``position_ids [T]``, for ``archon_kernels.rope.rotate``."""
    angles = position_ids[:, None, None].float() * frequencies(rope, head_dim, position_ids.device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
