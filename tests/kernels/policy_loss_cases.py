"""The clipped policy loss token by token in Python's floats, and batches for it; for the tests of policy_loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from archon_kernels.policy_loss import PolicyLoss, masked_policy_loss

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"eps_clip": 0.2},
    "clip_higher": {"eps_clip": 0.2, "eps_clip_higher": 0.28},
    "dual": {"eps_clip": 0.2, "eps_clip_higher": 0.28, "c_clip": 1.5},
}
MASKS = ("none", "all", "random")
DTYPES = {torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 1e-6, torch.float64: 1e-12}
"""Tolerance of losses by the dtype of the log-probs, which is fp32 or wider once they are loaded."""


def columns(tokens: int, dtype: torch.dtype, mask: str, *, junk: float = math.nan) -> tuple[Tensor, ...]:
    """New log-probs and p, advantages, mask and weights, with ``junk`` wherever the mask is 0.

    Log-ratios are about 0.4 wide and keep a distance of 1e-3 from the edges of the clipping intervals above.
    """
    generator = torch.Generator().manual_seed(tokens)
    new, p = (-1 - torch.rand(tokens, generator=generator, dtype=torch.float64) for _ in range(2))
    kept = {"none": torch.zeros(tokens), "all": torch.ones(tokens), "random": torch.rand(tokens, generator=generator)}
    advantages, weights = torch.randn(tokens, generator=generator), torch.rand(tokens, generator=generator) + 0.5
    new, p = new.to(dtype), p.to(dtype if dtype == torch.float64 else torch.float32)
    for edge in (0.8, 1.2, 1.28, 1.5):
        near = (new.double() - p.double() - math.log(edge)).abs() < 1e-3
        p = torch.where(near, p + 0.01, p)
    here = kept[mask] > 0.5
    filled = (torch.where(here, column, junk) for column in (new, p, advantages))
    return *filled, here, torch.where(here, weights, junk)


def true_loss(
    new: Tensor,
    p: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor | None,
    *,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    c_clip: float | None = None,
) -> tuple[list[float], list[float], list[float]]:
    """Losses, their derivatives by the new log-probs, and the sums in the order of ``sums_of``."""
    upper = eps_clip if eps_clip_higher is None else eps_clip_higher
    losses, slopes, sums = [], [], [0.0] * 5
    given = [1.0] * len(new) if weights is None else weights.tolist()
    for now, old, a, kept, w in zip(new.tolist(), p.tolist(), advantages.tolist(), mask.tolist(), given, strict=True):
        loss = slope = 0.0
        if kept:
            ratio = math.exp(now - old)
            loss = slope = -a * ratio
            bound = -a * min(max(ratio, 1 - eps_clip), 1 + upper)
            clipped = bound > loss
            if clipped:
                loss, slope = bound, 0.0
            dual = c_clip is not None and a < 0 and loss > -c_clip * a
            if dual:
                assert c_clip is not None
                loss, slope = -c_clip * a, 0.0
            parts = (ratio, math.expm1(now - old) - (now - old), clipped, dual, 1.0)
            sums = [total + part for total, part in zip(sums, parts, strict=True)]
            loss, slope = loss * w, slope * w
        losses.append(loss)
        slopes.append(slope)
    return losses, slopes, sums


def sums_of(result: PolicyLoss) -> Tensor:
    return torch.stack([result.ratio, result.kl, result.clipped, result.dual_clipped, result.kept])


def assert_equals_truth(
    tokens: int, dtype: torch.dtype, mask: str, option: str, *, weighted: bool, sums_rtol: float = 1e-9
) -> None:
    """Losses, gradient and sums. Counts are exact."""
    new, p, advantages, kept, weights = columns(tokens, dtype, mask)
    given = weights if weighted else None
    new.requires_grad_()
    result = masked_policy_loss(new, p, advantages, kept, weights_T=given, **OPTIONS[option])
    losses, slopes, sums = true_loss(new.detach(), p, advantages, kept, given, **OPTIONS[option])
    assert result.loss_T.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = DTYPES[dtype]
    expected = torch.tensor(losses, dtype=torch.float64)
    torch.testing.assert_close(result.loss_T.double(), expected, rtol=tolerance, atol=tolerance)
    pull = torch.rand(tokens, generator=torch.Generator().manual_seed(1)) + 0.5
    result.loss_T.backward(pull.to(result.loss_T.dtype))
    assert new.grad is not None and new.grad.dtype == dtype
    expected = torch.tensor(slopes, dtype=torch.float64) * pull.double()
    relative = {torch.bfloat16: 4e-3, torch.float16: 5e-4}.get(dtype, tolerance)  # the gradient itself is rounded
    torch.testing.assert_close(new.grad.double(), expected, rtol=relative, atol=tolerance)
    got, wanted = sums_of(result), torch.tensor(sums, dtype=torch.float64)
    assert got.dtype == torch.float64 and not got.requires_grad
    assert torch.equal(got[2:], wanted[2:])
    torch.testing.assert_close(got[:2], wanted[:2], rtol=sums_rtol, atol=sums_rtol)
