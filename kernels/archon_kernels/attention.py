"""Causal attention over documents laid end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from archon_kernels.dispatch import choose

_LONG = 256
"""Tokens from which a document is worth a call of its own; shorter ones of similar length share one."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Document borders of a packed batch, and how they are grouped into attention calls. Built once per forward.

    Attributes:
        cu_seqlens: ``[N+1]`` int64 borders in the packed batch.
        buckets: (documents, tokens each) per call, in padded order. Shorter documents are filled up at their end, where
            the causal mask hides the filler.
        source: ``[P]`` int64 packed row behind each padded row (a filler repeats its document's last row), or None when
            the padded order is the packed order.
        position: ``[T]`` int64 padded row of each packed row, or None likewise.
    """

    cu_seqlens: Tensor
    buckets: tuple[tuple[int, int], ...]
    source: Tensor | None
    position: Tensor | None

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> Documents:
        """Group the documents of ``cu_seqlens [N+1]``; documents without tokens are allowed. Synchronises once."""
        borders = cu_seqlens.to("cpu", torch.long)
        lengths, starts = borders.diff(), borders[:-1]
        # Short documents by length, then long ones in packed order, so that a batch of long ones needs no copy.
        order = lengths.clamp(max=_LONG).argsort(stable=True)
        order = order[lengths[order] > 0]
        buckets = _buckets(lengths[order].tolist())
        padded = torch.tensor([size for count, size in buckets for _ in range(count)], dtype=torch.long)
        document = torch.arange(order.shape[0]).repeat_interleave(padded)
        offset = torch.arange(document.shape[0]) - (padded.cumsum(0) - padded)[document]
        source = starts[order][document] + offset.minimum(lengths[order][document] - 1)
        if torch.equal(source, torch.arange(source.shape[0])):
            return cls(cu_seqlens, buckets, None, None)
        real = (offset < lengths[order][document]).nonzero().squeeze(1)
        position = torch.empty(int(borders[-1]), dtype=torch.long)
        position[source[real]] = real
        return cls(cu_seqlens, buckets, source.to(cu_seqlens.device), position.to(cu_seqlens.device))


def _buckets(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    """Group ascending short lengths so that filler stays below a quarter (or four tokens); long ones stand alone."""
    buckets: list[tuple[int, int]] = []
    limit = 0
    for length in lengths:
        if length >= _LONG or length > limit:
            buckets.append((1, length))
            limit = length + max(4, length // 4)
        else:
            buckets[-1] = (buckets[-1][0] + 1, length)
    return tuple(buckets)


def packed_attention(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, documents: Documents) -> Tensor:
    """Causal softmax attention inside each document, with grouped key and value heads.

    Args:
        q_THd: ``[T, H, d]`` queries, any float dtype; the softmax runs in fp32 or wider.
        k_TGd: ``[T, G, d]`` keys, H a multiple of G; query head h reads key head ``h // (H / G)``.
        v_TGd: ``[T, G, d]`` values.
        documents: borders of the T tokens.

    Returns:
        ``[T, H, d]``, scores scaled by ``d ** -0.5``. Differentiable in q, k and v.
    """
    return choose({"reference": _packed_attention})(q_THd, k_TGd, v_TGd, documents)


def _packed_attention(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, documents: Documents) -> Tensor:
    sizes = [count * length for count, length in documents.buckets]
    columns = [_Pad.apply(x, documents).split(sizes) for x in (q_THd, k_TGd, v_TGd)]
    outputs = []
    for shape, *parts in zip(documents.buckets, *columns, strict=True):
        q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return _Unpad.apply(torch.cat(outputs) if outputs else q_THd, documents)


class _Pad(torch.autograd.Function):
    """Packed rows to padded rows. Filler keys are seen by filler queries only, so no gradient reaches a filler."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, documents: Documents) -> Tensor:
        ctx.documents = documents
        return x.view_as(x) if documents.source is None else x.index_select(0, documents.source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        position = ctx.documents.position
        return grad if position is None else grad.index_select(0, position), None


class _Unpad(torch.autograd.Function):
    """Padded rows back to packed rows; the gradient of a filler is zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, documents: Documents) -> Tensor:
        ctx.documents = documents
        return x.view_as(x) if documents.position is None else x.index_select(0, documents.position)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        source, position = ctx.documents.source, ctx.documents.position
        if source is None or position is None:
            return grad, None
        return grad.new_zeros(source.shape[0], *grad.shape[1:]).index_copy_(0, position, grad), None
