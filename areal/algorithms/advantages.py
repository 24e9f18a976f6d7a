"""From rewards to advantages: overlong penalty, shaping, placement on tokens, and GAE over trained tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from areal.algorithms.segments import segment_suffix_sum


def overlong_penalty(lengths: Tensor, *, max_new_tokens: int, overlong_tokens: int, factor: float) -> Tensor:
    """Penalty (0 or negative) that grows linearly over the last ``overlong_tokens`` of the budget (DAPO,
    arXiv 2503.14476, eq. 13).

    Args:
        lengths: ``[N]`` generated tokens of each response.
        max_new_tokens: budget of a response; at it, and beyond, the penalty is ``-factor``.
        overlong_tokens: length of the interval before the budget in which the penalty rises from 0.
        factor: reward units.
    """
    excess = lengths.double() - (max_new_tokens - overlong_tokens)
    return -factor * (excess / overlong_tokens).clamp(0.0, 1.0)


def scale_rewards(rewards: Tensor, *, bias: float, scaling: float, clip: float) -> Tensor:
    """``clip((R + bias) * scaling, -clip, clip)`` for ``rewards [N]``."""
    return ((rewards + bias) * scaling).clamp(-clip, clip)


def place_rewards(token_rewards: Tensor, rewards: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Rewards per token: ``token_rewards [T]`` on trained tokens, plus ``rewards [N]`` on each last trained token.

    Untrained tokens get 0, whatever they held; the reward of a sequence without a trained token goes nowhere. fp64.
    """
    trained = mask.nonzero().squeeze(-1)
    owners = sequence_ids[trained]
    last = torch.ones_like(owners, dtype=torch.bool)
    last[:-1] = owners[1:] != owners[:-1]
    placed = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    placed[trained] = token_rewards[trained].double()
    placed[trained[last]] += rewards[owners[last]].double()
    return placed


def generalized_advantages(
    rewards: Tensor, mask: Tensor, sequence_ids: Tensor, *, discount: float, gae_lambda: float
) -> Tensor:
    """GAE (arXiv 1506.02438) without a critic, V = 0: ``A[t] = r[t] + discount * gae_lambda * A[next trained token]``.

    Untrained tokens in between (tool output, the next user turn) carry the state through without a step, and get 0.

    Args:
        rewards: ``[T]`` per token.
        mask: ``[T]`` bool, trained tokens.
        sequence_ids: ``[T]`` sequence of each token.
    """
    trained = mask.nonzero().squeeze(-1)
    advantages = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    advantages[trained] = segment_suffix_sum(
        rewards[trained].double(), sequence_ids[trained], decay=discount * gae_lambda
    )
    return advantages
