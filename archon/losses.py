"""The contract between the engine and a loss, and the supervised loss. RL losses live in ``areal.algorithms``."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from archon.batch import PackedBatch

Metric = tuple[Tensor, Tensor]
"""A (sum, count) pair of fp64 or fp32 scalars; the engine adds pairs up over micro-batches and ranks, then divides."""


@dataclass(frozen=True)
class TokenOutputs:
    """What a forward pass gives a loss; entries that nobody asked for are None.

    Attributes:
        logprobs: ``[T]`` fp32, of token t given tokens < t at the sequence's temperature; 0 where the mask is 0.
        entropy: ``[T]`` fp32 nats, of the distribution token t was drawn from; 0 where the mask is 0.
        values: ``[T]`` fp32, from the hidden state of token t-1.
        last_value: ``[N]`` fp32, from the last hidden state of each sequence.
        routed_experts: ``[T, L, K]`` int64 choices of the K experts of each token in the L sparse layers.
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    last_value: Tensor | None = None
    routed_experts: Tensor | None = None


@dataclass(frozen=True)
class Loss:
    """A summed loss (fp32 scalar, not yet divided by the denominator) and its metrics as (sum, count) pairs."""

    sum: Tensor
    metrics: dict[str, Metric] = field(default_factory=dict)


@runtime_checkable
class LossFn(Protocol):
    """Three pure methods. A loss keeps no state between calls and never knows about parallelism or micro-batches."""

    outputs: tuple[str, ...]
    """Fields of TokenOutputs that ``__call__`` reads."""

    def prepare(self, batch: PackedBatch) -> PackedBatch:
        """Once per step, on the whole batch, without gradient: rewards, normalisation, advantages, filter masks."""
        ...

    def denominator(self, batch: PackedBatch) -> Tensor:
        """Scalar fp64 count of one mini-batch that its summed loss is divided by."""
        ...

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> Loss: ...


@dataclass(frozen=True)
class LossSpec:
    """Names a loss by import path and keyword arguments, so that it crosses process borders as text.

    ``LossSpec("archon.losses.SupervisedLoss").build()``
    """

    import_path: str
    config: dict[str, Any] = field(default_factory=dict)

    def build(self) -> LossFn:
        """Import and construct the loss.

        Raises:
            ImportError: the module or the attribute does not exist.
            TypeError: the constructor refuses the configuration, or the result is no LossFn.
        """
        module_name, _, attribute = self.import_path.rpartition(".")
        try:
            factory = getattr(importlib.import_module(module_name), attribute)
        except (ValueError, AttributeError) as error:
            raise ImportError(f"no loss at {self.import_path!r}: give 'package.module.Class'") from error
        loss = factory(**self.config)
        if not isinstance(loss, LossFn):
            raise TypeError(f"{self.import_path} is no LossFn: it needs outputs, prepare, denominator and __call__")
        return loss


class SupervisedLoss:
    """Mean negative log-likelihood of the tokens under the mask, over the whole batch."""

    outputs = ("logprobs",)

    def prepare(self, batch: PackedBatch) -> PackedBatch:
        return batch

    def denominator(self, batch: PackedBatch) -> Tensor:
        return batch.loss_mask.sum(dtype=torch.float64)

    def __call__(self, outputs: TokenOutputs, batch: PackedBatch) -> Loss:
        assert outputs.logprobs is not None
        nll = torch.where(batch.loss_mask, -outputs.logprobs, 0.0).sum()
        count = batch.loss_mask.sum()
        return Loss(nll, {"nll": (nll.detach(), count)})
