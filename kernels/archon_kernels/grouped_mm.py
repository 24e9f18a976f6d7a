"""Matrix product of each expert's rows with that expert's weight."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from archon_kernels.dispatch import choose

_NATIVE_DTYPES = (torch.float32, torch.bfloat16)
_NATIVE_ALIGNMENT = 16  # bytes that every stride must be a multiple of


def grouped_linear(rows_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    """``rows @ weight[e].T`` for the rows of each expert e, differentiable in rows and weight.

    Args:
        rows_ND: ``[N, D]`` sorted by expert, any float dtype; N may be 0.
        weight_EFD: ``[E, F, D]``, same dtype.
        counts_E: ``[E]`` int64 rows of each expert, summing to N; zeros are allowed.

    Returns:
        ``[N, F]`` in the dtype of the rows.
    """
    return choose({"reference": _grouped_linear})(rows_ND, weight_EFD, counts_E)


def _grouped_linear(rows_ND: Tensor, weight_EFD: Tensor, counts_E: Tensor) -> Tensor:
    itemsize = rows_ND.element_size()
    aligned = all(size * itemsize % _NATIVE_ALIGNMENT == 0 for size in weight_EFD.shape[1:])
    if aligned and rows_ND.dtype in _NATIVE_DTYPES and rows_ND.shape[0] > 0:
        offsets = counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(rows_ND, weight_EFD.transpose(1, 2), offs=offsets)
    parts = rows_ND.split(counts_E.tolist())
    # unbind, not weight[e]: indexing allocates a full-size zero gradient per expert
    return torch.cat([part @ weight.t() for part, weight in zip(parts, weight_EFD.unbind(), strict=True)])
