"""What a process sends to others while a block of code runs: bytes by kind of collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_OPERATORS = {
    "all-gather": (
        "_allgather_base_",
        "allgather_",
        "allgather_coalesced_",
        "allgather_into_tensor_coalesced_",
        "all_gather_into_tensor",
        "all_gather_into_tensor_out",
        "all_gather_into_tensor_coalesced",
    ),
    "reduce-scatter": (
        "_reduce_scatter_base_",
        "reduce_scatter_",
        "reduce_scatter_tensor_coalesced_",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_out",
        "reduce_scatter_tensor_coalesced",
    ),
    "all-reduce": (
        "allreduce_",
        "allreduce_coalesced_",
        "all_reduce",
        "all_reduce_",
        "all_reduce_coalesced",
        "all_reduce_coalesced_",
    ),
    "all-to-all": ("alltoall_base_", "alltoall_", "all_to_all_single"),
    "send/recv": ("send", "isend"),
    "broadcast": ("broadcast_", "broadcast"),
}
"""Operators that move data, of torch.distributed and of its functional collectives, which share no name."""
_KIND_OF = {name: kind for kind, names in _OPERATORS.items() for name in names}
_FREE = {
    "recv_",
    "recv_any_source_",
    "irecv",
    "barrier",
    "monitored_barrier_",
    "check_for_nan",
    "wait_tensor",
    "_wrap_tensor_autograd",
}
"""Operators that send no data, or data that the sender counts."""
_INPUTS = ("input_tensor", "input_tensors", "input_list", "inputs", "input", "tensors", "tensor")
"""Names of the argument that holds what an operator sends."""


class CommunicationCounter(TorchDispatchMode):
    """Counts what this process sends while the mode is on, forward and backward, whoever calls the collective.

    A collective counts as many bytes as its bandwidth-optimal algorithm sends from each of n ranks: all-gather (n-1)
    times what a rank gives, reduce-scatter (n-1)/n of its input, all-reduce 2(n-1)/n, all-to-all what goes to other
    ranks, broadcast (n-1)/n, send all of it. Receiving counts nothing, so sums over ranks count every byte once.

    ::

        with CommunicationCounter() as counter:
            engine.train_step(batch, loss)
        print(counter.bytes)

    Attributes:
        bytes: by kind, of those that occurred: all-gather, reduce-scatter, all-reduce, all-to-all, send/recv and
            broadcast. A rank's part may be no whole number; sums over ranks are.

    Raises:
        NotImplementedError: a collective that has no kind here ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes back with the local tensors that it sends
        namespace, name = func.namespace, func._schema.name.partition("::")[2]
        if namespace in ("c10d", "_c10d_functional") and name not in _FREE:
            if name not in _KIND_OF:
                raise NotImplementedError(f"no count of the bytes that {func} sends: add it to {__name__}")
            names = (argument.name for argument in func._schema.arguments)
            kind = _KIND_OF[name]
            self.bytes[kind] += _sent(kind, dict(zip(names, args, strict=False)) | dict(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _sent(kind: str, arguments: Mapping[str, Any]) -> float:
    """Bytes that one call sends from this rank."""
    given = next(arguments[name] for name in _INPUTS if name in arguments)
    size = sum(tensor.nbytes for tensor in _tensors(given))
    if kind == "send/recv":
        return size
    group = _group(arguments)
    ranks = group.size()
    if kind == "all-gather":
        return size * (ranks - 1)
    if kind == "all-to-all":
        return size - _kept(given, arguments, group)
    return size * (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)


def _kept(given: Any, arguments: Mapping[str, Any], group: ProcessGroup) -> float:
    """Bytes of an all-to-all that a rank gives to itself."""
    if not isinstance(given, Tensor):
        return _tensors(given)[group.rank()].nbytes
    splits = arguments.get("input_split_sizes")
    if not splits:
        return given.nbytes / group.size()
    return given.nbytes * splits[group.rank()] / max(1, sum(splits))


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of an argument, which may be a list, or a list of lists."""
    return [value] if isinstance(value, Tensor) else [tensor for part in value for tensor in _tensors(part)]


def _group(arguments: Mapping[str, Any]) -> ProcessGroup:
    group = arguments["process_group"] if "process_group" in arguments else arguments["group_name"]
    if isinstance(group, str):
        return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group
