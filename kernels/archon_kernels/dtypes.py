"""In which dtype the ops compute."""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(*inputs: Tensor) -> torch.dtype:
    """fp32, or fp64 if an input is fp64."""
    dtype = torch.float32
    for x in inputs:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype
