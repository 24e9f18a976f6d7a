"""How token losses become one number: the sum over a micro-batch and the count that a mini-batch is divided by."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from archon.batch import PackedBatch

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)


def trained_per_sequence(batch: PackedBatch) -> Tensor:
    """``[N]`` fp64 trained tokens of each sequence, before any filtering."""
    counts = torch.zeros(batch.num_sequences, dtype=torch.float64, device=batch.loss_mask.device)
    return counts.index_add_(0, batch.sequence_ids, batch.loss_mask.double())


def aggregate(token_losses: Tensor, batch: PackedBatch, how: Aggregation) -> Tensor:
    """Sum ``token_losses [T]`` under the mask, so that the sum over micro-batches ÷ ``denominator`` is the loss.

    ``sequence_mean`` weighs a token by 1 ÷ trained tokens of its sequence; filtered tokens stay in that count.
    """
    losses = torch.where(batch.loss_mask, token_losses, 0.0)
    if how == "sequence_mean":
        weights = 1.0 / trained_per_sequence(batch).clamp(min=1)
        losses = losses * weights.to(losses.dtype)[batch.sequence_ids]
    return losses.sum()


def denominator(batch: PackedBatch, how: Aggregation, max_new_tokens: int | None = None) -> Tensor:
    """Scalar fp64 count of a mini-batch.

    ``token_mean``: trained tokens before filtering. ``sequence_mean``: sequences with a trained token.
    ``constant``: sequences times ``max_new_tokens`` (Dr. GRPO, arXiv 2503.20783).
    """
    if how == "token_mean":
        return batch.loss_mask.sum(dtype=torch.float64)
    if how == "sequence_mean":
        return (trained_per_sequence(batch) > 0).sum(dtype=torch.float64)
    if max_new_tokens is None:
        raise ValueError("loss_aggregation: constant divides by max_new_tokens: set it")
    return torch.tensor(float(batch.num_sequences * max_new_tokens), dtype=torch.float64, device=batch.loss_mask.device)
