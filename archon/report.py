"""What one training step reports: sums that add up over micro-batches and processes, divided at the end."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)


class StepReport:
    """Sums of one training step, in fp64."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        self.loss = 0.0
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.skipped = 0
        self.micro_batches = 0

    def add(self, loss: float, metrics: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """The share of one micro-batch in the loss, and its metrics as (sum, count)."""
        self.loss += loss
        for name, (value, count) in metrics.items():
            self._add(name, float(value), float(count))

    def _add(self, name: str, value: float, count: float) -> None:
        total, number = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (total + value, number + count)

    def update(self, norm: float) -> None:
        """An optimizer update was made from everything added since the last."""
        self.losses.append(self.loss)
        self.norms.append(norm)
        self.loss = 0.0

    def skip(self, reason: str) -> None:
        """An optimizer update was left out."""
        logger.warning("optimizer update skipped: %s", reason)
        self.skipped += 1
        self.loss = 0.0

    def gather(self, group: ProcessGroup) -> None:
        """Add the sums of all processes together; each then has the same."""
        everyone: list[tuple[dict[str, tuple[float, float]], list[float]]] = [({}, [])] * group.size()
        dist.all_gather_object(everyone, (self.sums, self.losses), group=group)
        self.sums, self.losses = {}, [sum(losses) for losses in zip(*(losses for _, losses in everyone), strict=True)]
        for sums, _ in everyone:
            for name, (value, count) in sums.items():
                self._add(name, value, count)

    def metrics(self) -> dict[str, float]:
        means = {name: total / number for name, (total, number) in self.sums.items() if number}
        return {
            **means,
            "loss": sum(self.losses) / len(self.losses) if self.losses else 0.0,
            "grad_norm": max(self.norms, default=0.0),
            "skipped_updates": float(self.skipped),
            "micro_batches": float(self.micro_batches),
        }
