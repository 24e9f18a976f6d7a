"""Sums and extrema over the segments of a packed 1-D tensor; a segment is a sequence, a prompt group or the batch."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """Sum ``values [M]`` over equal ``ids [M]``: ``[count]``, in fp64. A segment without an entry sums to 0."""
    return torch.zeros(count, dtype=torch.float64, device=values.device).index_add_(0, ids, values.double())


def segment_max(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """Largest of ``values [M]`` over equal ``ids [M]``: ``[count]``, in fp64. A segment without an entry has -inf."""
    empty = torch.full((count,), -torch.inf, dtype=torch.float64, device=values.device)
    return empty.scatter_reduce_(0, ids, values.double(), "amax")


def segment_suffix_sum(values: Tensor, ids: Tensor, decay: float) -> Tensor:
    """``y[i] = values[i] + decay * y[i + 1]``, started afresh in every segment.

    Sums of 1, 2, 4, … entries are doubled until the longest segment is covered, so the work is T log L without a loop
    over tokens, and a segment's result depends on nothing outside it.

    Args:
        values: ``[M]`` floating point.
        ids: ``[M]``, the entries of a segment side by side.
        decay: factor per entry, 0 to 1.
    """
    result, shifted, outside = values.clone(), torch.empty_like(values), torch.empty_like(ids, dtype=torch.bool)
    width = 1
    while width < len(result) and decay**width > 0.0:
        elsewhere = torch.ne(ids[width:], ids[:-width], out=outside[width:])
        if elsewhere.all():
            break
        ahead = torch.mul(result[width:], decay**width, out=shifted[width:])
        result[:-width] += ahead.masked_fill_(elsewhere, 0.0)
        width *= 2
    return result
