"""Proximal log-probabilities: those of the weights at the start of the step."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

ProximalMethod = Literal["recompute", "loglinear", "reuse"]
"""``recompute``: one more forward before the step. ``loglinear``: interpolated between the behaviour and the current
log-probs. ``reuse``: the current ones, exact for the first optimizer update of a step and meant for steps of one."""
PROXIMAL_METHODS: tuple[ProximalMethod, ...] = get_args(ProximalMethod)


@torch.no_grad()
def loglinear_logprobs(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    behaviour_versions: Tensor,
    *,
    proximal_version: Tensor,
    current_version: Tensor,
) -> Tensor:
    """``p = b + alpha (l - b)``, ``alpha = clip((v_prox - v_b) / (v_now - v_b), 0, 1)``, and 1 where v_now = v_b.

    Args:
        logprobs: ``[T]`` l, of the weights being trained.
        behaviour_logprobs, behaviour_versions: ``[T]`` b and v_b, version of the weights that sampled each token.
        proximal_version: ``[T]`` or scalar, completed steps at the start of this one.
        current_version: ``[T]`` or scalar; inside a step it grows by 1 ÷ mini-batches with every optimizer update.
    """
    age = current_version.double() - behaviour_versions
    same = age == 0
    alpha = ((proximal_version.double() - behaviour_versions) / torch.where(same, 1.0, age)).clamp(0.0, 1.0)
    alpha = torch.where(same, 1.0, alpha)
    # Exactly l or b at the ends: a rounded weight would leave a stale token with a ratio beside 1.
    mixed = behaviour_logprobs + alpha.to(logprobs.dtype) * (logprobs - behaviour_logprobs)
    return torch.where(alpha == 1.0, logprobs, mixed)
