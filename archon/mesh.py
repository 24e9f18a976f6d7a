"""Layout to device meshes and process groups. The only place that creates groups."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from archon.device import collectives_backend
from archon.layout import Layout


def data_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The one-dimensional mesh over which parameters are sharded.

    A process outside any launcher gets a process group of its own of size 1, over an in-memory store.

    Raises:
        ValueError: the layout asks for more processes than one.
    """
    if layout.world_size != 1:
        raise ValueError(f"layout {layout} needs {layout.world_size} processes and the engine runs in one: use d1")
    if not dist.is_initialized():
        dist.init_process_group(collectives_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (1,), mesh_dim_names=("data",))
