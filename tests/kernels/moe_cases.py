"""Inputs that the tests of the mixture-of-experts kernels share, and what they compare."""

from __future__ import annotations

import torch
from torch import Tensor


def random_choices(tokens: int, experts: int, top_k: int, seed: int = 0) -> Tensor:
    """``[T, K]`` different experts of each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k]


def counts_of(rows: int, experts: int, seed: int = 0) -> Tensor:
    """Rows of each expert, as a router would spread them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.bincount(torch.randint(experts, (rows,), generator=generator), minlength=experts)


def relative_error(ours: Tensor, right: Tensor) -> float:
    """Norm of the difference, relative to the norm of what is right or, where that is below 1, as it is."""
    right = right.detach().double()
    return float((ours.detach().double() - right).norm() / max(float(right.norm()), 1.0))
