"""A short supervised start: reinforcement learning can only raise what a policy already does now and then."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch

from archon.batch import PackedBatch
from archon.losses import LossSpec
from areal.training import TrainerClient


def supervised_row(prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> dict[str, Any]:
    """One sequence whose answer is trained and whose prompt is not."""
    mask = [False] * len(prompt_ids) + [True] * len(answer_ids)
    return {"input_ids": [*prompt_ids, *answer_ids], "loss_mask": mask}


def warm_start(
    engine: TrainerClient,
    rows: Sequence[Mapping[str, Any]],
    *,
    steps: int,
    batch_size: int,
    target_loss: float | None,
    seed: int,
    report: Callable[[int, dict[str, float]], None],
) -> None:
    """Train at most ``steps`` supervised steps on rows drawn without replacement, reshuffled at each pass.

    Args:
        rows: what ``supervised_row`` gives.
        target_loss: nats per token; end as soon as the mean of the last 5 steps is at or below it.
        seed: of the order; the result is a function of it.
        report: called after each step with its 1-based number and metrics.

    Raises:
        ValueError: fewer rows than one batch needs.
    """
    if len(rows) < batch_size:
        raise ValueError(f"warm_start.batch_size is {batch_size}, the warm-start dataset has {len(rows)} rows")
    generator = torch.Generator().manual_seed(seed)
    loss = LossSpec("archon.losses.SupervisedLoss")
    order: list[int] = []
    recent: deque[float] = deque(maxlen=5)
    for step in range(steps):
        if len(order) < batch_size:
            order = torch.randperm(len(rows), generator=generator).tolist()
        chosen, order = order[:batch_size], order[batch_size:]
        batch = PackedBatch.from_sequences([rows[index] for index in chosen])
        metrics = engine.train_step(batch, loss)
        report(step + 1, metrics)
        recent.append(metrics["loss"])
        if target_loss is not None and len(recent) == recent.maxlen and fmean(recent) <= target_loss:
            return
