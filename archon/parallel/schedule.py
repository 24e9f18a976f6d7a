"""A training step over the stages of a pipeline, in the order of one of torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from archon import phase
from archon.micro_batch import MicroBatch
from archon.models.decoder import Decoder
from archon.options import Schedule
from archon.parallel.pipeline import run_part


def run_schedule(
    parts: Mapping[int, Decoder],
    batches: Sequence[MicroBatch],
    loss_of: Callable[[MicroBatch, Tensor], Tensor],
    *,
    schedule: Schedule,
    total: int,
    hidden: Tensor,
    group: ProcessGroup | None,
) -> None:
    """Forward and backward of all micro-batches; gradients add up in the parameters of the parts.

    Shapes are those of this step, so stages and schedule are made anew; what is costly in them are the parts.

    Args:
        parts: of this process, by stage.
        batches: as many as the schedule takes, all of one size.
        loss_of: called on the process of the last stage.
        total: stages of the whole pipeline.
        hidden: like what travels between stages.
        group: the processes of the pipeline.
    """
    last = total - 1 in parts
    stages = []
    for number, part in parts.items():
        columns = torch.empty(len(batches[0].head.outputs), batches[0].input_ids.shape[0], device=hidden.device)
        stage = _Stage(
            part,
            number,
            total,
            hidden.device,
            input_args=batches[0].input_ids if number == 0 else hidden.requires_grad_(),
            output_args=(columns if number == total - 1 else hidden).requires_grad_(),
            group=group,
        )
        stage.has_backward = True
        stage.clear_runtime_states()
        stages.append(stage)
    runtime = get_schedule_class(schedule)(
        stages[0] if schedule == "1F1B" else stages,
        n_microbatches=len(batches),
        loss_fn=lambda columns, batch: loss_of(batch, columns),
        scale_grads=False,  # the loss is divided by a global count already
    )
    inputs = [(batch.input_ids,) if 0 in parts else () for batch in batches]
    context = [{"micro_batch": batch, "number": number} for number, batch in enumerate(batches)]
    # The public ``step`` would cut one large tensor; these are micro-batches already.
    runtime._step_microbatches(inputs, context, list(batches) if last else None, [] if last else None)


class _Stage(PipelineStage):
    """A stage that also gives its part what the micro-batch is: borders, positions, what to predict.

    Phases are entered and not left, so that a wait for a neighbour is told by the micro-batch before it.
    """

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        phase.set("forward", kwargs["number"])
        return run_part(self.submod, kwargs["micro_batch"], *args)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        phase.set("backward", bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        phase.set("backward of weights", bwd_chunk_id)
        return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
