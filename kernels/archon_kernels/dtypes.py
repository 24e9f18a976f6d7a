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


def check_choices(indices_TK: Tensor) -> None:
    """Refuse choices of experts in another dtype than int64, which some implementations would misread."""
    if indices_TK.dtype != torch.int64:
        raise ValueError(f"expert choices are {indices_TK.dtype}: pass int64, as topk_gate returns them")
