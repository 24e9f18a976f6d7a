"""LM head to log-probability and entropy of chosen tokens, without ever storing the logits."""

from __future__ import annotations

from typing import Any

import torch
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
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each row's target, and entropy, under ``softmax(hidden @ weight.T / temperature)``.

    The logits exist one tile of rows at a time, in forward and again in backward. The matrix products run in the dtype
    of ``hidden``; softmax, log-sum-exp, entropy and their derivatives run in fp32. The gradient of ``weight`` is summed
    over tiles in fp32 and rounded once, to the dtype of ``weight``. Inputs in fp64 are computed in fp64.

    Args:
        hidden_MD: ``[M, D]`` fp32, bf16 or fp64; M may be 0. Leave out rows whose log-probability nobody reads.
        weight_VD: ``[V, D]``, same dtype.
        targets_M: ``[M]`` int64 in [0, V).
        temperature: ``[M]`` fp32 above 0, or None for 1. Gets no gradient.
        with_entropy: also return the entropy.
        tile_elements: upper bound on rows x V held at a time; one row is always held.

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
    op = choose({"reference": _LinearLogprob})
    logprobs, entropy = op.apply(hidden_MD, weight_VD, targets_M, temperature, with_entropy, tile_elements)
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
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(hidden_MD.dtype, torch.float32)
        tile = max(1, min(tile_elements // weight_VD.shape[0], targets_M.shape[0]))
        logprobs, logsumexp, entropy = (hidden_MD.new_empty(targets_M.shape, dtype=dtype) for _ in range(3))
        buffers = _tile_buffers(tile, weight_VD, dtype)
        for rows in _tiles(targets_M.shape[0], tile):
            scores, p = (buffer[: rows.stop - rows.start] for buffer in buffers)
            _scores(hidden_MD, weight_VD, temperature, rows, out=scores)
            peak = scores.amax(-1)
            torch.exp(scores.sub_(peak[:, None]), out=p)
            total = p.sum(-1)
            log_total = total.log()
            logsumexp[rows] = peak + log_total
            logprobs[rows] = scores.gather(-1, targets_M[rows, None]).squeeze(-1) - log_total
            if with_entropy:
                entropy[rows] = log_total - p.mul_(scores).sum(-1) / total
        ctx.save_for_backward(hidden_MD, weight_VD, targets_M, temperature, logsumexp, entropy)
        ctx.tile = tile
        ctx.set_materialize_grads(False)
        return logprobs, entropy if with_entropy else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden_MD, weight_VD, targets_M, temperature, logsumexp, entropy = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden_MD) if need_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=logsumexp.dtype) if need_weight else None
        buffers = _tile_buffers(ctx.tile, weight_VD, logsumexp.dtype)
        for rows in _tiles(targets_M.shape[0], ctx.tile):
            log_p, p = (buffer[: rows.stop - rows.start] for buffer in buffers)
            _scores(hidden_MD, weight_VD, temperature, rows, out=log_p)
            torch.exp(log_p.sub_(logsumexp[rows, None]), out=p)
            # d logprob = onehot - p;  d entropy = -p (log p + entropy)
            pull = torch.zeros_like(logsumexp[rows, None])
            if grad_entropy is not None:
                pull = log_p.add_(entropy[rows, None]).mul_(grad_entropy[rows, None])
            if grad_logprobs is not None:
                pull = pull.add_(grad_logprobs[rows, None])
            grad_scores = p.mul_(pull).neg_()
            if grad_logprobs is not None:
                grad_scores.scatter_add_(-1, targets_M[rows, None], grad_logprobs[rows, None])
            if temperature is not None:
                grad_scores.div_(temperature[rows, None])
            grad_logits = grad_scores.to(hidden_MD.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight_VD, out=grad_hidden[rows])
            if grad_weight is not None and grad_weight.dtype == grad_logits.dtype:
                grad_weight.addmm_(grad_logits.t(), hidden_MD[rows])
            elif grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden_MD[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight_VD.dtype), None, None, None, None


def _tiles(rows: int, tile: int) -> list[slice]:
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
