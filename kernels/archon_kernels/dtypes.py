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


def autocast_operands(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands of a matrix product in the dtype of autocast, if it is on; it leaves fp64 alone."""
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device) or any(x.dtype == torch.float64 for x in operands):
        return operands
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in operands)


def check_choices(indices_TK: Tensor) -> None:
    """Refuse choices of experts in another dtype than int64, which some implementations would misread."""
    if indices_TK.dtype != torch.int64:
        raise ValueError(f"expert choices are {indices_TK.dtype}: pass int64, as topk_gate returns them")
