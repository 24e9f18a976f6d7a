"""LM head to log-probability and entropy of chosen tokens, without ever storing the logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from archon_kernels.dispatch import choose

TILE_ELEMENTS = 1 << 23
"""Logits in a tile: 32 MiB in fp32. Smaller tiles make thin matrix products, larger ones leave the cache."""


def linear_logprob(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    targets_M: Tensor,
    *,
    temperature: Tensor | None = None,
    with_entropy: bool = False,
    tile_elements: int = TILE_ELEMENTS,
    vocab_start: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each row's target, and entropy, under ``softmax(hidden @ weight.T / temperature)``.

    The logits exist one tile of rows at a time, in forward and again in backward; forward's last tile is kept for it.
    The matrix products run in the dtype of ``hidden``; softmax, log-sum-exp, entropy and their derivatives run in fp32.
    The gradient of ``weight`` is summed over tiles in fp32 and rounded once, to the dtype of ``weight``. Inputs in fp64
    are computed in fp64.

    With ``group`` the vocabulary is split over its ranks: each holds consecutive rows of ``weight`` (as many as it
    likes) and passes the same ``hidden``, ``targets`` and ``temperature``. The results are those of the whole
    vocabulary, equal on every rank; a target outside the local rows is another rank's. Backward takes the same gradient
    on every rank and does not communicate: the gradient of ``hidden`` is this rank's PARTIAL sum, which the caller adds
    up over the group; that of ``weight`` is of the local rows, complete.

    Args:
        hidden_MD: ``[M, D]`` fp32, bf16 or fp64; M may be 0. Leave out rows whose log-probability nobody reads.
        weight_VD: ``[V, D]``, same dtype; with ``group``, this rank's rows.
        targets_M: ``[M]`` int64 in [0, V), V being the whole vocabulary.
        temperature: ``[M]`` fp32 above 0, or None for 1. Gets no gradient.
        with_entropy: also return the entropy.
        tile_elements: upper bound on rows x V held at a time; one row is always held.
        vocab_start: token id of the first row of ``weight``.
        group: ranks that together hold the vocabulary; None when ``weight`` is all of it.

    Returns:
        ``logprobs [M]`` and ``entropy [M]`` (or None), fp32, in nats, both differentiable in ``hidden`` and ``weight``.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    rows = hidden_MD.shape[0]
    if hidden_MD.dtype != weight_VD.dtype or hidden_MD.shape[1:] != weight_VD.shape[1:]:
        raise ValueError(
            f"hidden {tuple(hidden_MD.shape)} {hidden_MD.dtype} does not fit weight {tuple(weight_VD.shape)} "
            f"{weight_VD.dtype}: the last dimension and the dtype must be equal"
        )
    if targets_M.shape != (rows,) or (temperature is not None and temperature.shape != (rows,)):
        raise ValueError(f"targets and temperature need one entry for each of the {rows} rows of hidden")
    if group is None and vocab_start != 0:
        raise ValueError(f"vocab_start is {vocab_start} without a group: whoever holds the other rows must be in one")
    op = choose({"reference": _LinearLogprob})
    logprobs, entropy = op.apply(
        hidden_MD, weight_VD, targets_M, temperature, with_entropy, tile_elements, vocab_start, group
    )
    return logprobs, entropy if with_entropy else None


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        targets_M: Tensor,
        temperature: Tensor | None,
        with_entropy: bool,
        tile_elements: int,
        vocab_start: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(hidden_MD.dtype, torch.float32)
        tile = max(1, min(tile_elements // max(1, weight_VD.shape[0]), targets_M.shape[0]))
        index, owned = _local_targets(targets_M, vocab_start, weight_VD.shape[0], group)
        # Of each row, relative to its peak: sum of exp, score of the target (0 where another rank owns it), sum of
        # exp x score. A rank without any vocabulary contributes these zeros.
        sums = hidden_MD.new_zeros(3, *targets_M.shape, dtype=dtype)
        peak = torch.full_like(sums[0], torch.finfo(dtype).min)
        buffers = _tile_buffers(tile, weight_VD, dtype)
        for rows in _tiles(weight_VD, targets_M.shape[0], tile):
            scores, p = (buffer[: rows.stop - rows.start] for buffer in buffers)
            _scores(hidden_MD, weight_VD, temperature, rows, out=scores)
            peak[rows] = scores.amax(-1)
            torch.exp(scores.sub_(peak[rows, None]), out=p)
            sums[0, rows] = p.sum(-1)
            sums[1, rows] = scores.gather(-1, index[rows, None]).squeeze(-1) * owned[rows]
            if with_entropy:
                sums[2, rows] = scores.mul_(p).sum(-1)
        own_peak = peak
        if group is not None:
            peak = _sum_over_shards(sums, peak, owned, group)
        total, target, weighted = sums
        log_total = total.log()
        logsumexp, logprobs, entropy = peak + log_total, target - log_total, log_total - weighted / total
        # The last tile is there already: backward computes the others again, and takes this one.
        last_tile, share = buffers[1], (own_peak - logsumexp).exp()
        ctx.save_for_backward(hidden_MD, weight_VD, index, owned, temperature, logsumexp, entropy, last_tile, share)
        ctx.tile = tile
        ctx.set_materialize_grads(False)
        return logprobs, entropy if with_entropy else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden_MD, weight_VD, index, owned, temperature, logsumexp, entropy, last_tile, share = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        tiles = _tiles(weight_VD, index.shape[0], ctx.tile)
        grad_hidden = torch.zeros_like(hidden_MD) if need_hidden else None
        wide = weight_VD.dtype if len(tiles) == 1 else logsumexp.dtype
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if need_weight and len(tiles) != 1 else None
        # d logprob = onehot - p;  d entropy = -p (log p + entropy);  each of a score that was divided by temperature
        pull, pull_entropy = torch.zeros_like(logsumexp), None
        if grad_logprobs is not None:
            pull = grad_logprobs if temperature is None else grad_logprobs / temperature
        chosen = pull * owned
        if grad_entropy is not None:
            pull_entropy = grad_entropy if temperature is None else grad_entropy / temperature
            pull = pull + pull_entropy * entropy
        buffers = _tile_buffers(ctx.tile, weight_VD, logsumexp.dtype)
        for rows in tiles:
            p, grad_scores = (buffer[: rows.stop - rows.start] for buffer in buffers)
            down = -pull[rows]
            if rows.stop == index.shape[0]:  # not yet divided by the sum over the vocabulary
                p, scale = last_tile[: rows.stop - rows.start], share[rows]
                torch.mul(p, (down * scale)[:, None], out=grad_scores)
                p = p * scale[:, None] if pull_entropy is not None else p
            else:
                _scores(hidden_MD, weight_VD, temperature, rows, out=p)
                torch.mul(p.sub_(logsumexp[rows, None]).exp_(), down[:, None], out=grad_scores)
            if pull_entropy is not None:
                grad_scores.sub_(p.xlogy_(p).mul_(pull_entropy[rows, None]))
            grad_scores.scatter_add_(-1, index[rows, None], chosen[rows, None])
            grad_logits = grad_scores.to(hidden_MD.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight_VD, out=grad_hidden[rows])
            if not need_weight:
                continue
            if grad_weight is None:
                grad_weight = grad_logits.t() @ hidden_MD[rows]
            elif grad_weight.dtype == grad_logits.dtype:
                grad_weight.addmm_(grad_logits.t(), hidden_MD[rows])
            else:
                grad_weight += grad_logits.t() @ hidden_MD[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_VD.dtype), *[None] * 6


def _local_targets(
    targets_M: Tensor, vocab_start: int, vocab: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Row of ``weight`` of each target, and whether it is here; a target of another rank points at any row."""
    if group is None:
        return targets_M, torch.ones_like(targets_M, dtype=torch.bool)
    index = targets_M - vocab_start
    owned = (index >= 0) & (index < vocab)
    return index * owned, owned


def _sum_over_shards(sums: Tensor, peak: Tensor, owned: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Bring the sums of a shard from its own peak to the peak of all shards, which is returned, and add them up."""
    top = peak.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    below = peak - top
    total, target, weighted = sums
    weighted.add_(total * below)
    target.add_(below * owned)
    sums[::2].mul_(below.exp())
    dist.all_reduce(sums, group=group)
    return top


def _tiles(weight_VD: Tensor, rows: int, tile: int) -> list[slice]:
    """Rows of each tile; none where there is no vocabulary to score."""
    if weight_VD.shape[0] == 0:
        return []
    return [slice(start, min(start + tile, rows)) for start in range(0, rows, tile)]


def _tile_buffers(tile: int, weight_VD: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Two tiles ``[tile, V]`` that every step reuses: fresh ones would cost more in page faults than in arithmetic."""
    return [weight_VD.new_empty(tile, weight_VD.shape[0], dtype=dtype) for _ in range(2)]


def _scores(hidden_MD: Tensor, weight_VD: Tensor, temperature: Tensor | None, rows: slice, out: Tensor) -> None:
    """Write logits of some rows, divided by their temperature, into ``out [rows, V]``."""
    if out.dtype == hidden_MD.dtype:
        torch.mm(hidden_MD[rows], weight_VD.t(), out=out)
    else:
        out.copy_(hidden_MD[rows] @ weight_VD.t())
    if temperature is not None:
        out.div_(temperature[rows, None])
