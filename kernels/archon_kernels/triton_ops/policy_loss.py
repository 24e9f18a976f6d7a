"""Clipped policy loss: a program takes a block of tokens, and leaves its part of each sum in a row of its own."""

# Kernels have no types that mypy knows.
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from archon_kernels.policy_loss import MAX_LOG_RATIO
from archon_kernels.triton_ops import Compiled

_BLOCK = 1024
_SUMS = 5

_MAX_LOG_RATIO = tl.constexpr(MAX_LOG_RATIO)


@triton.jit
def _k3(x, ratio):
    """``exp(x) - 1 - x``, by its series where the difference would cancel."""
    series = 1.0 / 3628800
    series = series * x + 1.0 / 362880
    series = series * x + 1.0 / 40320
    series = series * x + 1.0 / 5040
    series = series * x + 1.0 / 720
    series = series * x + 1.0 / 120
    series = series * x + 1.0 / 24
    series = series * x + 1.0 / 6
    series = series * x + 0.5
    return tl.where(tl.abs(x) < 0.5, series * x * x, ratio - 1.0 - x)


@triton.jit
def _policy_loss(
    logprobs,
    proximal,
    advantages,
    mask,
    weights,
    loss,
    slope,
    sums,
    tokens,
    lower,
    upper,
    c_clip,
    BLOCK: tl.constexpr,
    N_SUMS: tl.constexpr,
):
    WIDE: tl.constexpr = loss.dtype.element_ty
    token_T = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there_T = token_T < tokens
    kept_T = tl.load(mask + token_T, mask=there_T, other=0) != 0
    log_ratio_T = tl.load(logprobs + token_T, mask=kept_T, other=0.0).to(WIDE)
    log_ratio_T -= tl.load(proximal + token_T, mask=kept_T, other=0.0).to(WIDE)
    advantage_T = tl.load(advantages + token_T, mask=kept_T, other=0.0).to(WIDE)
    # Comparisons instead of minimum and maximum: NaN passes.
    overflows_T = log_ratio_T > _MAX_LOG_RATIO
    log_ratio_T = tl.where(overflows_T, _MAX_LOG_RATIO, log_ratio_T)
    ratio_T = tl.exp(log_ratio_T)
    bounded_T = tl.where(ratio_T < lower, lower, tl.where(ratio_T > upper, upper, ratio_T))
    loss_T = -advantage_T * ratio_T
    bounded_T = -advantage_T * bounded_T
    clipped_T = bounded_T > loss_T
    slope_T = tl.where(clipped_T | overflows_T, 0.0, loss_T)
    loss_T = tl.where(clipped_T, bounded_T, loss_T)
    dual_clipped = 0
    if c_clip is not None:
        ceiling_T = -advantage_T * c_clip
        dual_clipped_T = (advantage_T < 0) & (loss_T > ceiling_T)
        loss_T = tl.where(dual_clipped_T, ceiling_T, loss_T)
        slope_T = tl.where(dual_clipped_T, 0.0, slope_T)
        dual_clipped = tl.sum(dual_clipped_T.to(tl.int32), 0)
    if weights is not None:
        weight_T = tl.load(weights + token_T, mask=kept_T, other=0.0).to(WIDE)
        loss_T *= weight_T
        slope_T *= weight_T
    tl.store(loss + token_T, loss_T, mask=there_T)
    tl.store(slope + token_T, slope_T, mask=there_T)
    row = sums + tl.program_id(0).to(tl.int64) * N_SUMS
    tl.store(row, tl.sum(tl.where(kept_T, ratio_T, 0.0), 0))
    tl.store(row + 1, tl.sum(tl.where(kept_T, _k3(log_ratio_T, ratio_T), 0.0), 0))
    tl.store(row + 2, tl.sum(clipped_T.to(tl.int32), 0).to(WIDE))
    tl.store(row + 3, dual_clipped)
    tl.store(row + 4, tl.sum(kept_T.to(tl.int32), 0).to(WIDE))


def policy_loss(
    logprobs_T: Tensor,
    proximal_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    weights_T: Tensor | None,
    lower: float,
    upper: float,
    c_clip: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The op ``archon::masked_policy_loss``."""
    tokens = logprobs_T.shape[0]
    wide = torch.promote_types(torch.promote_types(logprobs_T.dtype, proximal_T.dtype), torch.float32)
    loss_T = logprobs_T.new_empty(tokens, dtype=wide)
    slope_T = torch.empty_like(loss_T)
    programs = triton.cdiv(tokens, _BLOCK)
    sums = loss_T.new_empty(programs, _SUMS)
    if tokens:
        _policy_loss[(programs,)](
            logprobs_T.contiguous(),
            proximal_T.contiguous(),
            advantages_T.contiguous(),
            mask_T.contiguous().view(torch.uint8),
            None if weights_T is None else weights_T.contiguous(),
            loss_T,
            slope_T,
            sums,
            tokens,
            lower,
            upper,
            c_clip,
            BLOCK=_BLOCK,
            N_SUMS=_SUMS,
        )
    return loss_T, slope_T, sums.sum(0, dtype=torch.float64)


_CONSTANTS = {"BLOCK": _BLOCK, "N_SUMS": _SUMS}
_INPUTS = {"proximal": "*fp32", "advantages": "*fp32", "mask": "*u8", "weights": "*fp32"}
_OUTPUTS = {"loss": "*fp32", "slope": "*fp32", "sums": "*fp32"}
_NUMBERS = {"tokens": "i32", "lower": "fp32", "upper": "fp32", "c_clip": "fp32"}
COMPILED = tuple(
    Compiled(
        _policy_loss,
        {"logprobs": f"*{storage}", **_INPUTS, **_OUTPUTS, **_NUMBERS, **dict.fromkeys(_CONSTANTS, "constexpr")},
        _CONSTANTS,
        variant=storage,
    )
    for storage in ("fp32", "bf16")
)
