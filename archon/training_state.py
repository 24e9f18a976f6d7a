"""What a checkpoint holds: parameters, router biases and optimizer states, under names that no layout changes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard

from archon.optim import local_shard
from archon.weights import stored_tensors

_GATE_UP = re.compile(r".+\.experts\.gate_up_proj")


def training_state(parts: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """``model.<name>`` and ``optimizer.<state>.<name>`` of what this process holds, sharing memory with it.

    Local optimizer states are described as their parameters are. A stack of gate and up projections goes by its view
    ``[E, 2, F, D]``, which every layout can cut. Of an embedding that two parts hold, the first stands for both.
    """
    state: dict[str, Tensor] = {}
    for name, tensor in _first_copies(parts):
        state[f"model.{name}"] = _portable(name, tensor, tensor)
        for kind, value in _optimizer_states(optimizer, tensor):
            state[f"optimizer.{kind}.{name}"] = value if value.ndim == 0 else _portable(name, value, tensor)
    return state


@torch.no_grad()
def copy_second_embedding(parts: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None) -> None:
    """Bring a second part's copy of the embedding to what the first holds, after that was loaded."""
    first = dict(_first_copies(parts))
    for part in parts:
        for name, tensor in stored_tensors(part):
            if tensor is not first[name]:
                local_shard(tensor).copy_(local_shard(first[name]))
                for (_, mine), (_, loaded) in zip(
                    _optimizer_states(optimizer, tensor), _optimizer_states(optimizer, first[name]), strict=True
                ):
                    mine.copy_(loaded)


def _first_copies(parts: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    seen = set()
    for part in parts:
        for name, tensor in stored_tensors(part):
            if name not in seen:
                seen.add(name)
                yield name, tensor


def _optimizer_states(optimizer: torch.optim.Optimizer | None, tensor: Tensor) -> list[tuple[str, Tensor]]:
    if optimizer is None:
        return []
    return [(kind, value) for kind, value in optimizer.state.get(local_shard(tensor), {}).items() if value is not None]


def _portable(name: str, value: Tensor, parameter: Tensor) -> Tensor:
    """``value``, distributed as ``parameter`` is, in the shape that all layouts share."""
    local, shape = local_shard(value), list(parameter.shape)
    unfold = _GATE_UP.fullmatch(name) is not None and len(shape) == 3
    if unfold:
        local = local.detach().unflatten(1, (2, -1))
        shape[1:2] = [2, shape[1] // 2]
    if not isinstance(parameter, DTensor):
        return local.detach()
    placements = [_shifted(where) if unfold else where for where in parameter.placements]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local.detach(), parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _shifted(where: Placement) -> Placement:
    """A placement of ``[E, 2F, D]`` on ``[E, 2, F, D]``; nothing shards 2F."""
    return Shard(3) if where.is_shard(2) else where
