"""Policy losses per token. Each takes packed 1-D tensors and returns its loss and what it clipped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 80.0
"""Bound of a log-ratio before ``exp``: an overflow to inf would turn the gradient of a clipped token into NaN."""


@dataclass(frozen=True)
class PolicyLoss:
    """All ``[T]`` and 0 or False outside the mask.

    Attributes:
        loss: with gradient.
        log_ratio: ``l - p``, without gradient.
        clipped: the clipped branch is the active one.
        dual_clipped: the bound ``c_clip`` is the active one.
    """

    loss: Tensor
    log_ratio: Tensor
    clipped: Tensor
    dual_clipped: Tensor


def log_ratios(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """``numerator - denominator`` in fp32 or better under the mask, 0 elsewhere, whatever hides there."""
    dtype = torch.promote_types(torch.promote_types(numerator.dtype, denominator.dtype), torch.float32)
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, numerator.to(dtype), zero) - torch.where(mask, denominator.to(dtype), zero)


def ppo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> PolicyLoss:
    """``max(-A r, -A clip(r, 1 - eps, 1 + eps_higher))`` with r = exp(l - p) (PPO, arXiv 1707.06347).

    Args:
        logprobs: ``[T]`` l, with gradient.
        proximal_logprobs: ``[T]`` p; its gradient is not taken.
        advantages: ``[T]`` A.
        mask: ``[T]`` bool; other entries are never read.
        eps_clip: lower width of the clipping interval.
        eps_clip_higher: upper width (DAPO's clip-higher), default ``eps_clip``.
        c_clip: for A < 0 the loss is at most ``c_clip * |A|`` (dual clip, arXiv 1912.09729); above 1.
    """
    log_ratio = log_ratios(logprobs, proximal_logprobs.detach(), mask)
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    advantage = torch.where(mask, advantages, 0.0).to(ratio.dtype)
    upper = 1.0 + (eps_clip if eps_clip_higher is None else eps_clip_higher)
    unbounded = -advantage * ratio
    bounded = -advantage * ratio.clamp(1.0 - eps_clip, upper)
    loss = torch.maximum(unbounded, bounded)
    dual_clipped = torch.zeros_like(mask)
    if c_clip is not None:
        ceiling = -advantage * c_clip
        dual_clipped = (advantage < 0) & (loss > ceiling)
        loss = torch.where(dual_clipped, ceiling, loss)
    return PolicyLoss(
        loss=torch.where(mask, loss, 0.0),
        log_ratio=log_ratio.detach(),
        clipped=mask & (bounded > unbounded),
        dual_clipped=dual_clipped,
    )
