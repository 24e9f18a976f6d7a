"""A canary: log-probs of fixed tokens prove which weights are resident in an engine, whatever its digests say."""

from __future__ import annotations

import torch
from torch import Tensor

from archon.batch import PackedBatch
from areal.inference.backend import Backend, BackendError

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}
"""Largest mean absolute difference of log-probs, in nats: rounding stays below it, stale weights do not."""


def canary_batch(vocab_size: int, *, sequences: int = 2, length: int = 16) -> PackedBatch:
    """Fixed pseudo-random sequences over a vocabulary."""
    ids = torch.randint(vocab_size, (sequences, length), generator=torch.Generator().manual_seed(0))
    return PackedBatch.from_sequences([{"input_ids": row} for row in ids])


async def check_canary(backend: Backend, batch: PackedBatch, expected: Tensor, tolerance: float) -> float:
    """Compare the engine's log-probs with the trainer's.

    Args:
        expected: ``[T]`` log-probs of ``batch`` under the published weights.

    Returns:
        The mean absolute difference in nats.

    Raises:
        BackendError: the engine computes with other weights than it reports.
    """
    sequences = [row.tolist() for row in batch.input_ids.split(batch.lengths.tolist())]
    scored = torch.tensor([value for row in await backend.score(sequences) for value in row])
    difference = float((scored - expected)[batch.loss_mask].abs().mean())
    if not difference <= tolerance:
        raise BackendError(
            f"the engine reports version {backend.version} but its log-probs of the canary differ from the trainer's "
            f"by {difference:.4f} nats (tolerance {tolerance}): its resident weights are not those it received"
        )
    return difference
