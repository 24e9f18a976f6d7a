"""The model of one process: its parts, distributed as the layout says, and its weights as one stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from archon import weights
from archon.layout import Coordinates
from archon.mesh import Ranks
from archon.models.config import ModelConfig
from archon.models.decoder import Decoder, Part
from archon.optim import local_shard
from archon.options import Options
from archon.parallel.compiled import compile_layer
from archon.parallel.data import shard_model
from archon.parallel.pipeline import Pipeline, model_parts
from archon.parallel.stages import stages_of_rank
from archon.parallel.tensor import distribute_parameters

_FIRST = Coordinates(0, 0, 0, 0, 0)


class ShardedModel:
    """A decoder spread over the processes of a layout; every process makes the same calls.

    Attributes:
        parts: what this process holds, by pipeline stage.
        pipeline: runs micro-batches through them.
        whole: the undistributed model on the meta device: names and shapes of everything.
    """

    def __init__(
        self,
        config: ModelConfig,
        ranks: Ranks,
        options: Options,
        *,
        dtype: torch.dtype,
        device: torch.device,
        is_critic: bool,
    ) -> None:
        self.config, self.ranks, self.options = config, ranks, options
        self.dtype, self.device, self.is_critic = dtype, device, is_critic
        with torch.device("meta"):
            self.whole = Decoder(config, options=options, is_critic=is_critic)
        self._split = model_parts(config, ranks.layout, options)
        mine = stages_of_rank(options.pp_schedule, ranks.place.pipeline, ranks.layout.pipeline, len(self._split))
        self.parts = {stage: self._build(self._split[stage]) for stage in mine}
        self.pipeline = Pipeline(self.parts, len(self._split), ranks, options, dtype)

    def _build(self, part: Part) -> Decoder:
        with torch.device("meta"):
            model = Decoder(self.config, part, ranks=self.ranks, options=self.options, is_critic=self.is_critic)
            distribute_parameters(model, self.config, self.ranks)
        if self.options.compile is not None:
            for layer in model.model.layers.values():
                compile_layer(layer, self.options.compile)
        shard_model(model, self.ranks, self.dtype, self.options)
        return model.to_empty(device="cpu" if self.options.offload_params else self.device)

    def train_mode(self, training: bool) -> None:
        for part in self.parts.values():
            part.train(training)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What this process holds, without the second copy of an embedding that two stages share."""
        for part in self.parts.values():
            for name, parameter in part.named_parameters():
                if name != weights.EMBEDDING or part.part.first:
                    yield name, parameter

    @property
    def all_parameters(self) -> list[nn.Parameter]:
        """What this process holds, second copies included."""
        return [parameter for part in self.parts.values() for parameter in part.parameters()]

    def rest(self) -> None:
        """Drop gradients, and the gathered copies that ``fully_shard`` leaves in the place of parameters."""
        for part in self.parts.values():
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            for parameter in part.parameters():
                parameter.grad = None

    def share_embedding_gradient(self) -> None:
        """Where the first and the last stage hold the same embedding, give both the sum of their gradients."""
        if self.is_critic:  # its head is no embedding
            return
        group = self.ranks.tied_embedding
        held = [part.model.embed_tokens.weight for part in self.parts.values() if hasattr(part.model, "embed_tokens")]
        gradients = []
        for weight in held:
            assert weight.grad is not None  # a rank that had none would leave the others waiting
            gradients.append(local_shard(weight.grad))
        if group is not None and gradients:
            total = gradients[0].to(self.device)  # offloaded gradients are on the host
            dist.all_reduce(total, group=group)
            gradients[0].copy_(total)
        elif len(gradients) == 2:  # a schedule that brings the last stage back to the process of the first
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])

    def load(self, named: weights.NamedTensors) -> None:
        """Fill the parts from the weights of the whole model, which every process reads; see ``weights.load_named``."""
        weights.load_named(list(self.parts.values()), named, whole=self.whole)

    def load_folder(self, path: Path) -> None:
        """Load a model folder; see ``weights.load_folder``."""
        weights.load_folder(list(self.parts.values()), path, whole=self.whole)

    @torch.no_grad()
    def stream(self, dtype: torch.dtype | None = None, *, everywhere: bool = True) -> Iterator[tuple[str, Tensor]]:
        """``(disk name, CPU tensor)`` of the whole model, one tensor in memory gathered at a time.

        A collective: every process iterates to the end. A tensor may share memory with the model.

        Args:
            dtype: cast before anything travels; None keeps fp32.
            everywhere: False gives the tensors to rank 0, and an empty stream, which takes as long, to the others.
        """
        stored: dict[str, Tensor] = {}
        for part in self.parts.values():
            stored = dict(weights.stored_tensors(part)) | stored  # of two copies, the first
        holders = self._holders()
        receives = everywhere or self.ranks.rank == 0
        # Every copy of the pipeline has the whole model; that of rank 0 is enough for rank 0.
        passes_on = self.ranks.pipeline is not None and (everywhere or self.ranks.place._replace(pipeline=0) == _FIRST)
        for name, template in weights.stored_tensors(self.whole):
            # Rounded, a balance bias would flip the choices that it was moved to flip.
            cast = torch.float32 if name.endswith(weights.BALANCE_BIAS) else dtype or template.dtype
            value = weights.whole_tensor(stored[name], cast) if holders[name] == self.ranks.rank else None
            if passes_on:
                if value is None:
                    value = torch.empty(template.shape, dtype=cast, device=self.device)
                value = value.to(self.device).reshape(template.shape).contiguous()
                dist.broadcast(value, holders[name], group=self.ranks.pipeline)
            if receives and value is not None:
                yield from weights.split_stack(name, value.reshape(template.shape).cpu())

    def _holders(self) -> dict[str, int]:
        """By name in memory, the rank of this copy's pipeline that holds the tensor."""
        last = len(self._split) - 1
        stage_of = {layer: stage for stage, part in enumerate(self._split) for layer in part.layers}
        holders = {}
        for name, _ in weights.stored_tensors(self.whole):
            layer = weights.layer_of(name)
            stage = stage_of[layer] if layer is not None else 0 if name == weights.EMBEDDING else last
            holders[name] = self.pipeline.rank_of(stage)
        return holders
