"""RMS normalisation (arXiv 1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from archon.parallel.tensor import local
from archon_kernels.norm import rms_norm


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension, in fp32 inside, in the dtype of x outside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, local(self.weight), self.eps)
