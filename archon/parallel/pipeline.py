"""Running micro-batches through the parts of a model: one after another, or through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from archon import phase
from archon.layout import Layout
from archon.mesh import Ranks
from archon.micro_batch import MicroBatch
from archon.models.config import ModelConfig
from archon.models.decoder import Decoder, Part
from archon.options import Options
from archon.parallel.stages import num_stages, rank_of_stage, stage_layers

LossOf = Callable[[MicroBatch, Tensor], Tensor]
"""Columns of the head to this micro-batch's share of the loss, a scalar that backward starts from."""


def model_parts(config: ModelConfig, layout: Layout, options: Options) -> list[Part]:
    """The part of the model that each stage of the pipeline holds."""
    total = num_stages(layout, config.num_hidden_layers, options)
    less = (0, 0) if total == 1 else (options.pp_first_stage_less_layers, options.pp_last_stage_less_layers)
    layers = stage_layers(config.num_hidden_layers, total, *less)
    return [Part(layers[stage], first=stage == 0, last=stage == total - 1) for stage in range(total)]


class Pipeline:
    """The parts of a model on this process, and the order in which micro-batches go through them.

    Attributes:
        broken: a backward pass did not come to its end.

    Args:
        parts: by stage.
        total: stages of the whole pipeline.
        ranks: the place of this process.
        options: the schedule.
        dtype: of the hidden states between stages.
    """

    def __init__(
        self, parts: dict[int, Decoder], total: int, ranks: Ranks, options: Options, dtype: torch.dtype
    ) -> None:
        self.parts, self.total, self.ranks, self.dtype = parts, total, ranks, dtype
        self.config = next(iter(parts.values())).config
        self.schedule = options.pp_schedule
        self.broken = False

    @property
    def last(self) -> bool:
        """Whether this process holds the last stage, and so sees the head's columns."""
        return self.total - 1 in self.parts

    def forward(self, batches: Sequence[MicroBatch]) -> Iterator[Tensor | None]:
        """Columns of the head of each micro-batch, in order; None where the last stage is on another process.

        Stage by stage, each over all micro-batches, so that every stage works while the ones before it go on.
        """
        waiting: list[Any] = []
        hidden: list[Tensor | None] = [None] * len(batches)
        for stage, part in self.parts.items():
            for number, batch in enumerate(batches):
                with phase.of("forward", number):
                    x = batch.input_ids if stage == 0 else self._receive(hidden[number], stage, batch)
                    out = run_part(part, batch, x)
                    if stage == self.total - 1:
                        yield out
                    elif (peer := self.rank_of(stage + 1)) == self.ranks.rank:
                        hidden[number] = out
                    else:
                        waiting.append(dist.isend(out.contiguous(), peer, group=self.ranks.pipeline))
        for work in waiting:
            work.wait()
        if not self.last:
            yield from (None for _ in batches)

    def _receive(self, kept: Tensor | None, stage: int, batch: MicroBatch) -> Tensor:
        if kept is not None:
            return kept
        hidden = self._hidden_like(batch)
        dist.recv(hidden, self.rank_of(stage - 1), group=self.ranks.pipeline)
        return hidden

    def _hidden_like(self, batch: MicroBatch) -> Tensor:
        rows = batch.input_ids.shape[0] // self.ranks.layout.tensor
        return torch.empty(rows, self.config.hidden_size, dtype=self.dtype, device=batch.input_ids.device)

    def rank_of(self, stage: int) -> int:
        """Rank, in the whole job, that holds a stage of this process's copy of the model."""
        where = rank_of_stage(self.schedule, stage, self.ranks.layout.pipeline)
        return self.ranks.layout.rank(self.ranks.place._replace(pipeline=where))

    def train(self, batches: Sequence[MicroBatch], loss_of: LossOf) -> None:
        """Forward and backward of every micro-batch; gradients add up in the parameters."""
        if self.total == 1:
            (part,) = self.parts.values()
            for number, batch in enumerate(batches):
                with phase.of("forward/backward", number):
                    loss = loss_of(batch, run_part(part, batch, batch.input_ids))
                    self._unless_broken(loss.backward)
            return
        self._unless_broken(lambda: self._train_stages(batches, loss_of))

    def _unless_broken(self, backward: Callable[[], object]) -> None:
        self.broken = True
        backward()
        self.broken = False

    def _train_stages(self, batches: Sequence[MicroBatch], loss_of: LossOf) -> None:
        from archon.parallel.schedule import run_schedule  # loads torch's compiler, which one stage does without

        run_schedule(
            self.parts,
            batches,
            loss_of,
            schedule=self.schedule,
            total=self.total,
            hidden=self._hidden_like(batches[0]),
            group=self.ranks.pipeline,
        )


def run_part(part: nn.Module, batch: MicroBatch, x: Tensor) -> Tensor:
    """One part of the model on one micro-batch; see ``Decoder.forward``."""
    return part(x, batch.position_ids, batch.cu_seqlens, head=batch.head, routing=batch.routing)
