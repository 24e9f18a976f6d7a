"""Context parallelism: one packed stream of tokens cut over several ranks, and the attention across the cuts.

Two ways, which combine. Ulysses (arXiv 2309.14509) exchanges tokens for heads before attention and back after it, over
as many ranks as the heads can be dealt to. Ring attention (arXiv 2310.01889) leaves queries where they are, brings keys
and values to them block by block, and merges the blocks by their log-sum-exp. The ring cuts the stream in zigzag, so
that under the causal mask every rank has the same work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from archon.options import ContextMode
from archon.parallel.collectives import exchange_rows
from archon_kernels.attention import Documents, block_attention, block_attention_backward, packed_attention


@dataclass(frozen=True)
class ContextGroups:
    """Process groups of this rank's context; None stands for a group of one. Ulysses ranks are innermost."""

    ring: dist.ProcessGroup | None = None
    ulysses: dist.ProcessGroup | None = None

    @property
    def ring_size(self) -> int:
        return 1 if self.ring is None else self.ring.size()

    @property
    def ring_rank(self) -> int:
        return 0 if self.ring is None else self.ring.rank()

    @property
    def ulysses_size(self) -> int:
        return 1 if self.ulysses is None else self.ulysses.size()

    @property
    def ulysses_rank(self) -> int:
        return 0 if self.ulysses is None else self.ulysses.rank()

    @property
    def size(self) -> int:
        return self.ring_size * self.ulysses_size

    @property
    def rank(self) -> int:
        return self.ring_rank * self.ulysses_size + self.ulysses_rank


def ulysses_degree(mode: ContextMode, local_heads: int, context: int) -> int:
    """Over how many of ``context`` ranks the heads of one tensor rank are dealt; the ring takes the quotient."""
    return 1 if mode == "ring" else math.gcd(local_heads, context)


def stream_multiple(ring: int, ulysses: int) -> int:
    """What the number of tokens must be a multiple of: a ring rank holds two equal chunks, cut evenly by Ulysses."""
    return ulysses if ring == 1 else ring * math.lcm(2, ulysses)


def stream_order(tokens: int, ring: int, ulysses: int) -> Tensor:
    """Where each token of the packed stream goes: context rank i of c owns ``order[i * T / c : (i + 1) * T / c]``.

    With a ring the stream is cut into ``2 * ring`` chunks, and ring rank j owns chunks j and ``2 * ring - 1 - j``.

    Returns:
        ``[T]`` int64 permutation, on the CPU.

    Raises:
        ValueError: ``tokens`` is no multiple of ``stream_multiple(ring, ulysses)``.
    """
    multiple = stream_multiple(ring, ulysses)
    if tokens % multiple:
        raise ValueError(
            f"{tokens} tokens cannot be cut over {ring} ring x {ulysses} Ulysses ranks: pad them to a multiple of "
            f"{multiple}"
        )
    order = torch.arange(tokens)
    if ring == 1:
        return order
    chunks = order.view(2 * ring, -1)
    return torch.stack([chunks[:ring], chunks[ring:].flip(0)], dim=1).flatten()


class Segment(NamedTuple):
    """The part of one document that lies in one chunk of queries and one chunk of keys, as rows of their ranks."""

    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True, eq=False)
class RingDocuments:
    """What one ring rank computes for one packed stream. Built once per micro-batch.

    Attributes:
        tokens: rows of this ring rank, before Ulysses cuts them.
        steps: (distance, segments) in ascending distance: what this rank's queries see of the keys of the ring rank
            that many places before it. Distances at which no rank of the ring sees anything are left out.
    """

    tokens: int
    steps: tuple[tuple[int, tuple[Segment, ...]], ...]

    @classmethod
    def build(cls, cu_seqlens: Tensor, tokens: int, ring_size: int, ring_rank: int) -> RingDocuments:
        """Plan the attention of ``ring_rank`` over documents with borders ``cu_seqlens [N+1]``. Synchronises once.

        Raises:
            ValueError: the documents do not fill the stream, or it cannot be cut into ``2 * ring_size`` chunks.
        """
        borders = cu_seqlens.tolist()
        chunk, rest = divmod(tokens, 2 * ring_size)
        if borders[-1] != tokens or rest:
            raise ValueError(
                f"documents of {borders[-1]} tokens in a stream of {tokens} over a ring of {ring_size}: they must fill "
                f"it, and it must be a multiple of {2 * ring_size}"
            )
        steps: dict[int, list[Segment]] = {}
        for start, end in pairwise(borders):
            inside = range(start // chunk, (end - 1) // chunk + 1) if start < end else range(0)
            for a in inside:
                for b in range(inside.start, a + 1):
                    owner = _ring_owner(a, ring_size)
                    segments = steps.setdefault((owner - _ring_owner(b, ring_size)) % ring_size, [])
                    if owner == ring_rank:
                        queries, keys = (_ring_rows(x, chunk, ring_size, start, end) for x in (a, b))
                        segments.append(Segment(queries, keys, causal=a == b))
        return cls(2 * chunk, tuple((distance, tuple(steps[distance])) for distance in sorted(steps)))


def _ring_owner(chunk_index: int, ring_size: int) -> int:
    return min(chunk_index, 2 * ring_size - 1 - chunk_index)


def _ring_rows(chunk_index: int, chunk: int, ring_size: int, start: int, end: int) -> slice:
    """Rows, on the owner of a chunk, of the tokens from ``start`` to ``end`` that lie in it."""
    base = chunk_index * chunk
    offset = chunk if chunk_index >= ring_size else 0
    return slice(max(start - base, 0) + offset, min(end - base, chunk) + offset)


def context_documents(cu_seqlens: Tensor, tokens: int, groups: ContextGroups) -> Documents | RingDocuments:
    """What ``context_attention`` needs to know of the documents ``cu_seqlens [N+1]`` of the whole packed stream."""
    if groups.ring_size == 1:
        return Documents.from_cu_seqlens(cu_seqlens)
    return RingDocuments.build(cu_seqlens, tokens, groups.ring_size, groups.ring_rank)


def context_attention(
    q_SHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, documents: Documents | RingDocuments, groups: ContextGroups
) -> Tensor:
    """Causal attention inside each document of a stream that is cut over the context ranks in ``stream_order``.

    Args:
        q_SHd: ``[S, H, d]`` queries of this rank's ``S = T / c`` tokens, any float dtype; H a multiple of the Ulysses
            size.
        k_SGd: ``[S, G, d]`` keys, H a multiple of G; query head h reads key head ``h // (H / G)``.
        v_SGd: ``[S, G, d]`` values.
        documents: of the whole stream, from ``context_documents``.
        groups: this rank's context.

    Returns:
        ``[S, H, d]``, equal to this rank's rows of ``packed_attention`` over the stream. Differentiable in q, k and v.

    Raises:
        ValueError: heads that the Ulysses ranks cannot share, or documents planned for another ring.
    """
    if (groups.ring_size > 1) != isinstance(documents, RingDocuments):
        raise ValueError(f"a ring of {groups.ring_size} got {type(documents).__name__}: use context_documents")
    heads, size = q_SHd.shape[1], groups.ulysses_size
    if heads % size:
        raise ValueError(f"{heads} query heads cannot be dealt to {size} Ulysses ranks: choose a divisor of {heads}")
    if groups.ulysses is None:
        return _local_attention(q_SHd, k_SGd, v_SGd, documents, groups.ring)
    q, k, v = _deal_heads(q_SHd, k_SGd, v_SGd, groups.ulysses)
    return _collect_heads(_local_attention(q, k, v, documents, groups.ring), groups.ulysses)


def _local_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents | RingDocuments, ring: dist.ProcessGroup | None
) -> Tensor:
    if isinstance(documents, Documents):
        return packed_attention(q, k, v, documents)
    return _RingAttention.apply(q, k, v, documents, ring)


def _deal_heads(q_SHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Some heads of all the group's tokens, for all heads of some: q ``[u * S, H / u, d]``, k and v likewise.

    Key heads are repeated as far as needed for each rank to receive those that its query heads read, in the ratio that
    attention expects.
    """
    size, heads, kv_heads = group.size(), q_SHd.shape[1], k_SGd.shape[1]
    per_kv_head = heads // kv_heads
    repeats = per_kv_head // math.gcd(per_kv_head, heads // size)
    k_SGd, v_SGd = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (k_SGd, v_SGd))
    parts = [x.unflatten(1, (size, -1)) for x in (q_SHd, k_SGd, v_SGd)]
    rows = _exchange(torch.cat(parts, dim=2).transpose(0, 1), group).flatten(0, 1)
    return rows.split([part.shape[2] for part in parts], dim=1)


def _collect_heads(x_Thd: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All heads of this rank's tokens, for some heads of all the group's: ``[u * S, H / u, d] -> [S, H, d]``."""
    return _exchange(x_Thd.unflatten(0, (group.size(), -1)), group).transpose(0, 1).flatten(1, 2)


def _exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``out[i]`` is what rank i had at ``x[this rank]``. Differentiable."""
    each = [1] * group.size()
    return exchange_rows(x, each, each, group)


class _RingAttention(torch.autograd.Function):
    """Attention of local queries over the keys of the ring; backward brings the keys again instead of keeping them."""

    @staticmethod
    def forward(
        ctx: Any, q_SHd: Tensor, k_SGd: Tensor, v_SGd: Tensor, documents: RingDocuments, group: dist.ProcessGroup
    ) -> Tensor:
        dtype = torch.promote_types(q_SHd.dtype, torch.float32)
        out = torch.zeros_like(q_SHd, dtype=dtype)
        lse = torch.full(q_SHd.shape[:2], -torch.inf, dtype=dtype, device=q_SHd.device)
        kv = torch.stack([k_SGd, v_SGd])
        for distance, segments in documents.steps:
            k, v = _from_rank_before(kv, distance, group)
            for queries, keys, causal in segments:
                block = block_attention(q_SHd[queries], k[keys], v[keys], causal)
                _merge(out[queries], lse[queries], *block)
        out = out.to(q_SHd.dtype)
        ctx.save_for_backward(q_SHd, kv, out, lse)
        ctx.documents, ctx.group = documents, group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grads
        q, kv, out, lse = ctx.saved_tensors
        grad_q, grad_kv = torch.zeros_like(q, dtype=lse.dtype), torch.zeros_like(kv, dtype=lse.dtype)
        for distance, segments in ctx.documents.steps:
            k, v = _from_rank_before(kv, distance, ctx.group)
            grad_k, grad_v = grad_there = torch.zeros_like(grad_kv)
            for rows, keys, causal in segments:
                block = q[rows], k[keys], v[keys], out[rows], lse[rows]
                parts = block_attention_backward(grad_out[rows], *block, causal)
                for total, part in zip((grad_q[rows], grad_k[keys], grad_v[keys]), parts, strict=True):
                    total.add_(part)
            grad_kv += _from_rank_before(grad_there, -distance, ctx.group)
        return grad_q.to(q.dtype), *grad_kv.to(kv.dtype), None, None


def _from_rank_before(x: Tensor, distance: int, group: dist.ProcessGroup) -> Tensor:
    """``x`` of the rank ``distance`` places before this one in the ring.

    Straight from there, not handed on from neighbour to neighbour: so a distance that nobody needs costs nothing. An
    all-to-all with one non-zero entry, because every backend has that.
    """
    if distance == 0:
        return x
    size, rank = group.size(), group.rank()
    sent, received = (
        [x.shape[0] if i == peer % size else 0 for i in range(size)] for peer in (rank + distance, rank - distance)
    )
    return exchange_rows(x, received, sent, group)


def _merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block's keys to what ``out [S, H, d]`` and ``lse [S, H]`` have seen, in place."""
    merged = torch.logaddexp(lse, block_lse)
    out.mul_((lse - merged).exp_()[..., None]).add_(block_out * (block_lse - merged).exp_()[..., None])
    lse.copy_(merged)
