"""What a rank holds of named tensors, and how torch.distributed.checkpoint writes and reads it.

Every rank holds one rectangular block of a tensor, or nothing of it. A checkpoint lists the blocks it consists of, so
it can be read into any others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

_SHOWN = 5  # names in an error


class Block(NamedTuple):
    """This rank's part of a tensor: ``data`` lies at ``offsets`` in the whole, which has ``shape``."""

    shape: torch.Size
    offsets: torch.Size
    data: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The place of the block, in torch's words."""
        return ChunkStorageMetadata(offsets=self.offsets, sizes=self.data.shape)


def local_blocks(tensors: Mapping[str, Tensor], *, copy: bool = False) -> dict[str, Block]:
    """The block that this rank holds of each tensor, without those of which it holds nothing.

    Args:
        tensors: plain tensors, of which a rank holds the whole, and DTensors.
        copy: copy the blocks to host memory; otherwise they are views, and filling them fills the tensors.

    Raises:
        ValueError: a tensor has no values of its own (meta device, partial sums), or more than one block on a rank.
    """
    found = {name: _local_block(name, tensor.detach()) for name, tensor in tensors.items()}
    blocks = {name: block for name, block in found.items() if block is not None}
    if not copy:
        return blocks
    return {name: block._replace(data=block.data.to("cpu", copy=True)) for name, block in blocks.items()}


def _local_block(name: str, tensor: Tensor) -> Block | None:
    if tensor.is_meta:
        raise ValueError(f"{name} is on the meta device and holds no values: materialize it first")
    if not isinstance(tensor, DTensor):
        return Block(tensor.shape, torch.Size([0] * tensor.ndim), tensor)
    if tensor.device_mesh.get_coordinate() is None:
        return None
    _check_placements(name, tensor)
    (chunk,) = tensor.__create_chunk_list__()
    data = tensor.to_local()
    if data.shape != chunk.sizes:
        raise ValueError(
            f"{name}: this rank holds {tuple(data.shape)} of {tuple(tensor.shape)}, but {tensor.placements} on a mesh "
            f"{tuple(tensor.device_mesh.shape)} would give it {tuple(chunk.sizes)}"
        )
    return None if data.numel() == 0 < tensor.numel() else Block(tensor.shape, chunk.offsets, data)


def _check_placements(name: str, tensor: DTensor) -> None:
    """ValueError unless the placements give every rank one contiguous block of the whole."""
    placements, sizes = tensor.placements, tensor.device_mesh.shape
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(f"{name} is a sum over ranks that is still to be taken ({placements}): redistribute it")
        # FSDP over tensor parallel on one dimension: the later axes of the mesh cut it first, this one each part again.
        parts = getattr(placement, "split_factor", 1)
        if parts == 1:
            continue
        later = zip(placements[axis + 1 :], sizes[axis + 1 :], strict=True)
        cuts = [size for other, size in later if getattr(other, "dim", None) == getattr(placement, "dim", None)]
        if parts != math.prod(cuts):
            raise ValueError(
                f"{name}: {placements} on a mesh {tuple(sizes)} gives a rank rows that are not next to each other; "
                "store the tensor as a view with one more dimension, and shard that"
            )


class BlockSavePlanner(dcp.DefaultSavePlanner):
    """Writes blocks; of those that several ranks hold, one, spread evenly. State dict: name to ``Block``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        return SavePlan([self._write_item(name, block) for name, block in self.state_dict.items()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        kinds: dict[str, str] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                assert item.tensor_data is not None
                kind = _kind(item.tensor_data.size, item.tensor_data.properties.dtype)
                if kinds.setdefault(item.index.fqn, kind) != kind:
                    raise ValueError(f"{item.index.fqn} is {kind} on rank {rank}, {kinds[item.index.fqn]} on another")
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].data

    @staticmethod
    def _write_item(name: str, block: Block) -> WriteItem:
        data = TensorWriteData(block.chunk, TensorProperties.create_from_tensor(block.data), block.shape)
        return WriteItem(MetadataIndex(name, block.offsets), WriteItemType.SHARD, tensor_data=data)


class BlockLoadPlanner(LoadPlanner):
    """Reads into blocks what overlaps them, however it was cut when it was written. State dict: name to ``Block``.

    Args:
        strict_names: beginning of the stored names that some rank must ask for; None for no name.
    """

    def __init__(self, strict_names: str | None) -> None:
        self.strict_names = strict_names

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self.blocks: dict[str, Block] = state_dict
        self.stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        missing = self.blocks.keys() - self.stored.keys()
        if missing:
            raise ValueError(f"the checkpoint lacks {_listed(missing)}")
        items: list[ReadItem] = []
        for name, block in self.blocks.items():
            stored = self.stored[name]
            if not isinstance(stored, TensorStorageMetadata):
                raise ValueError(f"{name} is not a tensor in the checkpoint")
            there, here = _kind(stored.size, stored.properties.dtype), _kind(block.shape, block.data.dtype)
            if there != here:
                raise ValueError(f"{name} is {there} in the checkpoint, {here} here")
            items += create_read_items_for_chunk_list(name, stored, [block.chunk])
        return LoadPlan(items, planner_data=list(self.blocks))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        asked = {name for plan in global_plan for name in plan.planner_data}
        strict = () if self.strict_names is None else self.strict_names
        if left_over := {name for name in self.stored.keys() - asked if name.startswith(strict)}:
            raise ValueError(f"no rank asks for {_listed(left_over)}, which the checkpoint holds")
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise TypeError(f"{read_item.dest_index.fqn} is not a tensor in the checkpoint")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        where = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self.blocks[read_item.dest_index.fqn].data[tuple(slice(start, start + size) for start, size in where)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: ``resolve_tensor`` gave a view."""


def _kind(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{list(shape)} {dtype}"


def _listed(names: Iterable[str]) -> str:
    first = sorted(names)
    return ", ".join(first[:_SHOWN]) + (f" and {len(first) - _SHOWN} more" if len(first) > _SHOWN else "")
