"""Causal attention over documents laid end to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from archon_kernels.dispatch import choose
from archon_kernels.dtypes import autocast_operands, wide_dtype

_LONG = 256
"""Tokens from which a document only shares a call with equally long neighbours; shorter ones of similar length do."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Document borders of a packed batch, and how they are grouped into attention calls. Built once per forward.

    Attributes:
        cu_seqlens: ``[N+1]`` int64 borders in the packed batch.
        buckets: (documents, tokens each) per call, in padded order. Shorter documents are filled up at their end, where
            the causal mask hides the filler. None where the C++ op takes all documents as they are.
        source: ``[P]`` int64 packed row behind each padded row (a filler repeats its document's last row), or None when
            the padded order is the packed order.
        position: ``[T]`` int64 padded row of each packed row, or None likewise.
    """

    cu_seqlens: Tensor
    buckets: tuple[tuple[int, int], ...] | None
    source: Tensor | None
    position: Tensor | None

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor) -> Documents:
        """Group the documents of ``cu_seqlens [N+1]``; documents without tokens are allowed. Synchronises once."""
        borders = cu_seqlens.to("cpu", torch.long)
        if choose({"cpp": True, "reference": False}, cu_seqlens.device):
            return cls(borders, None, None, None)
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
    """Group ascending short lengths so that filler stays below a quarter (or four tokens), and long ones if equal."""
    buckets: list[tuple[int, int]] = []
    limit = 0
    for length in lengths:
        if length > limit or (length >= _LONG and length != buckets[-1][1]):
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
        ``[T, H, d]``, scores scaled by ``d ** -0.5``. Differentiable in q, k and v. Under autocast in its dtype.

    Raises:
        ValueError: borders on another device than the tokens.
    """
    q_THd, k_TGd, v_TGd = autocast_operands(q_THd, k_TGd, v_TGd)
    if documents.cu_seqlens.device != q_THd.device:
        raise ValueError(f"the borders of the documents are on {documents.cu_seqlens.device}, q is on {q_THd.device}")
    if documents.buckets is None:
        return _packed_attention(q_THd, k_TGd, v_TGd, documents.cu_seqlens)[0]
    return _padded_attention(q_THd, k_TGd, v_TGd, documents, documents.buckets)


@torch.library.custom_op("archon::packed_attention", mutates_args=())
def _packed_attention(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the log of the sum of exp of each query's scores, ``[T, H]``."""
    return torch.ops.archon_cpp.packed_attention(q_THd, k_TGd, v_TGd, cu_seqlens)


@_packed_attention.register_fake
def _(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = q_THd.shape
    return q_THd.new_empty(tokens, heads, v_TGd.shape[2]), q_THd.new_empty(tokens, heads, dtype=wide_dtype(q_THd))


@torch.library.custom_op("archon::packed_attention_backward", mutates_args=())
def _packed_attention_backward(
    grad_THd: Tensor, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, cu_seqlens: Tensor, out_THd: Tensor, lse_TH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.archon_cpp.packed_attention_backward(grad_THd, q_THd, k_TGd, v_TGd, cu_seqlens, out_THd, lse_TH)


@_packed_attention_backward.register_fake
def _(
    grad_THd: Tensor, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, cu_seqlens: Tensor, out_THd: Tensor, lse_TH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q_THd.new_empty(q_THd.shape), k_TGd.new_empty(k_TGd.shape), v_TGd.new_empty(v_TGd.shape)


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _grad(ctx: Any, grad_THd: Tensor | None, _: None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    if grad_THd is None:
        return None, None, None, None
    return *_packed_attention_backward(grad_THd, *ctx.saved_tensors), None


_packed_attention.register_autograd(_grad, setup_context=_save)


def _padded_attention(
    q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, documents: Documents, buckets: tuple[tuple[int, int], ...]
) -> Tensor:
    sizes = [count * length for count, length in buckets]
    columns = [_Pad.apply(x, documents).split(sizes) for x in (q_THd, k_TGd, v_TGd)]
    outputs = []
    for shape, *parts in zip(buckets, *columns, strict=True):
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


def block_attention(q_SHd: Tensor, k_RGd: Tensor, v_RGd: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Softmax attention of some queries over some of their keys, with the log-sum-exp that merges it with the others.

    Not differentiable: ``block_attention_backward`` is its derivative, to be called once the blocks are merged.

    Args:
        q_SHd: ``[S, H, d]`` queries, any float dtype; S at least 1.
        k_RGd: ``[R, G, d]`` keys, H a multiple of G; query head h reads key head ``h // (H / G)``; R at least 1.
        v_RGd: ``[R, G, d]`` values.
        causal: query i sees keys 0..i, and S equals R; otherwise every query sees every key.

    Returns:
        ``out [S, H, d]`` in the dtype of q, scores scaled by ``d ** -0.5``, and ``lse [S, H]``, the log of the sum of
        exp of each query's scores, in fp32 (fp64 for fp64).

    Raises:
        ValueError: a block without queries or keys, or one that is causal and not square.
    """
    _check_block(q_SHd, k_RGd, causal)
    return choose({"reference": _block_attention}, q_SHd.device)(q_SHd, k_RGd, v_RGd, causal)


def block_attention_backward(
    grad_SHd: Tensor, q_SHd: Tensor, k_RGd: Tensor, v_RGd: Tensor, out_SHd: Tensor, lse_SH: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One block's part of the gradients of q, k and v.

    Args:
        grad_SHd: ``[S, H, d]`` gradient of the merged output, in its dtype.
        q_SHd, k_RGd, v_RGd, causal: the block, as in ``block_attention``.
        out_SHd: ``[S, H, d]`` the merged output of these queries over all their keys, in the dtype of q.
        lse_SH: ``[S, H]`` the merged log-sum-exp.

    Returns:
        Gradients of q ``[S, H, d]``, k and v ``[R, G, d]`` in their dtypes; summed over the blocks, those of the whole.

    Raises:
        ValueError: as ``block_attention``.
    """
    _check_block(q_SHd, k_RGd, causal)
    backward = choose({"reference": _block_attention_backward}, q_SHd.device)
    return backward(grad_SHd, q_SHd, k_RGd, v_RGd, out_SHd, lse_SH, causal)


def _check_block(q_SHd: Tensor, k_RGd: Tensor, causal: bool) -> None:
    queries, keys = q_SHd.shape[0], k_RGd.shape[0]
    if queries == 0 or keys == 0 or (causal and queries != keys):
        raise ValueError(
            f"a {'causal' if causal else 'full'} block of {queries} queries and {keys} keys: leave out empty blocks, "
            "and cut causal ones square"
        )


def _block_attention(q_SHd: Tensor, k_RGd: Tensor, v_RGd: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    if q_SHd.device.type != "cpu":
        return _dense_block_attention(q_SHd, k_RGd, v_RGd, causal)
    q, k, v = (x.transpose(0, 1)[None] for x in (q_SHd, k_RGd, v_RGd))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out[0].transpose(0, 1), lse[0].t()


def _block_attention_backward(
    grad_SHd: Tensor, q_SHd: Tensor, k_RGd: Tensor, v_RGd: Tensor, out_SHd: Tensor, lse_SH: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if q_SHd.device.type != "cpu":
        return _dense_block_attention_backward(grad_SHd, q_SHd, k_RGd, v_RGd, out_SHd, lse_SH, causal)
    grad, q, k, v, out, lse = (x.transpose(0, 1)[None] for x in (grad_SHd, q_SHd, k_RGd, v_RGd, out_SHd, lse_SH))
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grad_q, grad_k, grad_v = (x[0].transpose(0, 1) for x in backward(grad, q, k, v, out, lse, 0.0, causal))
    return grad_q, grad_k, grad_v


def _dense_block_attention(q_SHd: Tensor, k_RGd: Tensor, v_RGd: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """``block_attention`` in plain matrix products, which hold the scores of a whole block; n = H / G."""
    q_SGnd, k, v = _grouped(q_SHd, k_RGd), _wide(k_RGd), _wide(v_RGd)
    scores_GnSR = _block_scores(q_SGnd, k, causal)
    lse_GnS = scores_GnSR.logsumexp(-1)
    out = torch.einsum("gnsr,rgd->sgnd", (scores_GnSR - lse_GnS[..., None]).exp(), v)
    return out.flatten(1, 2).to(q_SHd.dtype), lse_GnS.flatten(0, 1).t()


def _dense_block_attention_backward(
    grad_SHd: Tensor, q_SHd: Tensor, k_RGd: Tensor, v_RGd: Tensor, out_SHd: Tensor, lse_SH: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q_SGnd, grad, out = (_grouped(x, k_RGd) for x in (q_SHd, grad_SHd, out_SHd))
    k, v = _wide(k_RGd), _wide(v_RGd)
    lse_GnS = lse_SH.t().unflatten(0, q_SGnd.shape[1:3])
    p_GnSR = (_block_scores(q_SGnd, k, causal) - lse_GnS[..., None]).exp()
    grad_p = torch.einsum("sgnd,rgd->gnsr", grad, v)
    delta_GnS = (grad * out).sum(-1).permute(1, 2, 0)
    grad_scores = p_GnSR * (grad_p - delta_GnS[..., None]) * q_SHd.shape[-1] ** -0.5
    grad_q = torch.einsum("gnsr,rgd->sgnd", grad_scores, k).flatten(1, 2)
    grad_k = torch.einsum("gnsr,sgnd->rgd", grad_scores, q_SGnd)
    grad_v = torch.einsum("gnsr,sgnd->rgd", p_GnSR, grad)
    return grad_q.to(q_SHd.dtype), grad_k.to(k_RGd.dtype), grad_v.to(v_RGd.dtype)


def _block_scores(q_SGnd: Tensor, k_RGd: Tensor, causal: bool) -> Tensor:
    """``[G, n, S, R]`` scaled scores, minus infinity where the causal mask hides a key."""
    scores = torch.einsum("sgnd,rgd->gnsr", q_SGnd, k_RGd) * q_SGnd.shape[-1] ** -0.5
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill_(hidden, -torch.inf)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _grouped(x_SHd: Tensor, k_RGd: Tensor) -> Tensor:
    """``[S, G, n, d]`` in fp32 or wider: the n query heads of each key head."""
    return _wide(x_SHd).unflatten(1, (k_RGd.shape[1], -1))
