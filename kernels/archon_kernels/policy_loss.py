"""Clipped policy loss of packed tokens, and the sums that its metrics are made of, in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archon_kernels.dispatch import choose, implementations
from archon_kernels.dtypes import wide_dtype

MAX_LOG_RATIO = 80.0
"""Bound of a log-ratio before ``exp``: an overflow to inf would turn the gradient of a clipped token into NaN."""


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """The loss of each token, and fp64 sums over the tokens under the mask, without gradient.

    Attributes:
        loss_T: ``[T]``, weighted, 0 outside the mask.
        ratio: sum of r = exp(l - p).
        kl: sum of r - 1 - log r, the k3 estimate of how far l is from p.
        clipped: number of tokens whose clipped branch is the active one.
        dual_clipped: number of tokens whose bound ``c_clip`` is the active one.
        kept: number of tokens.
    """

    loss_T: Tensor
    ratio: Tensor
    kl: Tensor
    clipped: Tensor
    dual_clipped: Tensor
    kept: Tensor


def masked_policy_loss(
    logprobs_T: Tensor,
    proximal_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
    weights_T: Tensor | None = None,
) -> PolicyLoss:
    """``w max(-A r, -A clip(r, 1 - eps, 1 + eps_higher))`` with r = exp(l - p) (PPO, arXiv 1707.06347).

    Computed in fp32, or in fp64 if l or p is fp64; r is at most ``exp(MAX_LOG_RATIO)``, in the sums too.

    Args:
        logprobs_T: ``[T]`` l, any float dtype, the only input with gradient.
        proximal_logprobs_T: ``[T]`` p, any float dtype.
        advantages_T: ``[T]`` A.
        mask_T: ``[T]`` bool; other entries are never read, whatever hides there.
        eps_clip: lower width of the clipping interval.
        eps_clip_higher: upper width (DAPO's clip-higher), default ``eps_clip``.
        c_clip: for A < 0 the loss is at most ``c_clip * |A|`` (dual clip, arXiv 1912.09729); above 1.
        weights_T: ``[T]`` w, an off-policy correction; None is 1. It does not enter the sums.
    """
    upper = 1.0 + (eps_clip if eps_clip_higher is None else eps_clip_higher)
    columns = (logprobs_T, proximal_logprobs_T.detach(), advantages_T.detach(), mask_T)
    weights_T = None if weights_T is None else weights_T.detach()
    loss_T, _, sums = _policy_loss(*columns, weights_T, 1.0 - eps_clip, upper, c_clip)
    return PolicyLoss(loss_T, *sums.detach().unbind())


def log_ratios(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """``numerator - denominator`` in fp32 or better under the mask, 0 elsewhere, whatever hides there."""
    dtype = wide_dtype(numerator, denominator)
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, numerator.to(dtype), zero) - torch.where(mask, denominator.to(dtype), zero)


def _reference_policy_loss(
    logprobs_T: Tensor,
    proximal_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    weights_T: Tensor | None,
    lower: float,
    upper: float,
    c_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, its derivative by l, and the sums in the order of ``PolicyLoss``."""
    log_ratio = log_ratios(logprobs_T, proximal_T, mask_T)
    bounded_log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    ratio = bounded_log_ratio.exp()
    advantage = torch.where(mask_T, advantages_T, 0.0).to(ratio.dtype)
    loss = -advantage * ratio
    bounded = -advantage * ratio.clamp(lower, upper)
    clipped = bounded > loss
    slope = torch.where(clipped | (log_ratio > MAX_LOG_RATIO), 0.0, loss)  # d r / d l = r
    loss = torch.where(clipped, bounded, loss)
    dual_clipped = torch.zeros_like(mask_T)
    if c_clip is not None:
        ceiling = -advantage * c_clip
        dual_clipped = (advantage < 0) & (loss > ceiling)
        loss, slope = torch.where(dual_clipped, ceiling, loss), torch.where(dual_clipped, 0.0, slope)
    if weights_T is not None:
        weight = torch.where(mask_T, weights_T, 0.0).to(ratio.dtype)
        loss, slope = loss * weight, slope * weight
    exact = bounded_log_ratio.double()
    columns = (exact.exp(), torch.expm1(exact) - exact, clipped, dual_clipped, mask_T)
    sums = torch.stack([torch.where(mask_T, column, 0.0).sum(dtype=torch.float64) for column in columns])
    return torch.where(mask_T, loss, 0.0), torch.where(mask_T, slope, 0.0), sums


_POLICY_LOSS = implementations(_reference_policy_loss, triton="policy_loss.policy_loss")


@torch.library.custom_op("archon::masked_policy_loss", mutates_args=())
def _policy_loss(
    logprobs_T: Tensor,
    proximal_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    weights_T: Tensor | None,
    lower: float,
    upper: float,
    c_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    columns = (logprobs_T, proximal_T, advantages_T, mask_T, weights_T)
    return choose(_POLICY_LOSS, logprobs_T.device)(*columns, lower, upper, c_clip)


@_policy_loss.register_fake
def _(logprobs_T: Tensor, proximal_T: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    loss_T = logprobs_T.new_empty(logprobs_T.shape, dtype=wide_dtype(logprobs_T, proximal_T))
    return loss_T, torch.empty_like(loss_T), logprobs_T.new_empty(5, dtype=torch.float64)


def _save_policy_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.dtype = inputs[0].dtype
    _, slope_T, sums = output
    ctx.save_for_backward(slope_T)
    ctx.mark_non_differentiable(slope_T, sums)


def _grad_policy_loss(ctx: Any, grad_T: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (slope_T,) = ctx.saved_tensors
    return (grad_T * slope_T).to(ctx.dtype), *[None] * 7


_policy_loss.register_autograd(_grad_policy_loss, setup_context=_save_policy_loss)
