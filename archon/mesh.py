"""Layout to device meshes and process groups: the groups of a layout are created here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from archon.device import collectives_backend
from archon.layout import Coordinates, Layout
from archon.models.config import ModelConfig
from archon.options import Options
from archon.parallel.context import ContextGroups, ulysses_degree


@dataclass(frozen=True, eq=False)
class Ranks:
    """The place of this process in a layout, and the groups it talks to. A group of one process is None.

    Attributes:
        rank: of this process.
        shards: mesh over which ``fully_shard`` splits dense parameters: data x context ranks, below replicas if any.
        expert_shards: the same for experts.
        tensor_mesh: mesh of the tensor axis, for the storage of split dense parameters; None without the axis.
        expert_mesh: mesh (expert, expert tensor), for the storage of experts; None where neither axis is there.
        pipeline: ranks that hold the stages of one copy of the model.
        tensor, expert, expert_tensor: ranks along one axis.
        context: ranks along the context axis, and as ring and ulysses below it.
        sequence: context x tensor ranks, which together hold the tokens of one micro-batch.
        tied_embedding: the ranks of the first and of the last stage, where they share the embedding.
        host: all ranks, for tensors on the CPU.
        background: the same, for nothing but saving in the background.
    """

    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    shards: DeviceMesh | None = None
    expert_shards: DeviceMesh | None = None
    tensor_mesh: DeviceMesh | None = None
    expert_mesh: DeviceMesh | None = None
    pipeline: ProcessGroup | None = None
    tensor: ProcessGroup | None = None
    context: ProcessGroup | None = None
    context_groups: ContextGroups = field(default_factory=ContextGroups)
    sequence: ProcessGroup | None = None
    expert: ProcessGroup | None = None
    expert_tensor: ProcessGroup | None = None
    tied_embedding: ProcessGroup | None = None
    host: ProcessGroup | None = None
    background: ProcessGroup | None = None

    @property
    def place(self) -> Coordinates:
        """Dense coordinates of this process."""
        return self.layout.coordinates(self.rank)

    @property
    def data_index(self) -> int:
        """Which of the ``num_data`` shares of a batch this process trains on."""
        return self.place.replica * self.layout.data + self.place.data

    @property
    def num_data(self) -> int:
        """Shares that a batch is dealt into: data shards times replicas."""
        return self.layout.replicas * self.layout.data

    @property
    def shares_outputs(self) -> bool:
        """Whether this process speaks for its share of the batch, as one of the context x tensor ranks does."""
        return self.place.context == 0 and self.place.tensor == 0


SINGLE = Ranks()
"""One process without any group."""


def running_processes() -> int:
    """Processes of this job: of the default group, of the launcher's environment, or one."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_ranks(layout: Layout, config: ModelConfig, options: Options, device: torch.device) -> Ranks:
    """Create the meshes and groups of a layout; every process calls it, and all of them create the same ones.

    The default process group is the caller's, or is made here: from the launcher's environment, or, outside any
    launcher, of this one process. The layout must have passed ``check_fit``.
    """
    backend = collectives_backend(device)
    if not dist.is_initialized():
        if layout.world_size > 1:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    if layout.world_size == 1:
        return Ranks(layout, rank, shards=init_device_mesh(device.type, (1,), mesh_dim_names=("shard",)))

    def mesh(**axes: int) -> DeviceMesh:
        return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    dense = mesh(
        pipeline=layout.pipeline,
        replicate=layout.replicas,
        shard=layout.data * layout.context,
        tensor=layout.tensor,
    )
    sharded = ("replicate", "shard") if layout.replicas > 1 else ("shard",)
    ranks: dict[str, Any] = {
        "shards": dense[sharded],
        "tensor_mesh": dense["tensor"] if layout.tensor > 1 else None,
        "pipeline": _group(dense, "pipeline"),
        "tensor": _group(dense, "tensor"),
    }
    if config.moe is not None:
        experts = mesh(
            pipeline=layout.pipeline,
            replicate=layout.replicas,
            shard=layout.expert_data,
            expert=layout.expert,
            expert_tensor=layout.expert_tensor,
        )
        ranks["expert_shards"] = experts[sharded]
        if layout.expert * layout.expert_tensor > 1:
            ranks["expert_mesh"] = experts["expert", "expert_tensor"]
        ranks["expert"], ranks["expert_tensor"] = _group(experts, "expert"), _group(experts, "expert_tensor")
    if layout.context > 1:
        degree = ulysses_degree(options.context, config.num_attention_heads // layout.tensor, layout.context)
        context = mesh(
            outer=layout.pipeline * layout.replicas * layout.data,
            ring=layout.context // degree,
            ulysses=degree,
            tensor=layout.tensor,
        )
        ranks["context_groups"] = ContextGroups(ring=_group(context, "ring"), ulysses=_group(context, "ulysses"))
        ranks["context"] = _subgroup(rank, layout.groups("c"))
    if layout.context * layout.tensor > 1:
        ranks["sequence"] = _subgroup(rank, layout.groups("c", "t"))
    if layout.pipeline > 1 and config.tie_word_embeddings and options.pp_schedule != "ZBVZeroBubble":
        ranks["tied_embedding"] = _subgroup(rank, [(stages[0], stages[-1]) for stages in layout.groups("p")])
    # The default group may be the caller's, and know only accelerators.
    ranks["host"], ranks["background"] = (dist.new_group(backend="gloo") for _ in range(2))
    return Ranks(layout, rank, **ranks)


def _group(mesh: DeviceMesh, axis: str) -> ProcessGroup | None:
    group = mesh.get_group(axis)
    return group if group.size() > 1 else None


def _subgroup(rank: int, groups: Sequence[tuple[int, ...]]) -> ProcessGroup | None:
    """Create all of these groups and return the one that this rank belongs to."""
    mine = None
    for members in groups:
        group = dist.new_group(list(members))
        if rank in members:
            mine = group
    return mine
